"""Reads files of text: plain text, JSON lines, JSON, Parquet and Arrow, each also compressed, and folders of them.

Files are untrusted data: nothing is unpickled, a bad record is an error with its file and line, and sizes are bounded
before memory is used. Parquet, Arrow and Zstandard need `pyarrow`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any

from nas.core.errors import InvalidInput
from nas.core.paths import expanded

MAX_RECORD = 1 << 26
"""Most bytes of a line of JSON."""
MAX_FILE = 1 << 30
"""Most bytes of a compressed file that has to be unpacked into memory."""

_COMPRESSED = (".gz", ".zst")
_TEXT = """
.adoc .bash .bat .c .cc .cfg .clj .cmake .cpp .cs .css .csv .cu .cxx .dart .diff .el .erl .ex .f90 .go .h .hh .hpp .hs
.html .ini .java .jl .js .jsx .kt .log .lua .m .markdown .md .ml .org .patch .php .pl .proto .ps1 .py .pyi .r .rb .rs
.rst .scala .sh .sql .swift .tcl .tex .text .toml .ts .tsv .tsx .txt .vue .xml .yaml .yml .zig
"""
"""Suffixes of text files in folders, where files without a suffix are text as well. Named files may have any."""
_ROWS = 256
"""Rows of a Parquet batch."""
_BEGIN = 1 << 12
"""Bytes in which a .json file shows whether it is a list."""

Reader = Callable[[Path, str], Iterator[bytes]]


def files_of(entry: str | Path, base: Path, where: str) -> list[tuple[Path, bool]]:
    """Returns the files of an entry, sorted, and of each whether it is named, in contrast to found in a folder.

    Args:
        entry: path of a file or folder, or a glob.
        base: folder of relative paths.
        where: of error messages, such as "--corpus".

    Raises:
        InvalidInput: there is no such file, or a folder without readable files.
    """
    named = expanded(entry, where)
    path = base.absolute() / named
    if path.is_dir():
        files = [(file, False) for file in _files_below(path)]
        if not files:
            raise InvalidInput(f"{path} holds no file of text, JSON lines, Parquet or Arrow", where=where)
        return files
    try:
        # Only what the user wrote is a pattern: the folder may be called "[old] texts".
        root, pattern = base.absolute() / named.anchor, str(named.relative_to(named.anchor))
        matches = [path] if path.exists() else sorted(root.glob(pattern))
    except ValueError as error:
        raise InvalidInput(f"{path}: {error}", where=where) from error
    if not (files := [(file, True) for file in matches if file.is_file()]):
        problem = "the pattern matches no file" if has_magic(str(entry)) else "no such file or folder"
        raise InvalidInput(f"{path}: {problem}", where=where)
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields the readable files below a folder; of one that `datasets` saved, those that its state names.

    .json files, which are configuration more often than records, are read only if they are named.
    """
    readable = {"", *_TEXT.split(), *_READERS} - {".json"}
    for name, folders, names in os.walk(folder):
        if {"state.json", "dataset_info.json"} <= set(names):
            folders.clear()
            yield from _saved_dataset(Path(name))
            continue
        folders[:] = sorted(child for child in folders if not child.startswith("."))
        for path in (Path(name, file) for file in sorted(names) if not file.startswith(".")):
            if suffix_of(path) in readable and path.is_file():
                yield path


def _saved_dataset(folder: Path) -> list[Path]:
    """Returns the Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote, in the order of their rows."""
    where = folder / "state.json"
    try:
        state = json.loads(where.read_bytes())
        names = [file["filename"] for file in state["_data_files"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidInput("is not the state of a saved data set", where=str(where)) from error
    files = [folder / str(name) for name in names]
    if outside := [str(file) for file in files if file.parent != folder or not file.is_file()]:
        raise InvalidInput(f"names {outside[0]}, which is no file of the folder", where=str(where))
    return files


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file in lower case, without that of a compression: ".jsonl" of A.JSONL.gz."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return name.suffix.lower()


def is_plain(path: Path) -> bool:
    """Returns whether the bytes of a file are its text: no records, and not compressed."""
    return not is_compressed(path) and suffix_of(path) not in _READERS


def is_compressed(path: Path) -> bool:
    """Returns whether the name of a file ends as those of compressed ones."""
    return path.suffix.lower() in _COMPRESSED


def read_texts(path: Path, column: str) -> Iterator[bytes]:
    """Yields the texts of a file in UTF-8: of plain text one, of records that of `column` in each.

    Raises:
        InvalidInput: it cannot be read, or a record has no text; the message names file and line.
    """
    try:
        yield from _READERS.get(suffix_of(path), _plain_text)(path, column)
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _plain_text(path: Path, column: str) -> Iterator[bytes]:
    content = path.read_bytes() if is_plain(path) else unpacked(path)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"is not UTF-8 text (byte {error.start})", where=str(path)) from error
    yield content


def _json_lines(path: Path, column: str) -> Iterator[bytes]:
    with closing(_opened(path)) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.strip():
                where = f"{path}:{number}"
                yield _text_of(_parsed(line, where), column, where)


def _json_file(path: Path, column: str) -> Iterator[bytes]:
    """Yields the texts of a file that holds a list of objects, or an object on each line."""
    with _unpacking(str(path)), closing(_opened(path)) as file:
        begin = file.read(_BEGIN).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not begin.startswith(b"["):
        yield from _json_lines(path, column)
        return
    for number, record in enumerate(_parsed(unpacked(path), str(path)), 1):
        yield _text_of(record, column, f"{path}, record {number}")


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"is not JSON: {error}", where=where) from error


def _text_of(record: object, column: str, where: str) -> bytes:
    if not isinstance(record, dict):
        raise InvalidInput(f"is a {type(record).__name__}, not an object with {column!r}", where=where)
    if column not in record:
        raise InvalidInput(_no_column(column, record), where=where)
    return _encoded(record[column], column, where)


def _opened(path: Path) -> io.BufferedIOBase:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".zst":
            return io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
        case _:
            return path.open("rb")


def _lines(file: io.BufferedIOBase, path: Path) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        where = f"{path}:{number}"
        with _unpacking(where):
            line = file.readline(MAX_RECORD + 1)
        if not line:
            return
        if len(line) > MAX_RECORD:
            raise InvalidInput(f"is longer than {MAX_RECORD:,} bytes", where=where)
        yield line


def unpacked(path: Path) -> bytes:
    """Returns the content of a file that may be compressed.

    Raises:
        InvalidInput: it cannot be read, or is too large.
    """
    with _unpacking(str(path)), closing(_opened(path)) as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise InvalidInput(f"is larger than {MAX_FILE:,} bytes when unpacked: write JSON lines", where=str(path))
    return content


@contextmanager
def _unpacking(where: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, zlib.error, OSError) as error:
        raise InvalidInput(f"cannot be read: {error}", where=where) from error


def _parquet(path: Path, column: str) -> Iterator[bytes]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    with (
        _arrow_errors(pyarrow, path),
        _arrow_source(pyarrow, path) as source,
        parquet.ParquetFile(source) as file,
    ):
        _require_column(column, file.schema_arrow.names, path)
        batches = file.iter_batches(batch_size=_ROWS, columns=[column])
        yield from _cells((batch.column(0) for batch in batches), path, column)


def _arrow(path: Path, column: str) -> Iterator[bytes]:
    """Yields the column of an Arrow stream, as `datasets` writes it, or of an Arrow file."""
    pyarrow = _pyarrow(path)
    with _arrow_errors(pyarrow, path), _arrow_source(pyarrow, path) as source:
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches, names = map(file.get_batch, range(file.num_record_batches)), file.schema.names
        else:
            source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
            names = batches.schema.names
        _require_column(column, names, path)
        yield from _cells((batch.column(names.index(column)) for batch in batches), path, column)


def _arrow_source(pyarrow: Any, path: Path) -> Any:
    return pyarrow.BufferReader(unpacked(path)) if is_compressed(path) else pyarrow.memory_map(str(path))


def _cells(columns: Iterable[Any], path: Path, column: str) -> Iterator[bytes]:
    row = 0
    for cells in columns:
        for cell in cells:
            row += 1
            where = f"{path}, row {row}"
            if cell.is_valid and hasattr(cell, "as_buffer") and cell.as_buffer().size > MAX_RECORD:
                raise InvalidInput(f"is longer than {MAX_RECORD:,} bytes", where=where)
            try:
                value = cell.as_py()
            except UnicodeDecodeError as error:  # pyarrow checks nothing before
                raise InvalidInput(f"{column!r} is not UTF-8 text (byte {error.start})", where=where) from error
            yield _encoded(value, column, where)


def _encoded(value: object, column: str, where: str) -> bytes:
    if not isinstance(value, str):
        raise InvalidInput(f"{column!r} is {type(value).__name__}, not text", where=where)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{column!r} holds half of a surrogate pair, which is no character", where=where) from error


def _require_column(column: str, names: Iterable[str], path: Path) -> None:
    if column not in names:
        raise InvalidInput(_no_column(column, names), where=str(path))


def _no_column(column: str, names: Iterable[str]) -> str:
    columns = ", ".join(repr(name) for name in sorted(names)[:8])
    return (
        f"has no {column!r}, only {columns or 'nothing'}: rename the column that holds the text; a search space names"
        " another one as `text: NAME` beside `files`"
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
        raise InvalidInput(
            f"{path.name} needs pyarrow: pip install '.[corpora]' in a checkout", where=str(path)
        ) from error
    return pyarrow


_READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
"""Suffix of files of records -> its reader."""
