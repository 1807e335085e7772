"""Training data of members: text files -> documents with a held-out end -> token ids in the cache. No torch.

A source is one path of `--corpus`: a file or a folder. Its documents are sorted by the hash of their content, so that
names and folders do not matter, and the last share of its bytes is held out: whole documents, and the end of one.

Texts are tokenised once per tokenizer; ids are memory-mapped from the cache folder:

    $NAS_CACHE/tokens/KEY/train.bin     ids of the training part, one document after another
                          heldout.bin   ids of the held-out part
                          index.json    sizes and type of both
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput, UnknownName
from nas.train.pretrain.recipe import Fim
from nas.train.release.tokenizer import BOS, END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, Marks

TOKENS_VERSION = 1
"""Part of keys: increase it with every change after which the same text and tokenizer give other ids."""
MIN_HELD_OUT = 1024
"""Fewest held-out bytes that a model is scored on."""

_PIECE, _PIECES_AT_ONCE = 1 << 20, 16
"""Characters of a piece, and pieces that are encoded together: an encoding is many times larger than its ids."""

Ids = NDArray[np.int64]
StoredIds = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Document:
    """A file: its first `kept` bytes are trained on, the others held out."""

    path: Path
    sha256: str
    kept: int

    @property
    def train(self) -> str:
        """Training part of the text."""
        return self._content()[: self.kept].decode()

    @property
    def held_out(self) -> str:
        """Held-out part of the text."""
        return self._content()[self.kept :].decode()

    def _content(self) -> bytes:
        content = _read(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise InvalidInput(f"{self.path} has changed while it was read", where="--corpus")
        return content


@dataclass(frozen=True, slots=True)
class Source:
    """A path of the corpus and its documents.

    Args:
        name: the path as the user wrote it.
        documents: sorted by the hash of their content.
        shared: whether some of them are also in an earlier path, whose cuts they keep.
    """

    name: str
    documents: tuple[Document, ...]
    shared: bool = False

    @property
    def hash(self) -> str:
        """SHA-256 over contents and cuts, without the name."""
        return content_hash([[document.sha256, document.kept] for document in self.documents])


def read_sources(paths: Sequence[Path], held_out: float) -> tuple[Source, ...]:
    """Reads the sources at `paths`; of folders, every file below them whose name does not begin with a dot.

    Args:
        paths: files and folders.
        held_out: share of each source's bytes.

    Raises:
        InvalidInput: a path holds no text, a file is empty or not UTF-8, or a path is named twice.
    """
    if not paths:
        raise InvalidInput("name at least one file or folder of text", where="--corpus")
    if len({path.resolve() for path in paths}) < len(paths):
        raise InvalidInput("a path is named twice", where="--corpus")
    cuts: dict[str, int] = {}
    return tuple(_source(path, held_out, cuts) for path in paths)


def _source(path: Path, held_out: float, cuts: dict[str, int]) -> Source:
    """Reads the source at `path`. `cuts` maps the hash of a text to its cut in earlier sources, which is kept."""
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
    """Yields the file at `path`, or the files below the folder; names that begin with a dot are skipped.

    Raises:
        InvalidInput: there is no such file or folder.
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
    """Returns a text file, the hash of its content and its size in bytes."""
    content = _read(path)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text (byte {error.start})", where="--corpus") from None
    if not content.strip():
        raise InvalidInput(f"{path} is empty", where="--corpus")
    return path, hashlib.sha256(content).hexdigest(), len(content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", where="--corpus") from error


def _boundary(path: Path, at: int) -> int:
    """Returns `at`, or the nearest byte before it where a character begins."""
    content = _read(path)
    while content[at] & 0xC0 == 0x80:
        at -= 1
    return at


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
        self._fim = [self._mark(name) for name in (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE)] if fim else []

    def document(self, text: str) -> Ids:
        """Returns the ids of `text` between its marks; where these are equal, the second one is left out."""
        behind = np.asarray([self.end] if self.end != self.start else [], np.int64)
        return np.concatenate([[self.start], self.encode(text), behind])

    def fim_document(self, cut: FimCut) -> Ids:
        """Returns the ids of a document that was cut for fill-in-the-middle (Bavarian et al. 2022, 3.1 and 3.2).

        PSM: prefix mark, prefix, suffix mark, suffix, middle mark, middle. SPM, in the variant that shares its form
        with PSM: prefix mark, suffix mark, suffix, middle mark, prefix, middle.
        """
        prefix, middle, suffix = (self.encode(part) for part in (cut.prefix, cut.middle, cut.suffix))
        pre, suf, mid = ([mark] for mark in self._fim)
        parts = [pre, suf, suffix, mid, prefix, middle] if cut.suffix_first else [pre, prefix, suf, suffix, mid, middle]
        return np.concatenate([[self.start], *parts, [self.end]]).astype(np.int64)

    def encode(self, text: str) -> Ids:
        """Returns the ids of `text`, without marks."""
        pieces, ids = text_pieces(text), [np.zeros(0, np.int64)]
        while some := list(islice(pieces, _PIECES_AT_ONCE)):
            encodings = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            ids += [np.asarray(each.ids, np.int64) for each in encodings]
        return np.concatenate(ids)

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


def text_pieces(text: str) -> Iterator[str]:
    """Yields `text` in pieces of at most a million characters, cut at the end of a line if possible."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


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
    cuts = None if fim is None else [fim.share, sorted(fim.suffixes), seed]
    names = sorted(document.path.suffix for document in source.documents) if fim else []
    key = content_hash([TOKENS_VERSION, source.hash, vocabulary.sha256, cuts, names, eval_bytes])
    folder = paths.cache() / "tokens" / key
    if not (folder / "index.json").is_file():
        _write_tokens(folder, source, vocabulary, fim, seed, eval_bytes)
    return open_tokens(source.name, key)


def open_tokens(name: str, key: str) -> Tokens:
    """Opens the ids that `tokenise` wrote under `key`.

    Raises:
        FileNotFoundError: they were removed from the cache.
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


def _mapped(path: Path, dtype: str, count: int) -> StoredIds:
    """Maps `count` ids into memory; an empty file cannot be mapped."""
    mapped: StoredIds = np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
    return mapped


def _training_ids(document: Document, vocabulary: Vocabulary, fim: Fim | None, seed: int) -> Ids:
    """Returns the ids of a document's training part; cuts for fill-in-the-middle depend on its content and `seed`."""
    generator = np.random.default_rng([seed, int(document.sha256[:16], 16)])
    if fim is not None and document.path.suffix in fim.suffixes and generator.random() < fim.share:
        return vocabulary.fim_document(cut_for_fim(document.train, generator))
    return vocabulary.document(document.train)


def _write_tokens(
    folder: Path, source: Source, vocabulary: Vocabulary, fim: Fim | None, seed: int, eval_bytes: int
) -> None:
    """Writes the ids of `source` to `folder`, atomically."""
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
    trained = (_training_ids(each, vocabulary, fim, seed) for each in source.documents if each.kept)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        partial = Path(scratch) / "tokens"
        partial.mkdir()
        with (partial / "train.bin").open("wb") as file:
            train = _write(file, trained, dtype)
        with (partial / "heldout.bin").open("wb") as file:
            scored = _write(file, (vocabulary.document(text) for text in held_out), dtype)
        index = _Index(np.dtype(dtype).name, train, scored, size)
        (partial / "index.json").write_text(json.dumps(asdict(index)))
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "index.json").is_file():  # otherwise another process has written the same
                shutil.rmtree(folder)
                partial.rename(folder)


def _write(file: BinaryIO, documents: Iterator[Ids], dtype: type[np.uint16] | type[np.uint32]) -> int:
    """Returns the number of written ids."""
    count = 0
    for ids in documents:
        file.write(ids.astype(dtype).tobytes())
        count += len(ids)
    return count


def _limited(texts: Iterator[str], limit: int) -> Iterator[str]:
    """Yields the first `limit` bytes of texts that are not empty, the last of them cut at the end of a character."""
    for text in texts:
        if limit <= 0:
            return
        whole = text.encode()
        if part := whole[:limit].decode(errors="ignore"):
            yield part
        limit -= len(whole)
