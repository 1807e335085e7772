"""Which candidate becomes the member, and by which coordinates."""

from __future__ import annotations

import math

import pytest
from service_support import tiny_space

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.core.scoring import Axis
from nas.core.space import SearchSpace
from nas.family.choose import Judged, choose, tried_of
from nas.family.scale import Scaled
from nas.family.terms import EXPONENT, HELD, PER_TOKEN, Terms, effective_weights, narrowed
from nas.proxy.ladder import proxy_of

LIMITS = {"quality": -0.9, "latency": math.log(1.2)}
LAYOUT = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")


def judged(quality: float, ratio: float) -> Judged:
    axes = {
        "quality": Axis(value=quality, coordinate=-quality, sd=0.0),
        "latency": Axis(value=ratio, coordinate=math.log(ratio), sd=0.0),
    }
    return Judged(Scaled(LAYOUT, 0.0, "heads"), axes)


def failed(why: str = "killed by signal 9") -> Judged:
    return Judged(Scaled(LAYOUT, 0.0, "heads"), {}, {}, why)


def test_the_greatest_hypervolume_alone_wins() -> None:
    choice = choose([judged(1.0, 1.0), judged(1.0, 0.9), judged(1.02, 1.15)], LIMITS)
    assert choice.index == 1
    assert choice.alone[1] == pytest.approx(0.1 * math.log(1.2 / 0.9))
    assert choice.front > choice.alone[1]
    assert [verdict.startswith("alone keeps") for verdict in choice.verdicts] == [True] * 3


def test_two_good_ones_that_are_alike_do_not_lose_to_a_worse_one_of_its_own_kind() -> None:
    assert choose([judged(1.0, 0.9), judged(1.0005, 0.9005), judged(0.95, 0.85)], LIMITS).index in (0, 1)


def test_a_tie_goes_to_the_nearest_to_the_pattern() -> None:
    assert choose([judged(1.0, 0.9), judged(1.0, 0.9)], LIMITS).index == 0


def test_outside_the_corner_the_nearest_to_the_pattern_is_taken_and_said() -> None:
    choice = choose([judged(1.0, 1.3), judged(0.8, 0.5)], LIMITS)
    assert (choice.index, choice.front) == (0, 0.0)
    assert choice.verdicts == (
        "outside the corner: latency 1.30x the nearest candidate's", "outside the corner: quality 0.8",
    )  # fmt: skip
    assert "none is inside the corner" in choice.reason()


def test_failures_are_told_and_never_chosen() -> None:
    choice = choose([failed(), judged(1.0, 1.3)], LIMITS)
    assert choice.index == 1
    records = tried_of([failed(), judged(1.0, 1.3)], choice, tiny_space())
    assert [each.chosen for each in records] == [False, True]
    assert records[0].verdict == "failed: killed by signal 9"


def test_where_all_failed_the_failure_is_told() -> None:
    with pytest.raises(CandidateFailed, match="no candidate could be measured: killed by signal 9"):
        choose([failed(), failed("other")], LIMITS)


def test_an_objective_that_nobody_can_tell_does_not_count() -> None:
    choice = choose([judged(1.0, 1.0), judged(1.0, 0.9)], {**LIMITS, "energy": 0.1})
    assert choice.names == ("quality", "latency")


def terms(space: SearchSpace | None = None, **more: object) -> Terms:
    values = {"corner": None, "quality": 1.0, "proxies": {}} | more
    return Terms(narrowed(space or tiny_space(), (), ()), **values)  # type: ignore[arg-type]


def test_without_a_study_the_corner_is_said_in_ratios() -> None:
    limits = terms(quality=2.0).limits()
    assert limits == {"quality": -1.8, "latency": math.log(1.2), "memory": math.log(1.2)}
    assert terms(corner=(-0.5, 0.1, 0.2)).limits() == {"quality": -0.5, "latency": 0.1, "memory": 0.2}


def test_more_weights_of_a_pattern_are_a_little_better() -> None:
    larger = Layout.parse("d128 v256 ffn=swiglu:640 [C3 A2/1 C3]")
    value = terms(quality=1.5).quality_of(larger, LAYOUT)
    ratio = larger.params.non_embedding / LAYOUT.params.non_embedding
    assert value.value == pytest.approx(1.5 * ratio**EXPONENT)
    assert value.proxy == ""


def test_a_trained_proxy_counts_with_its_own_quality() -> None:
    space = tiny_space()
    other = Layout.parse("d256 v256 ffn=swiglu:640 [C3 A4/2 C3]")
    known = terms(space, proxies={proxy_of(other, space.quality).id: (1.2, 0.03)})
    assert known.quality_of(other, other)[:2] == (1.2, 0.03)
    assert known.quality_of(LAYOUT, LAYOUT).value == (1.2 if known.trained(LAYOUT) else 1.0)
    assert terms(space).trained(Layout.parse("d32 v256 ffn=swiglu:640 [C3]")) is None


def test_experts_count_by_the_geometric_mean() -> None:
    layout = Layout.parse(LFM2["LFM2-8B-A1B"])
    assert effective_weights(layout) == pytest.approx(math.sqrt(8_205_712_128 * (1_557_740_288 - 65536 * 2048)))


def test_what_is_computed_stands_in_where_nothing_is_measured() -> None:
    narrow = Layout.parse("d128 v256 ffn=swiglu:160 [C3 A2/1 C3]")
    axes = terms().computed_axes(narrow, LAYOUT)
    assert axes.keys() == {"quality", PER_TOKEN, HELD} == terms().computed_limits().keys()
    assert axes[HELD].coordinate < 0 < axes["quality"].coordinate + 1


def test_other_devices_and_runtimes_leave_no_objective_behind() -> None:
    space = tiny_space(
        objectives=[
            {"name": "quality", "metric": "quality"},
            {"name": "here", "metric": "latency", "workload": "chat", "device": "local"},
        ]
    )
    other = narrowed(space, ("phone",), ())
    assert (other.devices, other.objectives[1].device, other.budgets) == (("phone",), None, ())
    assert narrowed(space, (), ()).objectives[1].device == "local"
