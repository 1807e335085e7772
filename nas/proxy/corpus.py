"""Byte-level corpora: domains with a held-out end, named by the hash of their bytes, kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import tempfile
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
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.proxy import corpus_default, corpus_text

BYTE_VOCAB = 256
HELD_OUT = 0.05
"""Share of each source, at its end, that is never trained on."""
MIN_BYTES = 1 << 16
"""Smallest domain: its held-out end is then about 3 kB."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Domain:
    """One evaluation group of a corpus; both parts are 1-d arrays of bytes."""

    train: Bytes
    heldout: Bytes

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the held-out bytes' own distribution, in bits per byte: the chance level of a language model."""
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
    """What a training needs to find its corpus again, on this host or another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["default"] | tuple[str, ...]
    base: str = Field("/", description="folder that relative entries of `source` are taken from")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")


def build_corpus(source: Literal["default"] | Sequence[str], base: Path) -> Corpus:
    """The corpus of `source`: 'default', or paths and globs of text files, relative ones from `base`.

    Raises:
        InvalidInput: a file cannot be used, or a domain is smaller than `MIN_BYTES`.
        InfrastructureFailed: the default corpus is asked for and this Python lacks its library's source.
    """
    if isinstance(source, str):
        return _cached_default()
    return _from_texts(corpus_text.read_domains(source, base))


def refer(source: Literal["default"] | Sequence[str], base: Path) -> CorpusRef:
    """Builds the corpus of `source`, puts it into the cache, and returns the reference that training jobs carry.

    Raises:
        InvalidInput: see `build_corpus`.
        InfrastructureFailed: see `build_corpus`.
    """
    corpus = build_corpus(source, base)
    _store(corpus)
    kept: Literal["default"] | tuple[str, ...] = "default" if isinstance(source, str) else tuple(source)
    return CorpusRef(source=kept, base=str(base.resolve()), hash=corpus.hash)


def open_corpus(ref: CorpusRef) -> Corpus:
    """The corpus that `ref` names, from the cache or built anew.

    Raises:
        InfrastructureFailed: this host builds other bytes than the study was started with.
    """
    cached = _load(ref.hash)
    if cached is not None:
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
    """The corpus as one file, for a host that cannot build it.

    Raises:
        InfrastructureFailed: see `open_corpus`.
    """
    open_corpus(ref)
    return (_folder() / ref.hash).read_bytes()


def unpack(ref: CorpusRef, data: bytes) -> None:
    """Puts what `packed` gave into this host's cache, where `open_corpus` finds and checks it."""
    path = _folder() / ref.hash
    if not path.is_file():
        _write(path, data)


def split(texts: Sequence[bytes]) -> Domain:
    """One domain: of each text, the last `HELD_OUT` is held out."""
    arrays = [np.frombuffer(text, dtype=np.uint8) for text in texts]
    cuts = [len(array) - round(HELD_OUT * len(array)) for array in arrays]
    train = np.concatenate([array[:cut] for array, cut in zip(arrays, cuts, strict=True)])
    heldout = np.concatenate([array[cut:] for array, cut in zip(arrays, cuts, strict=True)])
    return Domain(train, heldout)


def _from_texts(texts: Mapping[str, Sequence[bytes]]) -> Corpus:
    for name, parts in texts.items():
        size = sum(map(len, parts))
        if size < MIN_BYTES:
            raise InvalidInput(f"{name} has {size:,} bytes; a domain needs at least {MIN_BYTES:,}", where="corpus")
    return Corpus({name: split(texts[name]) for name in sorted(texts)})


def _cached_default() -> Corpus:
    """The default corpus; which one this Python makes is noted beside the cached bytes."""
    key = content_hash([corpus_default.RECIPE, sys.version, sysconfig.get_path("stdlib")])
    note = _folder() / f"default-{key[:16]}.json"
    if note.is_file():
        cached = _load(json.loads(note.read_text())["hash"])
        if cached is not None:
            return cached
    corpus = _from_texts(corpus_default.read_domains())
    _store(corpus)
    _write(note, json.dumps({"hash": corpus.hash, "python": sys.version}).encode())
    return corpus


def _folder() -> Path:
    return paths.cache() / "corpora"


def _store(corpus: Corpus) -> None:
    """Writes index and bytes as one file: a JSON line, then the parts in its order."""
    path = _folder() / corpus.hash
    if path.is_file():
        return
    index = [[name, d.train.size, d.heldout.size] for name, d in corpus.domains.items()]
    parts = [part.tobytes() for d in corpus.domains.values() for part in (d.train, d.heldout)]
    _write(path, json.dumps(index).encode() + b"\n" + b"".join(parts))


def _load(hash_: str) -> Corpus | None:
    """The cached corpus, or None where there is none or its bytes do not give `hash_`."""
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
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


def _sha256(data: Bytes) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()
