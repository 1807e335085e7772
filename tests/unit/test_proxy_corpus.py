"""Corpora: what is held out, what a hash covers, which files are refused."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.proxy import corpus as corpus_module
from nas.proxy.corpus import MIN_BYTES, CorpusRef, Domain, build_corpus, open_corpus, refer, split
from nas.proxy.corpus_default import generate, split_source

LINE = b"the quick brown fox jumps over the lazy dog\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))


def write(path: Path, size: int = MIN_BYTES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((LINE * (size // len(LINE) + 1))[:size])
    return path


def test_the_last_twentieth_of_each_source_is_held_out() -> None:
    domain = split([bytes([1] * 95 + [2] * 5), bytes([3] * 190 + [4] * 10)])
    assert domain.train.tolist() == [1] * 95 + [3] * 190
    assert domain.heldout.tolist() == [2] * 5 + [4] * 10


def test_unigram_entropy_is_in_bits_per_byte() -> None:
    heldout = np.array([0, 0, 1, 2], dtype=np.uint8)
    assert Domain(heldout, heldout).unigram_entropy == pytest.approx(1.5)
    uniform = np.arange(256, dtype=np.uint8)
    assert Domain(uniform, uniform).unigram_entropy == pytest.approx(math.log2(256))


def test_each_entry_is_a_domain_in_file_order(tmp_path: Path) -> None:
    write(tmp_path / "books/a.txt")
    write(tmp_path / "books/b.txt", 2 * MIN_BYTES)
    write(tmp_path / "notes.md")
    corpus = build_corpus(["notes.md", "books/*.txt"], tmp_path)
    assert list(corpus.domains) == ["books/*.txt", "notes.md"]
    assert corpus.domains["books/*.txt"].train.size == pytest.approx(0.95 * 3 * MIN_BYTES, abs=2)


def test_the_hash_follows_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    first = build_corpus([write(tmp_path / "one/a.txt").name], tmp_path / "one")
    same = build_corpus([write(tmp_path / "two/a.txt").name], tmp_path / "two")
    assert first.hash == same.hash
    changed = write(tmp_path / "three/a.txt")
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    assert build_corpus(["a.txt"], tmp_path / "three").hash != first.hash


def test_a_reference_opens_the_same_corpus_from_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    corpus = build_corpus(["a.txt"], tmp_path)
    ref = refer(["a.txt"], tmp_path)
    path.unlink()
    again = open_corpus(CorpusRef.model_validate_json(ref.model_dump_json()))
    assert again.hash == corpus.hash
    assert np.array_equal(again.domains["a.txt"].heldout, corpus.domains["a.txt"].heldout)


def test_a_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    corpus = build_corpus(["a.txt"], tmp_path)
    ref = refer(["a.txt"], tmp_path)
    cached = tmp_path / "cache/corpora" / corpus.hash
    cached.write_bytes(cached.read_bytes().replace(b"fox", b"cat"))
    assert open_corpus(ref).hash == corpus.hash


def test_files_that_changed_since_the_study_began_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    ref = refer(["a.txt"], tmp_path)
    (tmp_path / "cache/corpora" / ref.hash).unlink()
    write(path, 2 * MIN_BYTES)
    with pytest.raises(InfrastructureFailed, match="its files changed"):
        open_corpus(ref)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n" * MIN_BYTES, "is empty"), (b"\xff\xfe\x00", "not UTF-8 text"), (b"short", "needs at")],
)
def test_unusable_files_are_refused_by_path(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(InvalidInput, match=message) as raised:
        build_corpus(["bad.txt"], tmp_path)
    assert "bad.txt" in str(raised.value)


@pytest.mark.parametrize("entry", ["gone.txt", "gone/*.txt", "/nowhere/at/all.txt"])
def test_an_entry_without_files_is_refused(tmp_path: Path, entry: str) -> None:
    with pytest.raises(InvalidInput, match=r"gone.*matches no file|all\.txt matches no file"):
        build_corpus([entry], tmp_path)


def test_a_folder_is_refused_with_the_glob_to_write(tmp_path: Path) -> None:
    write(tmp_path / "books/a.txt")
    with pytest.raises(InvalidInput, match=r"write 'books/\*'"):
        build_corpus(["books/"], tmp_path)


def test_a_corpus_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 1000)
    write(tmp_path / "a.txt")
    with pytest.raises(InvalidInput, match="at most 1,000"):
        build_corpus(["a.txt"], tmp_path)


def test_generated_text_is_the_same_on_every_machine() -> None:
    """Another digest means another default corpus: raise `corpus_default.RECIPE` with it."""
    digest = hashlib.sha256(generate(7, 20_000)).hexdigest()
    assert digest == "9f0bec77fdf990ebf0cb63345193ddeeca59e25b2ce665707c3966186a170f0c"
    assert generate(7, 20_000) != generate(8, 20_000)


def test_code_and_prose_are_told_apart() -> None:
    source = '''"""Module docs."""
import os  # why

# first
# second
def f(x):
    """Does it.

        Indented.
    """
    return "kept # string"
'''
    code, prose = split_source(source)
    assert code == 'import os\n\ndef f(x):\n    return "kept # string"\n'
    assert prose == "Module docs.\n\nwhy\n\nfirst\nsecond\n\nDoes it.\n\nIndented."


def test_the_default_corpus_has_three_domains_and_one_hash() -> None:
    corpus = build_corpus("default", Path("/"))
    assert list(corpus.domains) == ["code", "generated", "prose"]
    assert all(domain.heldout.size > 50_000 for domain in corpus.domains.values())
    assert all(4 < domain.unigram_entropy < 6 for domain in corpus.domains.values())
    assert build_corpus("default", Path("/")).hash == corpus.hash
