"""Documents of text and their held-out split, the same for every command that reads text.

A source is one file, folder or glob as the user names it. Its documents are its plain files and the records of its
other files, each content once. They are sorted by the hash of their content, so that names, folders and formats do not
matter, and the last share of their bytes is held out: whole documents, and the end of one.

Texts of records and of compressed files are kept in the cache; plain files are read where they are:

    $NAS_CACHE/texts/KEY/texts         texts of one file, one after another
                         index.json    SHA-256 and bytes of each
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput
from nas.core.paths import expanded
from nas.core.stored import stored_folder
from nas.model.text.reader import files_of, is_plain, read_texts, suffix_of

HELD_OUT = 0.05
"""Share of the bytes of each source that is held out, unless a command takes another one."""

_VERSION = 1
"""Of the cache: increase it with every change after which the same file gives other texts."""
_PIECE = 1 << 20
"""Characters of a piece."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text: a plain file, or a record of a file. Its first `train_size` bytes are trained on.

    Args:
        path: file that holds the text: the user's own, or one in the cache.
        start: its first byte there.
        size: its bytes in UTF-8.
        sha256: of them.
        suffix: of the user's file, in lower case and without that of a compression.
        train_size: bytes that are not held out.
    """

    path: Path
    start: int
    size: int
    sha256: str
    suffix: str
    train_size: int

    def parts(self) -> tuple[bytes, bytes]:
        """Returns the training and the held-out part of the text.

        Raises:
            InvalidInput: the file has changed since it was read first.
        """
        content = self._content()
        return content[: self.train_size], content[self.train_size :]

    @property
    def train(self) -> str:
        """Training part of the text."""
        return self.parts()[0].decode()

    @property
    def held_out(self) -> str:
        """Held-out part of the text."""
        return self.parts()[1].decode()

    def holding_out(self, size: int) -> Document:
        """Returns the document with its last `size` bytes held out, or a few more so that no character is cut."""
        cut = self.size - size
        if 0 < cut < self.size:
            content = self._content()
            while content[cut] & 0xC0 == 0x80:
                cut -= 1
        return replace(self, train_size=cut)

    def _content(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                content = file.read(self.size)
        except OSError as error:
            raise InvalidInput(f"cannot be read: {error.strerror}", where=str(self.path)) from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise InvalidInput("has changed while it was read", where=str(self.path))
        return content


@dataclass(frozen=True)
class Source:
    """A file, folder or glob of text.

    Args:
        name: as the user wrote it.
        documents: sorted by the hash of their content.
        shared: whether some of them are also in an earlier source, whose split they keep.
    """

    name: str
    documents: tuple[Document, ...]
    shared: bool = False

    @cached_property
    def hash(self) -> str:
        """SHA-256 over texts and split, without the name: 64 hex digits."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.sha256} {document.train_size}\n".encode())
        return digest.hexdigest()


class _Budget:
    """Counts the bytes of text that may be read."""

    def __init__(self, limit: int, where: str) -> None:
        self._limit, self._used, self._where = limit, 0, where

    def require(self, size: int) -> None:
        if self._used + size > self._limit:
            raise InvalidInput(f"too much text: at most {self._limit:,} bytes are read", where=self._where)

    def take(self, size: int) -> None:
        self.require(size)
        self._used += size


def read_sources(
    entries: Sequence[str | Path],
    held_out: float,
    *,
    base: Path = Path(),
    column: str = "text",
    most: int = sys.maxsize,
    where: str = "--corpus",
) -> tuple[Source, ...]:
    """Reads sources of text and splits them; a text that is in several of them is split the same way in all.

    Args:
        entries: paths of files and folders, and globs.
        held_out: share of each source's bytes.
        base: folder of relative paths.
        column: key or column that holds the text of a record.
        most: bytes of text in all.
        where: of error messages about entries.

    Raises:
        InvalidInput: an entry holds no text or is named twice, a file cannot be used, or there is too much text.

    Example:
        >>> (source,) = read_sources(["books/"], held_out=0.05)
        >>> source.documents[0].train
    """
    if not entries:
        raise InvalidInput("name at least one file or folder of text", where=where)
    if any("\0" in str(entry) for entry in entries):
        raise InvalidInput("a path holds a null character", where=where)
    if len({(base / expanded(entry, where)).resolve() for entry in entries}) < len(entries):
        raise InvalidInput("a path is named twice", where=where)
    budget, splits, sources = _Budget(most, where), dict[str, Document](), []
    for entry in entries:
        texts: dict[str, Document] = {}
        for path, is_named in files_of(entry, base, where):
            documents = _documents(path, column, budget)
            if is_named and not documents:
                raise InvalidInput("is empty", where=str(path))
            texts |= {document.sha256: document for document in documents}
        if not texts:
            raise InvalidInput(f"{entry} holds no text", where=where)
        sources.append(_split(str(entry), texts, held_out, splits))
    return tuple(sources)


def files_read(entries: Sequence[Path], where: str = "--corpus") -> list[Path]:
    """Returns the files that `read_sources` reads of entries, none of which an output may overwrite."""
    return [path for entry in entries for path, _ in files_of(entry, Path(), where)]


def _split(name: str, texts: dict[str, Document], held_out: float, splits: dict[str, Document]) -> Source:
    """Returns a source; `splits` has the documents of earlier ones, whose split is kept, and gets those of this one."""
    remaining = round(held_out * sum(document.size for document in texts.values()))
    documents, shared = [], not splits.keys().isdisjoint(texts)
    for sha256, document in sorted(texts.items(), reverse=True):
        if sha256 not in splits:
            splits[sha256] = document.holding_out(min(remaining, document.size))
        train_size = splits[sha256].train_size
        remaining = max(0, remaining - (document.size - train_size))
        documents.append(replace(document, train_size=train_size))
    return Source(name, tuple(reversed(documents)), shared)


def _documents(path: Path, column: str, budget: _Budget) -> list[Document]:
    """Returns the documents of a file that are not blank, with nothing held out."""
    suffix, texts = suffix_of(path), path
    if is_plain(path):
        budget.require(path.stat().st_size)
        index = [_described(text) for text in read_texts(path, column) if text.strip()]
    else:
        try:
            content = sha256_of(path)
        except OSError as error:
            raise InvalidInput(f"cannot be read: {error.strerror}", where=str(path)) from error
        key = [content, path.suffix.lower(), suffix, column]
        folder = stored_folder("texts", _VERSION, key, lambda folder: _unpack(path, column, budget, folder))
        texts, index = folder / "texts", json.loads((folder / "index.json").read_text(encoding="utf-8"))
    budget.take(sum(size for _, size in index))
    starts = accumulate((size for _, size in index), initial=0)
    return [
        Document(texts, start, size, sha256, suffix, size) for start, (sha256, size) in zip(starts, index, strict=False)
    ]


def _unpack(path: Path, column: str, budget: _Budget, folder: Path) -> None:
    index, total = [], 0
    with (folder / "texts").open("wb") as file:
        for text in read_texts(path, column):
            if text.strip():
                total += len(text)
                budget.require(total)
                file.write(text)
                index.append(_described(text))
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _described(text: bytes) -> tuple[str, int]:
    return hashlib.sha256(text).hexdigest(), len(text)


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yields the first `limit` bytes of texts that are not empty, the last of them cut at the end of a character."""
    for text in texts:
        if limit <= 0:
            return
        content = text.encode()
        if part := content[:limit].decode(errors="ignore"):
            yield part
        limit -= len(content)


def text_pieces(text: str) -> Iterator[str]:
    """Yields `text` in pieces of at most a million characters, cut at the end of a line if possible."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
