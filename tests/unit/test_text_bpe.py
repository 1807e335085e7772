"""Byte-pair tokens of a corpus: nothing is lost, bits per byte stay the unit, the cache is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nas.core.errors import InfrastructureFailed
from nas.model.text import bpe
from nas.model.text.bpe import encoded
from nas.model.text.corpus import MIN_BYTES, Corpus, build_corpus
from nas.search.proxy.data import LmData

VOCAB = 512


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    words = "".join(f"Zähle {n}: das Quadrat ist {n * n}.\n" for n in range(4000))
    (tmp_path / "a.txt").write_text(words[:MIN_BYTES])
    (tmp_path / "b.txt").write_text(words[-MIN_BYTES:].upper())
    return build_corpus(["a.txt", "b.txt"], tmp_path)


def test_tokens_stand_for_the_bytes_of_the_text(corpus: Corpus) -> None:
    tokens = encoded(corpus, VOCAB)
    assert list(tokens) == list(corpus.domains)
    for name, domain in tokens.items():
        whole = corpus.domains[name]
        assert domain.sizes.shape == (VOCAB,)
        for ids, text in ((domain.train, whole.train), (domain.heldout, whole.heldout)):
            # A character that the border cuts is left out.
            assert text.size - 3 <= domain.sizes[ids].sum() <= text.size
            assert ids.size < 0.6 * text.size
        assert 0 < domain.unigram_entropy < whole.unigram_entropy


def test_they_are_encoded_once(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = encoded(corpus, VOCAB)
    monkeypatch.setattr(bpe, "train_bpe", None)
    again = encoded(corpus, VOCAB)
    assert all(np.array_equal(first[name].train, again[name].train) for name in first)
    with pytest.raises(TypeError):
        encoded(corpus, 2 * VOCAB)
    assert sorted(path.suffix for path in (tmp_path / "cache/bpe").iterdir()) == ["", ".lock", ".lock"]


def test_an_interrupted_encoding_leaves_nothing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise InfrastructureFailed("killed")

    with monkeypatch.context() as patch:
        patch.setattr(bpe, "_encode", interrupted)
        with pytest.raises(InfrastructureFailed):
            encoded(corpus, VOCAB)
    assert encoded(corpus, VOCAB).keys() == corpus.domains.keys()


def test_batches_and_groups_are_in_tokens_and_bytes(corpus: Corpus) -> None:
    tokens = encoded(corpus, VOCAB)
    data = LmData(tokens, batch=3, length=16, eval_bytes=1000, seed=0)
    inputs, labels = data.batch(0)
    assert inputs.shape == labels.shape == (3, 16)
    assert 256 < int(inputs.max()) < VOCAB
    group = data.groups()["lm/a.txt"]
    assert group.sizes is not None
    assert group.sizes[group.labels].sum() == pytest.approx(1000, rel=0.2)
    assert group.chance == tokens["a.txt"].unigram_entropy
