"""How far two runtimes order layouts alike."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from scipy.stats import kendalltau, spearmanr  # type: ignore[import-untyped]
from study_support import figure, summary, tiny_space

from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.scoring import MeasurementKey
from nas.infra.store.rows import Study, Trial
from nas.search.analysis.agreement import COMPARED, FEWEST, Agreement, agreements, rank_correlation
from nas.search.analysis.record import MeasurementSummary, Record, StudyRecord

RUNTIMES = ("left", "right")
LAYOUT = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")


def test_one_order_by_hand() -> None:
    correlation = rank_correlation([1.0, 2.0, 3.0, 4.0, 5.0], [20.0, 10.0, 40.0, 30.0, 50.0])
    assert correlation.spearman is not None and correlation.kendall is not None
    assert correlation.spearman.value == pytest.approx(1 - 6 * 4 / (5 * 24))  # four ranks are one off
    assert correlation.kendall.value == pytest.approx((8 - 2) / 10)  # two pairs of ten have changed places
    assert correlation.layouts == 5 and correlation.reason is None
    z, error = math.atanh(0.8), math.sqrt((1 + 0.8**2 / 2) / 2)
    assert math.atanh(correlation.spearman.low) == pytest.approx(z - 1.959964 * error)
    assert math.atanh(correlation.kendall.high) == pytest.approx(math.atanh(0.6) + 1.959964 * math.sqrt(0.437))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2, 2, 3, 4, 4, 4, 9], [3, 1, 2, 2, 5, 4, 9, 9]),
        ([5, 5, 5, 5, 5, 1], [1, 2, 3, 4, 5, 6]),
        ([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3]),
    ],
)
def test_ties_are_shared_as_scipy_shares_them(first: list[float], second: list[float]) -> None:
    correlation = rank_correlation(first, second)
    assert correlation.spearman is not None and correlation.kendall is not None
    assert correlation.spearman.value == pytest.approx(spearmanr(first, second).statistic)
    assert correlation.kendall.value == pytest.approx(kendalltau(first, second).statistic)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("n", [FEWEST, 20])
def test_a_perfect_order_is_not_a_certain_one(n: int, sign: int) -> None:
    order = [float(i) for i in range(n)]
    correlation = rank_correlation(order, [sign * rank for rank in order])
    for coefficient in (correlation.spearman, correlation.kendall):
        assert coefficient is not None
        near, far = (coefficient.high, coefficient.low) if sign > 0 else (coefficient.low, coefficient.high)
        assert coefficient.value == near == sign
        assert -1 < far < 1
    few, many = rank_correlation(order[:5], order[:5]), rank_correlation(order, order)
    assert few.kendall is not None and many.kendall is not None
    assert few.kendall.low <= many.kendall.low


def test_too_few_layouts_and_equal_ones_have_no_order() -> None:
    few = rank_correlation([1.0] * (FEWEST - 1), [2.0] * (FEWEST - 1))
    assert few.spearman is few.kendall is None
    assert few.reason == f"{FEWEST - 1} layouts; a rank correlation needs {FEWEST}"
    assert rank_correlation([], []).layouts == 0
    equal = rank_correlation([1.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert equal.spearman is equal.kendall is None
    assert equal.reason == "all layouts have the same value on one of the two"


def measurement(**figures: Figure) -> MeasurementSummary:
    return summary({name: figures.get(name, figure(None)) for name in COMPARED})


def agreement(*pairs: tuple[float | None, float | None], **more: Any) -> dict[str, Agreement]:
    """Agreements by metric, of layouts with these latencies on the two runtimes."""
    spread = more.pop("spread", 0.0)
    records = {}
    for number, pair in enumerate(pairs):
        measurements = {
            MeasurementKey("local", runtime, "chat"): measurement(latency=figure(value, spread))
            for runtime, value in zip(RUNTIMES, pair, strict=True)
        }
        records[number] = Record(cast(Trial, None), LAYOUT, measurements)
    records[99] = Record(cast(Trial, None), LAYOUT, {MeasurementKey("local", "left", "chat"): measurement()})
    space = tiny_space(runtimes=[{"name": name, "quantisation": "q4_0"} for name in more.pop("names", RUNTIMES)])
    record = StudyRecord(cast(Study, None), space, records, None, None)
    return {row.metric: row for row in agreements(record)}


def test_only_what_both_measured_counts() -> None:
    by_metric = agreement((1, 10), (2, 20), (3, 30), (4, 40), (5, 50), (6, None))
    latency = by_metric["latency"]
    assert (latency.runtimes, latency.device, latency.workload) == (RUNTIMES, "local", "chat")
    assert latency.correlation.layouts == 5
    assert latency.correlation.kendall is not None and latency.correlation.kendall.value == 1
    assert by_metric.keys() == set(COMPARED)
    assert by_metric["peak_rss"].correlation.reason == f"0 layouts; a rank correlation needs {FEWEST}"


def test_pairs_count_where_both_can_tell_them_apart() -> None:
    surely = agreement((1, 10), (2, 20), (4, 5))["latency"]
    assert (surely.apart, surely.alike) == (3, 1)
    # 1 and 2 meet on the left when each may be 50 % off, 10 and 20 on the right.
    vaguely = agreement((1, 10), (2, 20), (4, 2), spread=0.5)["latency"]
    assert (vaguely.apart, vaguely.alike) == (1, 0)


def test_one_runtime_has_nothing_to_agree_with() -> None:
    assert agreement((1, 1), names=("left",)) == {}
    assert len(agreements(_three())) == 3 * len(COMPARED)


def _three() -> StudyRecord:
    space = tiny_space(runtimes=[{"name": name, "quantisation": "q4_0"} for name in "abc"])
    return StudyRecord(cast(Study, None), space, {}, None, None)
