"""Statistics against scipy, numpy and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from nas.core import stats


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_t_critical_is_scipys(confidence: float) -> None:
    for dof in (1, 2, 3, 4, 5, 9, 10, 29, 30, 100):
        expected = scipy_stats.t.ppf((1 + confidence) / 2, dof)
        assert stats.t_critical(confidence, dof) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], 5.0), ([5.0, 4.0], 4.0), ([9.0, 3.0, 7.0, 5.0, 8.0], 3.0), ([9.0, 3.0, 7.0, 4.0, 5.0, 8.0], 3.5)],
)
def test_the_floor_is_the_mean_of_the_lowest_fifth(values: list[float], expected: float) -> None:
    assert stats.floor(values) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e9), min_size=20, max_size=60), st.sampled_from([0.05, 0.25, 0.5, 0.95]))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    assert stats.quantile(values, q) == pytest.approx(np.quantile(values, q))


@pytest.mark.parametrize(
    ("n", "q", "expected"), [(19, 0.95, False), (20, 0.95, True), (99, 0.99, False), (2, 0.5, True)]
)
def test_quantile_needs_samples_in_its_tail(n: int, q: float, expected: bool) -> None:
    assert (stats.quantile([float(i) for i in range(n)], q) is not None) == expected


def test_repetition_figure() -> None:
    values = [12.0, 10.0, 11.0]
    figure = stats.repetition_figure(values, "ms")
    assert (figure.value, figure.minimum, figure.maximum, figure.n, figure.unit) == (11.0, 10.0, 12.0, 3, "ms")
    sd = math.sqrt(math.pi / 2) * np.std(np.log(values), ddof=1) / math.sqrt(3)
    low, high = scipy_stats.t.interval(0.95, 2, loc=math.log(11.0), scale=sd)
    assert (figure.low, figure.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert figure.log_sd == pytest.approx((high - low) / 2 / stats.Z95), "chances by it count the few repetitions"


@given(st.lists(st.floats(0.01, 1e6), min_size=2, max_size=20))
def test_an_interval_holds_its_median(values: list[float]) -> None:
    figure = stats.repetition_figure(values, "ms")
    assert figure.low is not None and figure.value is not None and figure.high is not None
    assert figure.low <= figure.value <= figure.high


def test_one_repetition_has_a_value_and_no_interval() -> None:
    figure = stats.repetition_figure([12.0], "ms")
    assert (figure.value, figure.low, figure.high) == (12.0, None, None)


def test_no_repetition_is_null_with_a_reason() -> None:
    figure = stats.repetition_figure([], "ms", reason="all refused")
    assert (figure.value, figure.reason) == (None, "all refused")


def test_no_correlation_makes_a_sum_noisier_than_is_stated() -> None:
    assert stats.sum_log_sd((10.0, 0.03), (10.0, 0.01)) == pytest.approx(0.02)
    assert stats.sum_log_sd((1.0, 0.03), (0.0, 0.5)) == pytest.approx(0.03)


@pytest.mark.parametrize("values", [[0.0, 1.0], [-1.0, 2.0, 3.0], [math.nan, 1.0], [math.inf, 1.0], [0.0]])
def test_numbers_that_no_repetition_can_have_are_no_figure(values: list[float]) -> None:
    figure = stats.repetition_figure(values, "MB")
    assert figure.value is None and figure.reason and figure.n == len(values)


def test_the_interval_of_a_share_is_wilsons() -> None:
    for hits, count in ((0, 10), (3, 10), (23, 25), (25, 25)):
        interval = scipy_stats.binomtest(hits, count).proportion_ci(method="wilson")
        assert stats.share_interval(hits, count) == pytest.approx((interval.low, interval.high), abs=1e-6)
