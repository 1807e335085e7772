"""The user's text files as documents, and which part of them is held out.

A source is one path of `--corpus`: a file or a folder. Its documents stand in the order of their content's hash, which
no name or folder decides, and the last share of its bytes is held out: whole documents, and of one of them the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Document:
    """A file, of which the first `kept` bytes are trained on."""

    path: Path
    sha256: str
    kept: int

    @property
    def train(self) -> str:
        """The part that is trained on."""
        return self._text()[: self.kept].decode()

    @property
    def held_out(self) -> str:
        """The part that is not."""
        return self._text()[self.kept :].decode()

    def _text(self) -> bytes:
        text = _read(self.path)
        if hashlib.sha256(text).hexdigest() != self.sha256:
            raise InvalidInput(f"{self.path} has changed while it was read", where="--corpus")
        return text


@dataclass(frozen=True, slots=True)
class Source:
    """A path of the corpus and its documents.

    Args:
        name: what a path is called.
        documents: in the order of their content's hash.
        shared: whether another path holds some of them, too, and decided what of those is held out.
    """

    name: str
    documents: tuple[Document, ...]
    shared: bool = False

    @property
    def hash(self) -> str:
        """SHA-256 over contents and the cut; the name is no part of it."""
        return content_hash([[document.sha256, document.kept] for document in self.documents])


def read_sources(paths: Sequence[Path], held_out: float) -> tuple[Source, ...]:
    """The sources at `paths`; of folders, every file below them whose name does not begin with a dot.

    Args:
        paths: files and folders; a name is what stands there.
        held_out: share of each source's bytes.

    Raises:
        InvalidInput: a path holds no text, a file is empty or no UTF-8, or a path is named twice.
    """
    if not paths:
        raise InvalidInput("name at least one file or folder of text", where="--corpus")
    if len({path.resolve() for path in paths}) < len(paths):
        raise InvalidInput("a path stands twice", where="--corpus")
    cuts: dict[str, int] = {}
    return tuple(_source(path, held_out, cuts) for path in paths)


def _source(path: Path, held_out: float, cuts: dict[str, int]) -> Source:
    """The source at `path`; a text that another source cut before, in `cuts`, is cut in the same place again."""
    files = {sha256: (file, size) for file, sha256, size in map(_checked, text_files(path))}  # equal texts count once
    if not files:
        raise InvalidInput(f"{path} holds no file", where="--corpus")
    left = round(held_out * sum(size for _, size in files.values()))
    documents, shared = [], not cuts.keys().isdisjoint(files)
    for sha256, (file, size) in sorted(files.items(), reverse=True):
        if sha256 not in cuts:
            away = min(left, size)
            cuts[sha256] = _boundary(file, size - away) if 0 < away < size else size - away
        left = max(0, left - (size - cuts[sha256]))
        documents.append(Document(file, sha256, cuts[sha256]))
    return Source(str(path), tuple(reversed(documents)), shared)


def text_files(path: Path) -> Iterator[Path]:
    """The file at `path`, or those of the folder, without names that begin with a dot and what lies below such ones.

    Raises:
        InvalidInput: nothing is there.
    """
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise InvalidInput(f"{path}: no such file or folder", where="--corpus")
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file


def _checked(path: Path) -> tuple[Path, str, int]:
    """A file, the hash of its text and its bytes."""
    text = _read(path)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no UTF-8 text (byte {error.start})", where="--corpus") from None
    if not text.strip():
        raise InvalidInput(f"{path} is empty", where="--corpus")
    return path, hashlib.sha256(text).hexdigest(), len(text)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", where="--corpus") from error


def _boundary(path: Path, at: int) -> int:
    """`at`, or the byte before it where a character begins."""
    text = _read(path)
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at
