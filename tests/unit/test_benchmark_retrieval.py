"""The benchmark of retrieval: its figures, and BM25 beside them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from retrieval_lab import retriever as lab_retriever
from retrieval_lab import texts

from benchmarks.retrieval import bm25, gains, interval, ranks_of, scores
from benchmarks.retrieval_compare import BiEncoder, throughput, train_bi_encoder, write_page


def test_figures_are_those_of_ranks() -> None:
    ranks = ranks_of([[4, 2], [1], [3, 5]], [2, 1, 7])
    assert ranks.tolist() == [2, 1, math.inf]
    np.testing.assert_allclose(gains(ranks), [1 / math.log2(3), 1, 0])
    assert gains(np.array([10.0, 11.0]))[1] == 0
    assert scores(ranks)["recall@1"][0] == 0.3333
    mean, low, high = interval(np.array([0.0, 1.0] * 200))
    assert mean == 0.5 and 0.4 < low < 0.5 < high < 0.6


def test_bm25_finds_words() -> None:
    documents = {f"{number}": f"filler text number {number}" for number in range(200)}
    documents["7"] = "a partition is mounted"
    assert bm25(documents, ["partition mounted"])[0][0] == "7"


def test_a_bi_encoder_is_trained_and_has_one_vector(tmp_path: Path) -> None:
    retriever, tokens = lab_retriever(lengths=(16, 48), expansion=False)
    model = BiEncoder(retriever).requires_grad_(True)
    pairs = [(text[4:20], text) for text in texts(32)]
    before = model(*tokens.queries(["the cat"])).detach().clone()
    train_bi_encoder(model, tokens, pairs, batch=8, lr=1e-2)
    after = model(*tokens.queries(["the cat", "a"])).detach()
    assert after.shape == (2, 16) and not np.allclose(before[0], after[0])
    np.testing.assert_allclose(after.norm(dim=-1), 1, atol=1e-5)


def test_the_page_gets_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.retrieval_compare.fastest", lambda run: run() is None or 0.5)
    figures = throughput("d64 v256 ffn=swiglu:64 [C3 A4/2]")
    measured = {**scores(np.array([1.0, 2.0, math.inf])), "gains": [1.0, 0.6, 0.0], "index_bytes": 256.0}
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    for _ in range(2):
        write_page(page, {"searches": {"late interaction": measured, "BM25": measured}, "throughput": figures})
    text = page.read_text()
    assert text.count("## Throughput") == 1 and "| BM25 | 0.54" in text and "| 32 | 64.0" in text
