"""Corpora of the user's own text files. Each path or glob of the list is one domain, named as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nas.core.errors import InvalidInput

MAX_BYTES = 1 << 30
"""Largest corpus that is read into memory."""


def read_domains(entries: Sequence[str], base: Path) -> dict[str, list[bytes]]:
    """Texts of each entry, files in sorted order. Relative entries are taken from `base`.

    Raises:
        InvalidInput: an entry matches no file, a file cannot be read, is empty or is not UTF-8 text, or all together
            exceed `MAX_BYTES`.
    """
    files = {entry: _files(entry, base) for entry in entries}
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    if size > MAX_BYTES:
        raise InvalidInput(f"the corpus has {size:,} bytes; at most {MAX_BYTES:,} are read")
    return {entry: [_read_text(path) for path in paths] for entry, paths in files.items()}


def _files(entry: str, base: Path) -> list[Path]:
    path = base.resolve() / Path(entry).expanduser()
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; write '{entry.rstrip('/')}/*' for the files in it", where="corpus")
    found = [path] if path.exists() else _matches(path)
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise InvalidInput(f"{path} matches no file", where="corpus")
    return files


def _matches(pattern: Path) -> list[Path]:
    return list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))


def _read_text(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", where="corpus") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text (byte {error.start})", where="corpus") from error
    if not data.strip():
        raise InvalidInput(f"{path} is empty", where="corpus")
    return data
