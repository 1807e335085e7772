"""Token ids of documents for members: a tokenizer's marks, fill-in-the-middle, and the cache. No torch.

A source of text (`nas.model.text.documents`) is encoded once per tokenizer; ids are mapped into memory:

    $NAS_CACHE/tokens/KEY/train.bin     ids of the training part, one document after another
                          heldout.bin   ids of the held-out part
                          index.json    sizes and type of both
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput, UnknownName
from nas.core.stored import stored_folder
from nas.model.text.documents import Document, Source, first_bytes, text_pieces
from nas.train.pretrain.recipe import Fim
from nas.train.release.tokenizer import BOS, END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, Marks

TOKENS_VERSION = 2
"""Part of keys: increase it with every change after which the same text and tokenizer give other ids."""
MIN_HELD_OUT = 1024
"""Fewest held-out bytes that a model is scored on."""

_AT_ONCE = 1 << 24
"""Characters that are encoded together: an encoding is many times larger than its ids."""

Ids = NDArray[np.int64]
StoredIds = NDArray[np.uint16] | NDArray[np.uint32]
Parts = Sequence[int | str]
"""A document: marks and texts, in their order."""


class FimCut(NamedTuple):
    """A document cut in three for fill-in-the-middle; with `suffix_first` the suffix precedes the prefix."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool


def cut_for_fim(text: str, generator: np.random.Generator) -> FimCut:
    """Cuts `text` at two random characters; both orders are equally likely.

    Bavarian et al. 2022, "Efficient training of language models to fill in the middle", section 3: PSM or SPM; section
    3.1: character level, context free.
    """
    first, last = sorted(int(at) for at in generator.integers(len(text) + 1, size=2))
    return FimCut(text[:first], text[first:last], text[last:], bool(generator.random() < 0.5))


class Vocabulary:
    """Tokenizer of training data, checked against the vocabulary of a layout.

    A document is encoded as a mark, its ids, a mark. Text that spells a special token is encoded as text.

    Args:
        path: the tokenizer.json.
        rows: of the embedding table, at least the number of tokens.
        fim: whether documents will be cut for fill-in-the-middle.
        marks: of documents; None: BOS and END_OF_TEXT, which the tokenizer must have.

    Raises:
        InvalidInput: the file is not a tokenizer, or it has more tokens than the table has rows.
        UnknownName: it lacks a special token that is needed.
    """

    def __init__(self, path: Path, rows: int, *, fim: bool = False, marks: Marks | None = None) -> None:
        try:
            content = path.read_bytes()
            self._tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}", where="--tokenizer") from error
        except Exception as error:  # the library raises no narrower class
            raise InvalidInput(f"{path} is no tokenizer.json: {error}", where="--tokenizer") from None
        self.path, self.rows = path, rows
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.size > rows:
            raise InvalidInput(
                f"{path} has {self.size:,} tokens, but the member's vocabulary is {rows:,}: train a tokenizer of"
                " that size, or build the family for this vocabulary",
                where="--tokenizer",
            )
        if marks is None:
            self.start, self.end = self._mark(BOS), self._mark(END_OF_TEXT)
        else:
            self.start, self.end = marks
            self.sha256 = content_hash([self.sha256, marks])
        special = (i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)
        self.special = (self.start, self.end, *special)
        """Tokens that stand for no bytes of a text, such as those of a chat template."""
        self._fim = [self._mark(name) for name in (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE)] if fim else []

    def document(self, text: str) -> Parts:
        """Returns `text` between its marks; where these are equal, the second one is left out."""
        return (self.start, text) if self.end == self.start else (self.start, text, self.end)

    def fim_document(self, cut: FimCut) -> Parts:
        """Returns a document that was cut for fill-in-the-middle (Bavarian et al. 2022, 3.1 and 3.2).

        PSM: prefix mark, prefix, suffix mark, suffix, middle mark, middle. SPM, in the variant that shares its form
        with PSM: prefix mark, suffix mark, suffix, middle mark, prefix, middle.
        """
        prefix, suffix, middle = self._fim
        if cut.suffix_first:
            return (self.start, prefix, suffix, cut.suffix, middle, cut.prefix, cut.middle, self.end)
        return (self.start, prefix, cut.prefix, suffix, cut.suffix, middle, cut.middle, self.end)

    def encode_documents(self, documents: Iterable[Parts]) -> Iterator[Ids]:
        """Yields the ids of each document; many short ones are encoded together."""
        ahead, documents = tee(documents)
        texts = (part for document in ahead for part in document if isinstance(part, str))
        pieces = self._encoded(piece for text in texts for piece in text_pieces(text))
        for document in documents:
            ids: list[Ids] = []
            for part in document:
                if isinstance(part, int):
                    ids.append(np.asarray([part], np.int64))
                else:
                    ids += [next(pieces) for _ in text_pieces(part)]
            yield np.concatenate(ids)

    def encode(self, text: str) -> Ids:
        """Returns the ids of `text`, without marks."""
        return np.concatenate([np.zeros(0, np.int64), *self._encoded(text_pieces(text))])

    def _encoded(self, pieces: Iterable[str]) -> Iterator[Ids]:
        for batch in _batches(pieces):
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int64)

    def encode_with_ends(self, text: str) -> tuple[Ids, Ids]:
        """Returns the ids of a short `text`, and for each the number of characters up to its end."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int64), np.asarray([end for _, end in encoding.offsets], np.int64)

    def bytes_of(self, ids: StoredIds) -> int:
        """Returns the bytes of the text of `ids`, without marks and a first character that is cut."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return len(text.lstrip("\ufffd").encode())

    def check_lossless(self, text: str) -> None:
        """Checks that the ids of `text` decode to it or to its composed form (NFC), as bits per byte count its bytes.

        Raises:
            InvalidInput: they decode to another text.
        """
        for piece in text_pieces(text):
            back = self._tokenizer.decode(self.encode(piece).tolist(), skip_special_tokens=False)
            if back not in (piece, unicodedata.normalize("NFC", piece)):
                at = next((i for i, (a, b) in enumerate(zip(piece, back, strict=False)) if a != b), len(back))
                raise InvalidInput(
                    f"{self.path} loses text: {piece[at : at + 20]!r} comes back as {back[at : at + 20]!r};"
                    " a byte-level tokenizer without normaliser keeps everything",
                    where="--tokenizer",
                )

    def _mark(self, name: str) -> int:
        number = self._tokenizer.token_to_id(name)
        if number is None:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise UnknownName(f"special token of {self.path}", name, special, where="--tokenizer")
        return int(number)


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Yields lists of pieces with `_AT_ONCE` characters or more; the last one has fewer."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    yield batch


@dataclass(frozen=True)
class Tokens:
    """Token ids of a source.

    Args:
        name: of the source.
        key: over text, tokenizer and settings.
        train: ids of the training part.
        held_out: ids of the held-out part, or of its beginning.
        held_out_bytes: size of the text of `held_out`; below `MIN_HELD_OUT` models are not scored on it.
    """

    name: str
    key: str
    train: StoredIds
    held_out: StoredIds
    held_out_bytes: int


@dataclass(frozen=True)
class _Index:
    dtype: str
    train: int
    held_out: int
    held_out_bytes: int


def tokenise(source: Source, vocabulary: Vocabulary, fim: Fim | None, seed: int, eval_bytes: int) -> Tokens:
    """Returns the ids of `source`, from the cache if they are there.

    Args:
        source: the text.
        vocabulary: its tokenizer.
        fim: which documents are cut for fill-in-the-middle; None: none.
        seed: of the cuts.
        eval_bytes: most bytes of held-out text that are kept.

    Raises:
        InvalidInput: the held-out text is too small (unless the source shares texts with an earlier one), or the
            tokenizer loses some of it.
    """
    cut = [document.suffix in fim.suffixes for document in source.documents] if fim else []
    inputs = [source.hash, vocabulary.sha256, fim and [fim.share, seed, cut], eval_bytes]

    def write(folder: Path) -> None:
        held_out = _held_out_texts(source, vocabulary, eval_bytes)
        trained = (_training_parts(text, vocabulary, fim, seed) for text in source.documents if text.train_size)
        _write_ids(
            folder,
            vocabulary,
            vocabulary.encode_documents(trained),
            vocabulary.encode_documents(map(vocabulary.document, held_out)),
            sum(len(text.encode()) for text in held_out),
        )

    return open_tokens(source.name, stored_folder("tokens", TOKENS_VERSION, inputs, write).name)


def store_tokens(
    name: str, inputs: Any, vocabulary: Vocabulary, train: Sequence[Ids], held_out: Sequence[Ids], held_out_bytes: int
) -> Tokens:
    """Returns a source of documents that are ids already, which it puts into the cache.

    Args:
        name: of the source.
        inputs: all that the ids depend on, as JSON values.
        vocabulary: of the ids.
        train: documents of the training part.
        held_out: documents of the held-out part.
        held_out_bytes: size of their text.
    """

    def write(folder: Path) -> None:
        _write_ids(folder, vocabulary, train, held_out, held_out_bytes)

    return open_tokens(name, stored_folder("tokens", TOKENS_VERSION, [name, inputs], write).name)


def _write_ids(
    folder: Path, vocabulary: Vocabulary, train: Iterable[Ids], held_out: Iterable[Ids], held_out_bytes: int
) -> None:
    dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.uint32
    with (folder / "train.bin").open("wb") as file:
        trained = _write(file, train, dtype)
    with (folder / "heldout.bin").open("wb") as file:
        scored = _write(file, held_out, dtype)
    index = _Index(np.dtype(dtype).name, trained, scored, held_out_bytes)
    (folder / "index.json").write_text(json.dumps(asdict(index)), encoding="utf-8")


def open_tokens(name: str, key: str) -> Tokens:
    """Opens the ids that `tokenise` wrote under `key`.

    Raises:
        FileNotFoundError: they were removed from the cache.
    """
    folder = paths.cache() / "tokens" / key
    index = _Index(**json.loads((folder / "index.json").read_text(encoding="utf-8")))
    return Tokens(
        name,
        key,
        _mapped(folder / "train.bin", index.dtype, index.train),
        _mapped(folder / "heldout.bin", index.dtype, index.held_out),
        index.held_out_bytes,
    )


def _mapped(path: Path, dtype: str, count: int) -> StoredIds:
    """Maps `count` ids into memory; an empty file cannot be mapped."""
    mapped: StoredIds = np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
    return mapped


def _training_parts(document: Document, vocabulary: Vocabulary, fim: Fim | None, seed: int) -> Parts:
    """Returns a document's training part; cuts for fill-in-the-middle depend on its content and `seed`."""
    generator = np.random.default_rng([seed, int(document.sha256[:16], 16)])
    if fim is not None and document.suffix in fim.suffixes and generator.random() < fim.share:
        return vocabulary.fim_document(cut_for_fim(document.train, generator))
    return vocabulary.document(document.train)


def _held_out_texts(source: Source, vocabulary: Vocabulary, eval_bytes: int) -> list[str]:
    """Returns the first held-out bytes, which the tokenizer keeps.

    Raises:
        InvalidInput: there are too few, or the tokenizer loses some of them.
    """
    held_out = (document for document in source.documents if document.train_size < document.size)
    texts = list(first_bytes((document.held_out for document in held_out), eval_bytes))
    size = sum(len(text.encode()) for text in texts)
    if size < MIN_HELD_OUT and not source.shared:
        raise InvalidInput(
            f"{source.name}: {size:,} bytes would be held out; at least {MIN_HELD_OUT:,} are needed to score a model,"
            " so give more text or hold out a larger share",
            where="--corpus",
        )
    for text in texts:
        vocabulary.check_lossless(text)
    return texts


def _write(file: BinaryIO, documents: Iterable[Ids], dtype: type[np.uint16] | type[np.uint32]) -> int:
    """Returns the number of written ids."""
    count = 0
    for ids in documents:
        file.write(ids.astype(dtype).tobytes())
        count += len(ids)
    return count
