"""The benchmark of retrieval: its figures, and BM25 beside them."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.retrieval import bm25, gains, interval, ranks_of, scores


def test_figures_are_those_of_ranks() -> None:
    ranks = ranks_of([[4, 2], [1], [3, 5]], [2, 1, 7])
    assert ranks.tolist() == [2, 1, math.inf]
    np.testing.assert_allclose(gains(ranks), [1 / math.log2(3), 1, 0])
    assert gains(np.array([10.0, 11.0]))[1] == 0
    assert scores(ranks)["recall@1"][0] == 0.3333
    mean, low, high = interval(np.array([0.0, 1.0] * 200))
    assert mean == 0.5 and 0.4 < low < 0.5 < high < 0.6


def test_bm25_finds_words() -> None:
    texts = [f"filler text number {number}" for number in range(200)]
    texts[7] = "a partition is mounted"
    assert bm25(texts, ["partition mounted"])[0][0] == 7
