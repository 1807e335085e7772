"""Reliability of qualities."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality.groups import effective_dimension
from nas.search.analysis.reliability import part_reliability, reliability


def test_reliability_is_the_share_of_variance_that_is_not_noise() -> None:
    rng = np.random.default_rng(0)
    true, noise = rng.normal(0, 0.3, 4000), rng.normal(0, 0.1, 4000)
    share = reliability((true + noise).tolist(), [0.1] * 4000)
    assert share == pytest.approx(0.9, abs=0.01)
    assert share == pytest.approx(float(np.corrcoef(true, true + noise)[0, 1]) ** 2, abs=0.01)


def test_reliability_is_0_where_noise_explains_everything_and_null_for_too_few() -> None:
    assert reliability([1.0, 1.1, 0.9], [0.2] * 3) == 0.0
    assert reliability([1.0, 1.0, 1.0], [0.0] * 3) == 0.0
    assert reliability([1.0, 2.0], [0.1] * 2) is None


def test_evaluations_that_order_alike_have_one_dimension() -> None:
    line = {str(i): float(i) for i in range(8)}
    assert effective_dimension({"a": line, "b": {key: 2 * value for key, value in line.items()}}) == pytest.approx(1.0)
    bend = {key: (value - 3.5) ** 2 for key, value in line.items()}
    assert effective_dimension({"a": line, "b": bend}) == pytest.approx(2.0)


def test_the_reliability_of_the_top_third_is_that_of_a_part_that_noise_helped_to_choose() -> None:
    rng = np.random.default_rng(2)
    stated, true = [], []
    for _ in range(300):
        signal = rng.normal(0, 0.08, 60)
        pairs = sorted(zip((signal + rng.normal(0, 0.05, 60)).tolist(), signal.tolist(), strict=True))
        values, top = [value for value, _ in pairs], pairs[-20:]
        stated.append(part_reliability(values[-20:], values, reliability(values, [0.05] * 60)))
        true.append(np.corrcoef(*zip(*top, strict=True))[0, 1] ** 2)
    assert np.mean(stated) == pytest.approx(np.mean(true), abs=0.05)
