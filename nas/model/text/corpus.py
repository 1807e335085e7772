"""Byte-level corpora in the cache folder: domains with a held-out end, identified by the hash of their bytes.

$NAS_CACHE/corpora/HASH         the bytes, as `packed_domains` writes them; mapped into memory, not read
                   HASH.json    what the corpus was made of: versions of Python and packages
$NAS_CACHE/packaged/KEY/*.txt   texts of the corpora 'default' and 'installed', a file for each domain
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, StudyChanged
from nas.core.quality_config import CorpusFiles, CorpusSource, LibrarySource
from nas.core.replacement import LibraryScores
from nas.core.stored import stored_folder
from nas.model.text import default, installed
from nas.model.text.documents import HELD_OUT, Source, read_sources

BYTE_VOCAB = 256
MIN_BYTES = 1 << 16
"""Smallest domain: its held-out end is then about 3 kB."""
MAX_BYTES = 1 << 30
"""Most bytes of text: a corpus is read into memory once."""
_SEPARATOR = b"\n\n"
"""Between two documents of a domain."""

Ids = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Domain:
    """An evaluation group of a corpus: a text as bytes or as tokens, in two parts.

    Args:
        train: 1-d, ids below `sizes.size`.
        heldout: the same.
        sizes: bytes that an id stands for, [V].
    """

    train: Ids
    heldout: Ids
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.ones(BYTE_VOCAB, np.int64))

    @cached_property
    def share(self) -> NDArray[np.float64]:
        """How often each id occurs among the held-out ids, [V]."""
        counts = np.bincount(self.heldout, minlength=self.sizes.size)
        share: NDArray[np.float64] = counts / self.heldout.size
        return share

    @property
    def surprise(self) -> NDArray[np.float64]:
        """Bits of each id under that distribution, [V]; infinite where it does not occur."""
        with np.errstate(divide="ignore"):
            bits: NDArray[np.float64] = -np.log2(self.share)
        return bits

    @property
    def bytes_per_id(self) -> float:
        """Mean bytes of a held-out id."""
        return float(self.share @ self.sizes)

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the held-out ids' distribution, in bits per byte: the chance level of a language model."""
        occurs = self.share > 0
        return float(self.share[occurs] @ self.surprise[occurs]) / self.bytes_per_id


@dataclass(frozen=True)
class Corpus:
    """Domains by name, in sorted order.

    Args:
        domains: name -> text.
        made_of: versions of what the text was taken from; not part of the hash, which covers the text itself.
    """

    domains: Mapping[str, Domain]
    made_of: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the names and bytes of all domains, 64 hex digits."""
        return content_hash({name: [_sha256(d.train), _sha256(d.heldout)] for name, d in self.domains.items()})


def packed_domains(domains: Mapping[str, Domain]) -> bytes:
    """Returns domains as one file: a line of JSON with names and sizes, then the ids of each."""
    first = next(iter(domains.values()))
    index = {
        "dtype": first.train.dtype.name,
        "sizes": first.sizes.tolist(),
        "domains": [[name, domain.train.size, domain.heldout.size] for name, domain in domains.items()],
    }
    parts = [part.tobytes() for domain in domains.values() for part in (domain.train, domain.heldout)]
    return json.dumps(index).encode() + b"\n" + b"".join(parts)


def map_domains(path: Path) -> dict[str, Domain]:
    """Maps a file of `packed_domains` into memory.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    with path.open("rb") as file:
        head = file.readline()
    index = json.loads(head)
    ids, sizes = np.memmap(path, index["dtype"], "r", offset=len(head)), np.array(index["sizes"], np.int64)
    domains, start = {}, 0
    for name, train, heldout in index["domains"]:
        middle, end = start + train, start + train + heldout
        domains[name] = Domain(ids[start:middle], ids[middle:end], sizes)
        start = end
    if start != ids.size:
        raise ValueError(f"{path} has {ids.size} ids, not {start}")
    return domains


class CorpusRef(BaseModel):
    """Identifies the corpus of a training on this host or another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: CorpusSource
    base: str = Field("/", description="folder that relative entries of `source` are taken from")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")


AnySource = CorpusSource | Sequence[str]
"""'default', 'installed', or files; a sequence of paths stands for `CorpusFiles`."""


def build_corpus(source: AnySource, base: Path) -> Corpus:
    """Builds the corpus of `source`.

    Args:
        source: 'default', 'installed', or files, globs and folders, each of which is a domain under its name.
        base: folder of relative paths.

    Raises:
        InvalidInput: a file cannot be used, or a domain is smaller than `MIN_BYTES`.
        InfrastructureFailed: this Python lacks its library's source, or knows no installed packages.
    """
    match _normal(source):
        case "default":
            versions = {"python": _python(), "recipe": str(default.RECIPE)}
            key: list[Any] = ["default", sys.version, sysconfig.get_path("stdlib")]
            folder = stored_folder("packaged", default.RECIPE, key, default.write_domains)
        case "installed":
            packages = installed.distributions()
            versions = {"recipe": str(installed.RECIPE)} | {package.name: package.version for package in packages}
            key = ["installed", versions, [str(package.locate_file("")) for package in packages]]
            folder = stored_folder(
                "packaged", installed.RECIPE, key, lambda folder: installed.write_domains(packages, folder)
            )
        case CorpusFiles() as named:
            sources = read_sources(named.files, HELD_OUT, base=base, column=named.text, most=MAX_BYTES, where="corpus")
            return _corpus({source.name: source for source in sources}, {})
    sources = read_sources(sorted(folder.iterdir()), HELD_OUT, where="corpus")
    return _corpus({Path(source.name).stem: source for source in sources}, versions)


def refer(source: AnySource, base: Path) -> CorpusRef:
    """Builds and caches the corpus of `source`; returns the reference that training jobs hold.

    Raises:
        InvalidInput: see `build_corpus`.
        InfrastructureFailed: see `build_corpus`.
    """
    corpus = build_corpus(source, base)
    _store(corpus)
    return _reference(source, base, corpus.hash)


def refer_again(source: AnySource, base: Path, hash_: str) -> CorpusRef:
    """Returns the reference to the corpus that `source` was when it had this hash.

    The cached corpus is used even if `source` has changed since.

    Raises:
        StudyChanged: it is not in the cache, and `source` is another corpus now.
        InvalidInput: see `build_corpus`.
        InfrastructureFailed: see `build_corpus`.
    """
    if _load(hash_) is None and (now := refer(source, base)).hash != hash_:
        raise StudyChanged(
            f"the study began with corpus {hash_[:12]}, which is {now.hash[:12]} now and is not in the cache:"
            f" {_reason(hash_, now.hash)}. Its qualities would not compare, so restore them or begin a new study",
            where="corpus",
        )
    return _reference(source, base, hash_)


def refer_scores(library: LibrarySource, base: Path) -> CorpusRef:
    """Returns the reference to a library's file of scores, which takes the place of a corpus.

    Raises:
        InvalidInput: it cannot be read.
    """
    path = (base / library.path).resolve()
    LibraryScores.read(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return CorpusRef(source=CorpusFiles(files=(str(path),)), hash=digest)


def made_of(ref: CorpusRef) -> dict[str, str]:
    """Returns the versions of what the corpus of `ref` was taken from; empty for files, and where it is not known."""
    note = _folder() / f"{ref.hash}.json"
    return dict(json.loads(note.read_text(encoding="utf-8"))) if note.is_file() else {}


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
            f" {ref.hash[:12]}: {_reason(ref.hash, corpus.hash)}"
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


def _normal(source: AnySource) -> CorpusSource:
    return cast(CorpusSource, source) if isinstance(source, str | CorpusFiles) else CorpusFiles(files=tuple(source))


def _reference(source: AnySource, base: Path, hash_: str) -> CorpusRef:
    return CorpusRef(source=_normal(source), base=str(base.resolve()), hash=hash_)


def _reason(before: str, now: str) -> str:
    """Returns why two corpora of one source differ, as far as their notes tell."""
    notes = [_folder() / f"{corpus}.json" for corpus in (before, now)]
    if not all(note.is_file() for note in notes):
        return f"its files changed, or this Python ({_python()}) or a package differs"
    first, second = (json.loads(note.read_text(encoding="utf-8")) for note in notes)
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    changes = ", ".join(f"{name} was {first.get(name, 'missing')}, is {second.get(name, 'missing')}" for name in names)
    return changes or "its files changed"


def _python() -> str:
    return sys.version.split()[0]


def _corpus(sources: Mapping[str, Source], made_of: Mapping[str, str]) -> Corpus:
    domains = {}
    for name, source in sorted(sources.items()):
        size = sum(document.size for document in source.documents)
        if size < MIN_BYTES:
            raise InvalidInput(f"{name} has {size:,} bytes; a domain needs at least {MIN_BYTES:,}", where="corpus")
        parts = zip(*(document.parts() for document in source.documents), strict=True)
        train, heldout = (np.frombuffer(_SEPARATOR.join(filter(None, texts)), np.uint8) for texts in parts)
        if not (len(train) and len(heldout)):
            raise InvalidInput(
                f"{name}: its texts are split with an entry before it, which leaves {len(train):,} bytes to train on"
                f" and {len(heldout):,} to score: name each text once",
                where="corpus",
            )
        domains[name] = Domain(train, heldout)
    return Corpus(domains, made_of)


def _folder() -> Path:
    return paths.cache() / "corpora"


def _store(corpus: Corpus) -> None:
    path = _folder() / corpus.hash
    if corpus.made_of:
        _write(path.with_name(f"{corpus.hash}.json"), json.dumps(dict(corpus.made_of)).encode())
    if not path.is_file():
        _write(path, packed_domains(corpus.domains))


def _load(hash_: str) -> Corpus | None:
    """Returns the cached corpus; None if there is none or its bytes have another hash, and then it is removed."""
    path = _folder() / hash_
    if not path.is_file():
        return None
    status = path.stat()
    corpus = _mapped(path, status.st_ino, status.st_mtime_ns, status.st_size)
    if corpus is None or corpus.hash != hash_:  # computed once, as the mapped corpus is kept
        path.unlink(missing_ok=True)
        return None
    return corpus


@lru_cache(4)
def _mapped(path: Path, *_changes: int) -> Corpus | None:
    try:
        return Corpus(map_domains(path))
    except (ValueError, TypeError, KeyError):
        return None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)


def _sha256(data: Ids) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()
