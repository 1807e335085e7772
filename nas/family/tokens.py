"""Corpora as token ids: made once per text and tokenizer, kept in the cache folder, mapped into memory from there.

$NAS_CACHE/tokens/KEY/train.bin       ids of the training part, documents one after another
                      heldout.bin     ids of the held-out part
                      index.json      what they are
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput
from nas.family.documents import Document, Source
from nas.family.fim import cut
from nas.family.recipe import Fim
from nas.family.vocabulary import Ids, Vocabulary

RECIPE = 1
"""Raise it whenever the same text and tokenizer give other ids: cached ones are then not used."""
MIN_HELD_OUT = 1024
"""Bytes; fewer say nothing about a model."""

Stored = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Tokens:
    """A source as ids.

    Args:
        name: of the source.
        key: over text, tokenizer and settings.
        train: ids of the training part.
        held_out: ids of the held-out part, or of its beginning.
        held_out_bytes: of text behind `held_out`; below `MIN_HELD_OUT` too few to score a model on.
    """

    name: str
    key: str
    train: Stored
    held_out: Stored
    held_out_bytes: int


@dataclass(frozen=True)
class _Index:
    dtype: str
    train: int
    held_out: int
    held_out_bytes: int


def tokenise(source: Source, vocabulary: Vocabulary, fim: Fim | None, seed: int, eval_bytes: int) -> Tokens:
    """The ids of `source`, from the cache or made now.

    Args:
        source: the text.
        vocabulary: its tokenizer.
        fim: which documents are cut for fill-in-the-middle; None: none.
        seed: of the cuts.
        eval_bytes: largest part of the held-out text that is kept.

    Raises:
        InvalidInput: the held-out text is too small (of a path that shares texts with another it may be: the other's
            share was held out), or the tokenizer loses some of it.
    """
    cuts = None if fim is None else [fim.share, sorted(fim.suffixes), seed]
    names = sorted(document.path.suffix for document in source.documents) if fim else []
    key = content_hash([RECIPE, source.hash, vocabulary.sha256, cuts, names, eval_bytes])
    folder = paths.cache() / "tokens" / key
    if not (folder / "index.json").is_file():
        _make(folder, source, vocabulary, _Cutter(fim, seed), eval_bytes)
    return open_tokens(source.name, key)


def open_tokens(name: str, key: str) -> Tokens:
    """What `tokenise` made under `key`.

    Raises:
        FileNotFoundError: somebody emptied the cache.
    """
    folder = paths.cache() / "tokens" / key
    index = _Index(**json.loads((folder / "index.json").read_text()))
    return Tokens(
        name,
        key,
        _mapped(folder / "train.bin", index.dtype, index.train),
        _mapped(folder / "heldout.bin", index.dtype, index.held_out),
        index.held_out_bytes,
    )


def _mapped(path: Path, dtype: str, count: int) -> Stored:
    """An empty file cannot be mapped."""
    mapped: Stored = np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
    return mapped


@dataclass(frozen=True)
class _Cutter:
    """Decides which documents are cut for fill-in-the-middle, by their content alone."""

    fim: Fim | None
    seed: int

    def ids(self, document: Document, vocabulary: Vocabulary) -> Ids:
        generator = np.random.default_rng([self.seed, int(document.sha256[:16], 16)])
        code = self.fim is not None and document.path.suffix in self.fim.suffixes
        if self.fim is not None and code and generator.random() < self.fim.share:
            return vocabulary.filled(cut(document.train, generator))
        return vocabulary.document(document.train)


def _make(folder: Path, source: Source, vocabulary: Vocabulary, cutter: _Cutter, eval_bytes: int) -> None:
    """Writes the folder beside its place and renames it: it is whole or not there."""
    held_out = list(_limited((document.held_out for document in source.documents), eval_bytes))
    size = sum(len(text.encode()) for text in held_out)
    if size < MIN_HELD_OUT and not source.shared:
        raise InvalidInput(
            f"{source.name}: {size:,} bytes would be held out; at least {MIN_HELD_OUT:,} are needed to score a model,"
            " so give more text or hold out a larger share",
            where="--corpus",
        )
    for text in held_out:
        vocabulary.check_lossless(text)
    dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.uint32
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        partial = Path(scratch) / "tokens"
        partial.mkdir()
        with (partial / "train.bin").open("wb") as file:
            train = _write(file, (cutter.ids(each, vocabulary) for each in source.documents if each.kept), dtype)
        with (partial / "heldout.bin").open("wb") as file:
            scored = _write(file, (vocabulary.document(text) for text in held_out), dtype)
        index = _Index(np.dtype(dtype).name, train, scored, size)
        (partial / "index.json").write_text(json.dumps(asdict(index)))
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "index.json").is_file():  # or else somebody made the same meanwhile
                shutil.rmtree(folder)
                partial.rename(folder)


def _write(file: BinaryIO, documents: Iterator[Ids], dtype: type[np.uint16] | type[np.uint32]) -> int:
    count = 0
    for ids in documents:
        file.write(ids.astype(dtype).tobytes())
        count += len(ids)
    return count


def _limited(texts: Iterator[str], limit: int) -> Iterator[str]:
    """The first `limit` bytes of texts that are not empty, the last of them cut where a character ends."""
    for text in texts:
        if limit <= 0:
            return
        whole = text.encode()
        if part := whole[:limit].decode(errors="ignore"):
            yield part
        limit -= len(whole)
