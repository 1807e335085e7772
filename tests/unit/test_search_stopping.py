"""Hypervolume with its interval, and the end of a search."""

from __future__ import annotations

import numpy as np
import pytest

from nas.core.pareto import hypervolume
from nas.search.proposers import is_exhausted, volume


def test_interval_holds_the_value_and_grows_with_noise() -> None:
    points, corner = [[0.2, 0.8], [0.5, 0.5], [0.8, 0.2]], [1.0, 1.0]
    sure, unsure = volume(points, [[0.001, 0.001]] * 3, corner), volume(points, [[0.05, 0.05]] * 3, corner)
    assert sure.value == unsure.value == pytest.approx(0.2 * 0.8 + 0.3 * 0.5 + 0.3 * 0.2)
    assert unsure.low < sure.low < sure.estimate < sure.high < unsure.high
    assert sure.estimate == pytest.approx(sure.value, abs=1e-3)


@pytest.mark.parametrize("shape", ["many on the front", "few on the front"])
def test_the_estimate_leaves_out_what_noise_adds(shape: str) -> None:
    """The true hypervolume is known: draws about the measured value miss it, the interval of the estimate has it."""
    rng, corner, noise = np.random.default_rng(3), np.full(3, 1.1), 0.03
    off, has, draws_have = [], 0, 0
    for _ in range(60):
        true = rng.random((60, 3))
        if shape == "many on the front":
            true = true / np.linalg.norm(true, axis=1, keepdims=True)
        true = 1 - 0.7 * true
        measured = true + noise * rng.standard_normal(true.shape)
        truth, interval = hypervolume(true, corner), volume(measured, np.full(true.shape, noise), corner, 100)
        off.append((interval.value - truth, interval.estimate - truth))
        has += interval.low <= truth <= interval.high
        draws_have += 2 * interval.value - interval.high <= truth <= 2 * interval.value - interval.low
    measured_off, estimate_off = np.mean(off, axis=0)
    assert measured_off > 0.01 and abs(estimate_off) < 0.3 * measured_off
    assert has >= 50 and draws_have <= 35


def test_without_points_there_is_no_volume() -> None:
    assert volume([], [], [1.0, 1.0]) == (0.0, 0.0, 0.0, 0.0)


def test_a_search_ends_when_a_whole_batch_would_add_little() -> None:
    assert is_exhausted(0.0005, 1.0, 8) and not is_exhausted(0.0007, 1.0, 8)
    assert not is_exhausted(None, 1.0, 8) and not is_exhausted(0.0, 0.0, 8)
