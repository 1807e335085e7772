"""Byte-level corpora in the cache folder: domains with a held-out end, identified by the hash of their bytes."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, StudyChanged
from nas.proxy import corpus_default

BYTE_VOCAB = 256
HELD_OUT = 0.05
"""Share of each source, at its end, that is never trained on."""
MIN_BYTES = 1 << 16
"""Smallest domain: its held-out end is then about 3 kB."""
MAX_BYTES = 1 << 30
"""Largest corpus of the user's files: it is read into memory."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Domain:
    """An evaluation group of a corpus; both parts are 1-d arrays of bytes."""

    train: Bytes
    heldout: Bytes

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the held-out bytes' distribution, in bits per byte: the chance level of a language model."""
        counts = np.bincount(self.heldout, minlength=BYTE_VOCAB)
        share = counts[counts > 0] / self.heldout.size
        return float(-(share * np.log2(share)).sum())


@dataclass(frozen=True)
class Corpus:
    """Domains by name, in sorted order."""

    domains: Mapping[str, Domain]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the names and bytes of all domains, 64 hex digits."""
        return content_hash({name: [_sha256(d.train), _sha256(d.heldout)] for name, d in self.domains.items()})


class CorpusRef(BaseModel):
    """Identifies the corpus of a training on this host or another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["default"] | tuple[str, ...]
    base: str = Field("/", description="folder that relative entries of `source` are taken from")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")


def build_corpus(source: Literal["default"] | Sequence[str], base: Path) -> Corpus:
    """Builds the corpus of `source`.

    Args:
        source: 'default', or paths and globs of text files; each entry is a domain, with the entry as its name.
        base: folder of relative paths.

    Raises:
        InvalidInput: a file cannot be used, or a domain is smaller than `MIN_BYTES`.
        InfrastructureFailed: the default corpus is requested and this Python lacks its library's source.
    """
    if isinstance(source, str):
        return _cached_default()
    return _from_texts(_read_files(source, base))


def refer(source: Literal["default"] | Sequence[str], base: Path) -> CorpusRef:
    """Builds and caches the corpus of `source`; returns the reference that training jobs hold.

    Raises:
        InvalidInput: see `build_corpus`.
        InfrastructureFailed: see `build_corpus`.
    """
    corpus = build_corpus(source, base)
    _store(corpus)
    return _reference(source, base, corpus.hash)


def refer_again(source: Literal["default"] | Sequence[str], base: Path, hash_: str) -> CorpusRef:
    """Returns the reference to the corpus that `source` was when it had this hash.

    The cached corpus is used even if `source` has changed since.

    Raises:
        StudyChanged: it is not in the cache, and `source` is another corpus now.
        InvalidInput: see `build_corpus`.
        InfrastructureFailed: see `build_corpus`.
    """
    if _load(hash_) is None and (now := refer(source, base)).hash != hash_:
        raise StudyChanged(
            f"the study began with corpus {hash_[:12]}, which is {now.hash[:12]} now and is not in the cache: files "
            f"changed, or this Python ({sys.version.split()[0]}) differs. Its qualities would not compare, so restore "
            "the files or begin a new study",
            where="corpus",
        )
    return _reference(source, base, hash_)


def open_corpus(ref: CorpusRef) -> Corpus:
    """Loads the corpus of `ref` from the cache, or builds it.

    Raises:
        InfrastructureFailed: this host builds another corpus than the one the study was started with.
    """
    if cached := _load(ref.hash):
        return cached
    corpus = build_corpus(ref.source, Path(ref.base))
    if corpus.hash != ref.hash:
        raise InfrastructureFailed(
            f"corpus {ref.source!r} is {corpus.hash[:12]} on this host, but the study was started with"
            f" {ref.hash[:12]}: its files changed, or this Python ({sys.version.split()[0]}) differs"
        )
    _store(corpus)
    return corpus


def packed(ref: CorpusRef) -> bytes:
    """Returns the corpus as one file, for a host that cannot build it.

    Raises:
        InfrastructureFailed: see `open_corpus`.
    """
    open_corpus(ref)
    return (_folder() / ref.hash).read_bytes()


def unpack(ref: CorpusRef, data: bytes) -> None:
    """Writes the result of `packed` into this host's cache; `open_corpus` checks its hash."""
    path = _folder() / ref.hash
    if not path.is_file():
        _write(path, data)


def split(texts: Sequence[bytes]) -> Domain:
    """Returns a domain of texts; the last `HELD_OUT` of each is held out."""
    arrays = [np.frombuffer(text, dtype=np.uint8) for text in texts]
    cuts = [len(array) - round(HELD_OUT * len(array)) for array in arrays]
    train = np.concatenate([array[:cut] for array, cut in zip(arrays, cuts, strict=True)])
    heldout = np.concatenate([array[cut:] for array, cut in zip(arrays, cuts, strict=True)])
    return Domain(train, heldout)


def _reference(source: Literal["default"] | Sequence[str], base: Path, hash_: str) -> CorpusRef:
    stored: Literal["default"] | tuple[str, ...] = "default" if isinstance(source, str) else tuple(source)
    return CorpusRef(source=stored, base=str(base.resolve()), hash=hash_)


def _from_texts(texts: Mapping[str, Sequence[bytes]]) -> Corpus:
    for name, parts in texts.items():
        size = sum(map(len, parts))
        if size < MIN_BYTES:
            raise InvalidInput(f"{name} has {size:,} bytes; a domain needs at least {MIN_BYTES:,}", where="corpus")
    return Corpus({name: split(texts[name]) for name in sorted(texts)})


def _read_files(entries: Sequence[str], base: Path) -> dict[str, list[bytes]]:
    """Reads the texts of each entry, files in sorted order."""
    files = {entry: _files(entry, base) for entry in entries}
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    if size > MAX_BYTES:
        raise InvalidInput(f"the corpus has {size:,} bytes; at most {MAX_BYTES:,} are read")
    return {entry: [_read_text(path) for path in paths] for entry, paths in files.items()}


def _files(entry: str, base: Path) -> list[Path]:
    path = base.resolve() / Path(entry).expanduser()
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; write '{entry.rstrip('/')}/*' for the files in it", where="corpus")
    found = [path] if path.exists() else Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise InvalidInput(f"{path} matches no file", where="corpus")
    return files


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


def _cached_default() -> Corpus:
    """Returns the default corpus; a note in the cache holds the hash of the one that this Python makes."""
    key = content_hash([corpus_default.RECIPE, sys.version, sysconfig.get_path("stdlib")])
    note = _folder() / f"default-{key[:16]}.json"
    if note.is_file() and (cached := _load(json.loads(note.read_text())["hash"])):
        return cached
    corpus = _from_texts(corpus_default.read_domains())
    _store(corpus)
    _write(note, json.dumps({"hash": corpus.hash, "python": sys.version}).encode())
    return corpus


def _folder() -> Path:
    return paths.cache() / "corpora"


def _store(corpus: Corpus) -> None:
    """Writes one file: the index as a line of JSON, then the parts in its order."""
    path = _folder() / corpus.hash
    if path.is_file():
        return
    index = [[name, d.train.size, d.heldout.size] for name, d in corpus.domains.items()]
    parts = [part.tobytes() for d in corpus.domains.values() for part in (d.train, d.heldout)]
    _write(path, json.dumps(index).encode() + b"\n" + b"".join(parts))


def _load(hash_: str) -> Corpus | None:
    """Returns the cached corpus; None if there is none or its bytes have another hash."""
    path = _folder() / hash_
    if not path.is_file():
        return None
    head, _, body = path.read_bytes().partition(b"\n")
    data = np.frombuffer(body, dtype=np.uint8)
    domains = {}
    start = 0
    for name, train, heldout in json.loads(head):
        middle, end = start + train, start + train + heldout
        domains[name] = Domain(data[start:middle], data[middle:end])
        start = end
    corpus = Corpus(domains)
    return corpus if corpus.hash == hash_ else None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)


def _sha256(data: Bytes) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()
