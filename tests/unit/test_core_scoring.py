"""Budgets, objectives, the reference point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from study_support import CHAT, DEVICE, TINY, figure, tiny_space

from nas.core.errors import InvalidInput
from nas.core.measurement import Figure
from nas.core.scoring import (
    PROXY,
    MeasurementKey,
    QualityValue,
    axis,
    check_budgets,
    check_quality,
    measurement_keys,
    ratio_of_limit,
    reference_point,
    require_figures,
    require_sensors,
)
from nas.core.space import SearchSpace
from nas.core.stats import Z95

LOCAL = MeasurementKey("local", "fake", "chat")
PHONE = LOCAL._replace(device="phone")
QUALITY = QualityValue(0.9, 0.02, "proxy")
Figures = Mapping[MeasurementKey, Mapping[str, Figure]]


def space_of(*budgets: dict[str, Any], **changes: Any) -> SearchSpace:
    return tiny_space(**{"budgets": [{**CHAT, **budget} for budget in budgets]} | changes)


def at(place: MeasurementKey = LOCAL, **figures: float | Figure | None) -> Figures:
    return {place: {name: value if isinstance(value, Figure) else figure(value) for name, value in figures.items()}}


def two_devices(aggregate: str, metric: str = "ttft") -> SearchSpace:
    objectives = [TINY["objectives"][0], {"name": "speed", "metric": metric, "aggregate": aggregate, **CHAT}]
    return space_of(devices=["local", "phone"], objectives=objectives)


@pytest.mark.parametrize(
    ("value", "verdict"), [(7.0, "feasible"), (13.0, "infeasible"), (9.5, "borderline"), (10.5, "borderline")]
)
def test_an_absolute_budget_is_judged_by_the_chance_to_keep_it(value: float, verdict: str) -> None:
    space = space_of({"metric": "ttft", "max": "10ms"})
    (check,) = check_budgets(space, at(ttft=figure(value, spread=0.1)), {})
    assert check.verdict == verdict
    assert check.limit == 10.0
    assert check.log_excess == pytest.approx(math.log(value / 10))


@pytest.mark.parametrize(
    ("sds_below", "chance", "verdict"),
    [(1.66, 0.9515, "feasible"), (1.63, 0.9484, "borderline"), (0.0, 0.5, "borderline"), (-1.66, 0.0485, "infeasible")],
)
def test_few_repetitions_are_enough_where_the_chance_is_95_in_100(
    sds_below: float, chance: float, verdict: str
) -> None:
    space = space_of({"metric": "ttft", "max": "10ms"})
    ttft = Figure(value=10 * math.exp(-0.02 * sds_below), log_sd=0.02, n=3, unit="ms")
    (check,) = check_budgets(space, at(ttft=ttft), {})
    assert check.verdict == verdict
    assert check.chance == pytest.approx(chance, abs=1e-3)
    assert check.log_sd == 0.02


@pytest.mark.parametrize(("value", "verdict"), [(9.5, "feasible"), (10.0, "feasible"), (10.5, "infeasible")])
def test_in_the_end_the_likelier_of_the_two_decides(value: float, verdict: str) -> None:
    space = space_of({"metric": "ttft", "max": "10ms"})
    (check,) = check_budgets(space, at(ttft=figure(value, spread=0.1)), {}, final=True)
    assert check.verdict == verdict


@pytest.mark.parametrize(("value", "final"), [(9.0, "feasible"), (11.0, "infeasible")])
def test_a_figure_without_an_interval_is_never_sure(value: float, final: str) -> None:
    space = space_of({"metric": "ttft", "max": "10ms"})
    figures = at(ttft=Figure(value=value, n=1, unit="ms"))
    for settled, verdict in ((False, "borderline"), (True, final)):
        (check,) = check_budgets(space, figures, {}, final=settled)
        assert (check.verdict, check.chance, check.log_sd, check.low, check.high) == (verdict, None, None, None, None)


def test_a_file_is_counted_and_needs_no_interval() -> None:
    space = tiny_space(budgets=[{"metric": "file_size", "max": "10MB"}])
    (check,) = check_budgets(space, at(LOCAL._replace(workload=""), file_size=Figure(value=9.9, n=1, unit="MB")), {})
    assert (check.verdict, check.chance, check.low, check.high) == ("feasible", 1.0, 9.9, 9.9)


@pytest.mark.parametrize(
    ("limit", "sd"),
    [("10ms", math.hypot(0.03, 0.04)), ("0.5x", math.hypot(0.03, 0.02))],
    ids=[
        "an absolute limit: shared noise as well",
        "a relative limit: the reference's noise, and none that both share",
    ],
)
def test_a_limit_counts_all_of_the_noise_against_it(limit: str, sd: float) -> None:
    space = space_of({"metric": "ttft", "max": limit})
    ttft = Figure(value=9.5, log_sd=0.03, shared_log_sd=0.04, n=3, unit="ms")
    published = Figure(value=20.0, log_sd=0.02, shared_log_sd=0.04, n=3, unit="ms")
    (check,) = check_budgets(space, at(ttft=ttft), at(ttft=published))
    assert check.log_sd == pytest.approx(sd)
    assert check.chance == pytest.approx(0.5 * math.erfc(math.log(0.95) / sd / math.sqrt(2)))
    assert (check.low, check.high) == pytest.approx((9.5 * math.exp(-Z95 * sd), 9.5 * math.exp(Z95 * sd)))


def test_a_relative_limit_of_a_reference_of_unknown_noise_is_not_sure() -> None:
    space = space_of({"metric": "ttft", "max": "0.5x"})
    (check,) = check_budgets(space, at(ttft=figure(2.0, 0.1)), at(ttft=Figure(value=20.0, n=1, unit="ms")))
    assert (check.verdict, check.chance) == ("borderline", None)


def test_trials_differ_by_their_own_noise_and_a_value_has_all_of_it() -> None:
    space = space_of()
    latency = Figure(value=20.0, log_sd=0.03, shared_log_sd=0.04, n=3, unit="ms")
    latency_axis = axis(space, space.objectives[1], at(latency=latency), at(latency=figure(10.0, 0.1)), QUALITY)
    assert latency_axis is not None
    assert (latency_axis.sd, latency_axis.value_sd) == pytest.approx((0.03, 0.05))
    unknown = axis(space, space.objectives[1], at(latency=Figure(value=20.0, unit="ms")), at(latency=10.0), QUALITY)
    assert unknown is not None
    assert (unknown.sd, unknown.value_sd) == (None, None)


def test_over_devices_a_value_has_the_noise_of_the_reference() -> None:
    space = two_devices("geomean")
    trial, reference = (
        Figure(value=9.0, log_sd=0.03, shared_log_sd=0.5, unit="ms"), Figure(value=9.0, log_sd=0.04, unit="ms")
    )  # fmt: skip
    places = (at(ttft=trial), at(PHONE, ttft=trial)), (at(ttft=reference), at(PHONE, ttft=reference))
    speed_axis = axis(space, space.objectives[1], *({**local, **phone} for local, phone in places), QUALITY)
    assert speed_axis is not None
    assert (speed_axis.sd, speed_axis.value_sd) == pytest.approx((0.03 / math.sqrt(2), 0.05 / math.sqrt(2)))


@pytest.mark.parametrize(("value", "verdict"), [(9.99, "feasible"), (10.01, "infeasible")])
def test_a_figure_of_no_noise_is_sure(value: float, verdict: str) -> None:
    space = space_of({"metric": "ttft", "max": "10ms"})
    assert [check.verdict for check in check_budgets(space, at(ttft=figure(value)), {})] == [verdict]


def test_a_relative_budget_is_a_multiple_of_the_published_reference_at_the_same_place() -> None:
    space = space_of({"metric": "ttft", "max": "1.5x"})
    published = at(ttft=10.0)
    assert [check.verdict for check in check_budgets(space, at(ttft=14.0), published)] == ["feasible"]
    assert [check.verdict for check in check_budgets(space, at(ttft=16.0), published)] == ["infeasible"]
    assert check_budgets(space, at(ttft=16.0), {}) == []
    assert ratio_of_limit(space.budgets[0], published, LOCAL) == pytest.approx(1.5)
    assert ratio_of_limit(space.budgets[0], {}, LOCAL) is None


@pytest.mark.parametrize(("value", "verdict"), [(120.0, "feasible"), (80.0, "infeasible"), (101.0, "borderline")])
def test_where_more_is_better_the_limit_is_a_least_value(value: float, verdict: str) -> None:
    space = space_of({"metric": "prefill_tps", "min": "100tok/s"})
    (check,) = check_budgets(space, at(prefill_tps=figure(value, spread=0.05, unit="tok/s")), {})
    assert check.verdict == verdict
    assert check.log_excess == pytest.approx(-math.log(value / 100))


def test_a_figure_that_could_not_be_read_breaks_no_budget() -> None:
    space = space_of({"metric": "decode_rss", "max": "10MB"})
    (check,) = check_budgets(space, at(decode_rss=None), {}, final=True)
    assert check.verdict == "unknown"
    assert check.value is None
    assert check.log_excess is None
    assert "unknown" in str(check)


def test_a_budget_holds_on_every_device_and_names_it() -> None:
    space = space_of({"metric": "ttft", "max": "10ms"}, devices=["local", "phone"])
    checks = check_budgets(space, {**at(ttft=5.0), **at(PHONE, ttft=20.0)}, {})
    assert {check.name: check.verdict for check in checks} == {
        "ttft@chat on local/fake": "feasible",
        "ttft@chat on phone/fake": "infeasible",
    }
    assert str(checks[1]) == "ttft@chat on phone/fake: 20 ms, limit 10 ms"


def test_a_large_figure_has_no_exponent() -> None:
    (check,) = check_budgets(space_of({"metric": "ttft", "max": "30s"}), at(ttft=41234.0), {})
    assert str(check) == "ttft@chat on local/fake: 41,234 ms, limit 30,000 ms"


def test_a_budget_of_one_device_says_nothing_of_others() -> None:
    space = space_of({"metric": "ttft", "max": "10ms", "device": "phone"}, devices=["local", "phone"])
    assert measurement_keys(space, space.budgets[0]) == [PHONE]
    assert check_budgets(space, at(ttft=20.0), {}) == []


def of_quality(*budgets: dict[str, Any]) -> SearchSpace:
    return tiny_space(budgets=[*budgets])


@pytest.mark.parametrize("limit", ["0.95x", 0.95, "0.95"])
@pytest.mark.parametrize(
    ("recall", "early", "final"),
    [
        (1.0, "feasible", "feasible"), (0.96, "borderline", "feasible"), (0.94, "borderline", "infeasible"),
        (0.9, "infeasible", "infeasible"), (-0.2, "infeasible", "infeasible"),
    ],
)  # fmt: skip
def test_a_budget_on_quality_is_judged_by_the_chance_to_keep_it(
    limit: str | float, recall: float, early: str, final: str
) -> None:
    space = of_quality({"metric": "quality.recall", "min": limit})
    quality = QualityValue(2.0, 0.0, "", recall, 0.02)
    for settled, verdict in ((False, early), (True, final)):
        (check,) = check_quality(space, quality, final=settled)
        assert (check.verdict, check.limit, check.key) == (verdict, 0.95, PROXY)
        assert check.log_excess == pytest.approx(0.95 - recall)
        assert check.log_sd == pytest.approx(0.02 * math.hypot(1, recall)), "the reference has the same noise"
    assert str(check) == f"quality.recall on the proxy: {recall:g}, limit 0.95"
    assert check_budgets(space, at(ttft=1.0), {}) == []


def test_recall_that_a_rung_does_not_measure_is_not_judged() -> None:
    space = of_quality({"metric": "quality.recall", "min": "0.9x"}, {"metric": "quality", "min": "0.9x"})
    (check,) = check_quality(space, QUALITY, final=True)
    assert (check.budget, check.value, check.verdict) == ("quality", 0.9, "feasible")


def test_an_objective_at_one_place_keeps_its_unit() -> None:
    space = space_of()
    latency_axis = axis(space, space.objectives[1], at(latency=figure(20.0, 0.1)), at(latency=10.0), QUALITY)
    assert latency_axis is not None
    assert latency_axis.value == 20.0
    assert latency_axis.coordinate == pytest.approx(math.log(2))
    assert latency_axis.sd > 0


def test_quality_is_maximised() -> None:
    space = space_of()
    quality_axis = axis(space, space.objectives[0], {}, {}, QUALITY)
    assert quality_axis is not None
    assert (quality_axis.value, quality_axis.coordinate, quality_axis.sd) == (0.9, -0.9, 0.02)
    assert quality_axis.value_sd == pytest.approx(0.02 * math.hypot(1, 0.9))


def test_an_objective_is_unknown_while_a_figure_is_missing() -> None:
    space = two_devices("worst")
    figures, published = at(ttft=1.0), {**at(ttft=1.0), **at(PHONE, ttft=1.0)}
    assert axis(space, space.objectives[1], figures, published, QUALITY) is None
    assert axis(space, space.objectives[1], {**figures, **at(PHONE, ttft=None)}, published, QUALITY) is None


@pytest.mark.parametrize(("aggregate", "ratio"), [("worst", 2.0), ("geomean", math.sqrt(2.0 * 0.5))])
@pytest.mark.parametrize("metric", ["ttft", "prefill_tps"])
def test_over_devices_an_objective_is_a_ratio_to_the_reference(aggregate: str, ratio: float, metric: str) -> None:
    space = two_devices(aggregate, metric)
    factors = (2.0, 0.5) if metric == "ttft" else (0.5, 2.0)
    figures = {**at(**{metric: 10.0 * factors[0]}), **at(PHONE, **{metric: 50.0 * factors[1]})}
    published = {**at(**{metric: 10.0}), **at(PHONE, **{metric: 50.0})}
    speed_axis = axis(space, space.objectives[1], figures, published, QUALITY)
    assert speed_axis is not None
    assert speed_axis.value == pytest.approx(ratio)
    assert speed_axis.coordinate == pytest.approx(math.log(ratio))


def corner(space: SearchSpace, published: Figures, attention: Figures) -> list[float]:
    return reference_point(space, published, attention, QualityValue(0.8, 0.05, ""))


def test_the_reference_point_takes_budgets() -> None:
    space = space_of(
        {"metric": "ttft", "max": "12ms"}, {"metric": "decode_p50", "max": "2x"}, {"metric": "peak_rss", "max": "1.5x"}
    )
    published = at(ttft=10.0, decode_p50=1.0, latency=26.0, peak_rss=40.0)
    quality, latency, memory = corner(space, published, published)
    assert quality == pytest.approx(-(0.8 - 3 * 0.05))
    assert latency == pytest.approx(math.log((12.0 + 16 * 2.0) / 26.0))
    assert memory == pytest.approx(math.log(1.5))


def test_the_reference_point_takes_a_budget_on_quality() -> None:
    space = of_quality({"metric": "quality", "min": "0.97x"})
    published = at(latency=26.0, peak_rss=40.0)
    assert corner(space, published, published)[0] == -0.97
    assert ratio_of_limit(space.budgets[0], published, PROXY) == 0.97


def test_of_several_budgets_the_strictest_counts() -> None:
    space = space_of(
        {"metric": "latency", "max": "3x"}, {"metric": "latency", "max": "2x"}, {"metric": "ttft", "max": "1ms"}
    )
    published = at(ttft=10.0, latency=26.0, peak_rss=40.0)
    assert corner(space, published, published)[1] == pytest.approx(math.log(2))


def test_without_a_budget_the_worse_reference_and_a_tenth_counts() -> None:
    space = space_of({"metric": "ttft", "max": "12ms"})
    published, attention = at(latency=26.0, peak_rss=40.0), at(latency=52.0, peak_rss=20.0)
    _, latency, memory = corner(space, published, attention)
    assert latency == pytest.approx(math.log(2 * 1.1))
    assert memory == pytest.approx(math.log(1.1))


def test_where_more_is_better_the_corner_lies_below_the_reference() -> None:
    objectives = [TINY["objectives"][0], {"name": "speed", "metric": "prefill_tps", **CHAT}]
    free, bound = (
        space_of(objectives=objectives),
        space_of({"metric": "prefill_tps", "min": "0.5x"}, objectives=objectives),
    )
    published = at(prefill_tps=100.0)
    assert corner(free, published, at(prefill_tps=80.0))[1] == pytest.approx(math.log(1.1 / 0.8))
    assert corner(bound, published, published)[1] == pytest.approx(math.log(2))


def test_references_need_the_figures_that_the_space_asks_for_and_no_others() -> None:
    space = space_of({"metric": "decode_rss", "max": "2x"})
    figures = at(latency=1.0, peak_rss=1.0, decode_rss=1.0, load=None)
    require_figures(space, figures, "published reference")
    for broken in (at(latency=1.0, peak_rss=1.0, decode_rss=None), at(latency=1.0, peak_rss=1.0)):
        with pytest.raises(InvalidInput, match=r"published reference: no decode_rss at local/fake/chat"):
            require_figures(space, broken, "published reference")


def test_a_counter_is_needed_where_energy_is_measured_alone() -> None:
    counting = DEVICE.model_copy(update={"energy_counter": "RAPL package"})
    space = tiny_space(
        devices=["local", "phone"],
        runtimes=[
            {"name": "fake", "quantisation": "q4_0", "devices": ["local"]},
            {"name": "other", "quantisation": "q4_0", "devices": ["phone"]},
        ],
        budgets=[{"metric": "energy_mj_per_token", "max": "2x", "runtime": "fake", **CHAT}],
    )
    require_sensors(space, {"local": counting, "phone": DEVICE})
    with pytest.raises(InvalidInput, match="energy_mj_per_token on local: box has no energy counter"):
        require_sensors(space, {"local": DEVICE, "phone": counting})
