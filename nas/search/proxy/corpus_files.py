"""Texts of the user's files: plain text, JSON lines, Parquet, Arrow, and folders of them, also those of `datasets`.

Files are data that nobody has checked: nothing is unpickled, a bad record is an error with its file and line, and sizes
are bounded before memory is used. Parquet, Arrow and Zstandard need `pyarrow`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from nas.core.errors import InvalidInput

MAX_BYTES = 1 << 30
"""Largest corpus: it is read into memory once."""
MAX_RECORD = 1 << 26
"""Largest line of a JSON lines file."""
SMALL = 1 << 16
"""Files of an entry that are smaller than this are joined, so that whole documents are held out, not ends of each."""

_RECORD_SEPARATOR = "\n\n"
_TEXT = (
    ".adoc", ".bash", ".c", ".cc", ".cfg", ".cpp", ".cs", ".css", ".csv", ".cu", ".go", ".h", ".hpp", ".html", ".ini",
    ".java", ".jl", ".js", ".kt", ".lua", ".md", ".org", ".php", ".pl", ".py", ".pyi", ".r", ".rb", ".rs",
    ".rst", ".scala", ".sh", ".sql", ".swift", ".tex", ".toml", ".ts", ".tsv", ".tsx", ".txt", ".xml", ".yaml", ".yml",
    ".zig",
)  # fmt: skip
"""Suffixes of text files that are read in folders; a file that is named itself may have any."""
_ROWS = 256
"""Rows of a Parquet batch."""


class Budget:
    """Counts bytes of text.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, size: int) -> None:
        """Subtracts `size`.

        Raises:
            InvalidInput: the limit is passed.
        """
        self._left -= size
        if self._left < 0:
            raise InvalidInput(
                f"the corpus is too large: at most {self._limit:,} bytes of text are read", where="corpus"
            )


def read_entry(entry: str, base: Path, column: str, budget: Budget) -> list[bytes]:
    """Returns the texts of one entry: a file, a folder with all below it, or a glob.

    Args:
        entry: as the user wrote it.
        base: folder of relative paths.
        column: key or column that holds the text of a record.
        budget: bytes that may still be read.

    Returns:
        Each file's text, with the records of a file joined; small files come first and are joined into one text, in
        the order of the hash of their contents.

    Raises:
        InvalidInput: no file matches, or one cannot be used; the message has the file and the line.
    """
    named = _named(entry, base)
    large, small = [], {}
    for path, explicit in named:
        text = _read(path, column, budget)
        if not text.strip():
            if explicit:
                raise InvalidInput(f"{path} is empty", where="corpus")
            continue
        if len(text) >= SMALL:
            large.append(text)
        else:
            small[hashlib.sha256(text).digest()] = text
    joined = b"\n\n".join(text for _, text in sorted(small.items()))
    return [*([joined] if joined else []), *large]


def _named(entry: str, base: Path) -> list[tuple[Path, bool]]:
    """Returns the files of an entry, sorted, and whether each is named by itself rather than found in a folder."""
    path = base.resolve() / Path(entry).expanduser()
    if path.is_dir():
        found = [(file, False) for file in _below(path)]
        if not found:
            raise InvalidInput(f"{path} holds no file of text, JSON lines, Parquet or Arrow", where="corpus")
        return found
    matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    files = [(file, True) for file in matches if file.is_file()]
    if not files:
        raise InvalidInput(f"{path} matches no file", where="corpus")
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Yields the readable files below a folder; of one that `datasets` saved, those that its state names."""
    for name, folders, files in os.walk(folder):
        here = Path(name)
        if {"state.json", "dataset_info.json"} <= set(files):
            folders.clear()
            yield from _saved_dataset(here)
            continue
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for file in sorted(files):
            path = here / file
            readable = _record_reader(path) is not None or file.lower().endswith(_TEXT)
            if readable and not file.startswith(".") and path.is_file():
                yield path


def _saved_dataset(folder: Path) -> list[Path]:
    """Returns the Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote, in the order of their rows."""
    where = folder / "state.json"
    try:
        state = json.loads(where.read_bytes())
        names = [each["filename"] for each in state["_data_files"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidInput("is not the state of a saved data set", where=str(where)) from error
    files = [folder / str(name) for name in names]
    if outside := [str(file) for file in files if file.parent != folder or not file.is_file()]:
        raise InvalidInput(f"names {outside[0]}, which is no file of the folder", where=str(where))
    return files


def _read(path: Path, column: str, budget: Budget) -> bytes:
    reader = _record_reader(path)
    try:
        if reader is None:
            budget.take(path.stat().st_size)
            return _utf8(path)
        records = []
        for record in reader(path, column):
            budget.take(len(record) + len(_RECORD_SEPARATOR))
            records.append(record)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}", where="corpus") from error
    return _RECORD_SEPARATOR.encode().join(records)


def _utf8(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text (byte {error.start})", where="corpus") from error
    return data


_Reader = Callable[[Path, str], Iterator[bytes]]


def _record_reader(path: Path) -> _Reader | None:
    """Returns the reader of a file of records by its name; None: plain text."""
    name = path.name.lower()
    for suffixes, reader in _READERS:
        if name.endswith(suffixes):
            return reader
    return None


def _json_lines(path: Path, column: str) -> Iterator[bytes]:
    with closing(_opened(path)) as file:
        for number, line in enumerate(_lines(file, path), 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"is not JSON: {error}", where=where) from error
            if not isinstance(record, dict):
                raise InvalidInput(f"is a {type(record).__name__}, not an object with {column!r}", where=where)
            if column not in record:
                raise InvalidInput(_no_column(column, record), where=where)
            yield _encoded(record[column], column, where)


def _lines(file: io.BufferedIOBase, path: Path) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_RECORD + 1)
        except (EOFError, ValueError, zlib.error, OSError) as error:
            raise InvalidInput(f"cannot be read: {error}", where=f"{path}:{number}") from error
        if not line:
            return
        if len(line) > MAX_RECORD:
            raise InvalidInput(f"is longer than {MAX_RECORD:,} bytes", where=f"{path}:{number}")
        yield line


def _opened(path: Path) -> io.BufferedIOBase:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")
    if name.endswith(".zst"):
        return io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _parquet(path: Path, column: str) -> Iterator[bytes]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    with _arrow_errors(pyarrow, path), parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise InvalidInput(_no_column(column, names), where=str(path))
        batches = file.iter_batches(batch_size=_ROWS, columns=[column])
        yield from _cells((batch.column(0) for batch in batches), path, column)


def _arrow(path: Path, column: str) -> Iterator[bytes]:
    """Yields the column of an Arrow stream, as `datasets` writes it, or of an Arrow file."""
    pyarrow = _pyarrow(path)
    with _arrow_errors(pyarrow, path), pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches, names = map(file.get_batch, range(file.num_record_batches)), file.schema.names
        else:
            source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
            names = batches.schema.names
        if column not in names:
            raise InvalidInput(_no_column(column, names), where=str(path))
        yield from _cells((batch.column(column) for batch in batches), path, column)


def _cells(columns: Iterable[Any], path: Path, column: str) -> Iterator[bytes]:
    row = 0
    for cells in columns:
        for cell in cells:
            row += 1
            yield _encoded(cell.as_py(), column, f"{path}, row {row}")


def _encoded(value: object, column: str, where: str) -> bytes:
    if not isinstance(value, str):
        raise InvalidInput(f"{column!r} is {type(value).__name__}, not text", where=where)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{column!r} holds half of a surrogate pair, which is no character", where=where) from error


def _no_column(column: str, names: Iterable[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(names)[:8])
    return (
        f"has no {column!r}, only {shown or 'nothing'}: write which one holds the text, as `text: NAME` beside `files`"
    )


@contextmanager
def _arrow_errors(pyarrow: Any, path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidInput(f"cannot be read: {error}", where=str(path)) from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidInput(f"{path.name} needs pyarrow: pip install pyarrow", where="corpus") from error
    return pyarrow


_READERS: tuple[tuple[tuple[str, ...], _Reader], ...] = (
    ((".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"), _json_lines),
    ((".parquet",), _parquet),
    ((".arrow",), _arrow),
)
