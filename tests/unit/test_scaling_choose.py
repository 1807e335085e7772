"""The choice of a member among candidates, and the criteria that they are compared by."""

from __future__ import annotations

import math

import pytest
from study_support import TINY, tiny_space

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.core.scoring import Axis
from nas.core.space import SearchSpace
from nas.search.proxy.ladder import proxy_of
from nas.train.scaling.candidates import ScaledLayout
from nas.train.scaling.choose import CandidateResult, choose, tried_of
from nas.train.scaling.source import (
    EXPONENT,
    HELD,
    PER_TOKEN,
    Criteria,
    _reference_decision,
    effective_weights,
    narrowed,
)

LIMITS = {"quality": -0.9, "latency": math.log(1.2)}
LAYOUT = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")


def judged(quality: float, ratio: float) -> CandidateResult:
    axes = {
        "quality": Axis(value=quality, coordinate=-quality, sd=0.0),
        "latency": Axis(value=ratio, coordinate=math.log(ratio), sd=0.0),
    }
    return CandidateResult(ScaledLayout(LAYOUT, 0.0, "heads"), axes)


def failed(why: str = "killed by signal 9") -> CandidateResult:
    return CandidateResult(ScaledLayout(LAYOUT, 0.0, "heads"), {}, {}, why)


def test_the_greatest_hypervolume_by_itself_wins() -> None:
    choice = choose([judged(1.0, 1.0), judged(1.0, 0.9), judged(1.02, 1.15)], LIMITS)
    assert choice.index == 1
    assert choice.alone[1] == pytest.approx(0.1 * math.log(1.2 / 0.9))
    assert choice.front > choice.alone[1]
    assert [verdict.startswith("by itself covers") for verdict in choice.verdicts] == [True] * 3


def test_two_similar_good_candidates_do_not_lose_to_a_worse_different_one() -> None:
    assert choose([judged(1.0, 0.9), judged(1.0005, 0.9005), judged(0.95, 0.85)], LIMITS).index in (0, 1)


def test_a_tie_goes_to_the_nearest_to_the_pattern() -> None:
    assert choose([judged(1.0, 0.9), judged(1.0, 0.9)], LIMITS).index == 0


def test_where_all_are_worse_than_the_reference_point_the_nearest_to_the_pattern_wins() -> None:
    choice = choose([judged(1.0, 1.3), judged(0.8, 0.5)], LIMITS)
    assert (choice.index, choice.front) == (0, 0.0)
    assert choice.verdicts == (
        "worse than the reference point: latency 1.30x the nearest candidate's",
        "worse than the reference point: quality 0.8",
    )
    assert "no candidate is better than the reference point" in choice.reason()
    axes = {"skill": Axis(value=0.8, coordinate=-0.8, sd=0.0)}  # objectives may have any name
    choice = choose([CandidateResult(ScaledLayout(LAYOUT, 0.0, "heads"), axes)], {"skill": -0.9})
    assert choice.verdicts == ("worse than the reference point: skill 0.8",)


def test_failures_are_recorded_and_never_chosen() -> None:
    choice = choose([failed(), judged(1.0, 1.3)], LIMITS)
    assert choice.index == 1
    records = tried_of([failed(), judged(1.0, 1.3)], choice, tiny_space())
    assert [record.chosen for record in records] == [False, True]
    assert records[0].verdict == "failed: killed by signal 9"


def test_where_all_failed_the_error_has_the_first_failure() -> None:
    with pytest.raises(CandidateFailed, match="no candidate could be measured: killed by signal 9"):
        choose([failed(), failed("other")], LIMITS)


def test_an_objective_that_no_candidate_has_does_not_count() -> None:
    choice = choose([judged(1.0, 1.0), judged(1.0, 0.9)], {**LIMITS, "energy": 0.1})
    assert choice.names == ("quality", "latency")


def criteria(space: SearchSpace | None = None, **more: object) -> Criteria:
    values = {"reference_point": None, "quality": 1.0, "proxies": {}} | more
    return Criteria(narrowed(space or tiny_space(), (), ()), **values)  # type: ignore[arg-type]


def test_without_a_study_the_reference_point_is_a_ratio() -> None:
    limits = criteria(quality=2.0).limits()
    assert limits == {"quality": -1.8, "latency": math.log(1.2), "memory": math.log(1.2)}
    assert criteria(reference_point=(-0.5, 0.1, 0.2)).limits() == {"quality": -0.5, "latency": 0.1, "memory": 0.2}


def test_recall_is_a_quality_and_no_ratio() -> None:
    objectives = [*TINY["objectives"], {"name": "recall", "metric": "quality.recall"}]
    space = tiny_space(objectives=objectives)
    assert criteria(space, quality=2.0).limits()["recall"] == -1.8
    decision = _reference_decision(space, {"quality": -0.9, "latency": 0.0, "memory": 0.0, "recall": -0.7})
    assert decision.value.endswith("recall 0.7")


def test_more_weights_of_a_pattern_are_a_little_better() -> None:
    larger = Layout.parse("d128 v256 ffn=swiglu:640 [C3 A2/1 C3]")
    value = criteria(quality=1.5).quality_of(larger, LAYOUT)
    ratio = larger.params.non_embedding / LAYOUT.params.non_embedding
    assert value.value == pytest.approx(1.5 * ratio**EXPONENT)
    assert value.proxy == ""


def test_a_trained_proxy_counts_with_its_own_quality() -> None:
    space = tiny_space()
    other = Layout.parse("d256 v256 ffn=swiglu:640 [C3 A4/2 C3]")
    rules = criteria(space, proxies={proxy_of(other, space.quality).id: (1.2, 0.03)})
    assert rules.quality_of(other, other)[:2] == (1.2, 0.03)
    assert rules.quality_of(LAYOUT, LAYOUT).value == 1.2, "it has the same proxy"
    assert criteria(space).trained(Layout.parse("d32 v256 ffn=swiglu:640 [C3]")) is None


def test_experts_count_with_the_geometric_mean() -> None:
    layout = Layout.parse(LFM2["LFM2-8B-A1B"])
    assert effective_weights(layout) == pytest.approx(math.sqrt(8_205_712_128 * (1_557_740_288 - 65536 * 2048)))


def test_computed_bytes_replace_measurements() -> None:
    narrow = Layout.parse("d128 v256 ffn=swiglu:160 [C3 A2/1 C3]")
    axes = criteria().computed_axes(narrow, LAYOUT)
    assert axes.keys() == {"quality", PER_TOKEN, HELD} == criteria().computed_limits().keys()
    assert axes[HELD].coordinate < 0 < axes["quality"].coordinate + 1


def test_objectives_of_devices_that_are_left_out_apply_to_the_rest() -> None:
    space = tiny_space(
        objectives=[
            {"name": "quality", "metric": "quality"},
            {"name": "here", "metric": "latency", "workload": "chat", "device": "local"},
        ]
    )
    other = narrowed(space, ("phone",), ())
    assert (other.devices, other.objectives[1].device, other.budgets) == (("phone",), None, ())
    assert narrowed(space, (), ()).objectives[1].device == "local"


def test_runtimes_stay_on_their_devices_unless_one_would_have_none() -> None:
    fake, other = {"name": "fake", "quantisation": "q4_0"}, {"name": "llama.cpp", "quantisation": "q4_0"}
    space = tiny_space(
        devices=["local", "phone"],
        runtimes=[{**fake, "devices": ["local"]}, {**other, "devices": ["phone"]}],
        objectives=[
            {"name": "quality", "metric": "quality"},
            {"name": "latency", "metric": "latency", "workload": "chat", "runtime": "llama.cpp"},
        ],
    )
    assert narrowed(space, ("phone",), ()).targets == [("phone", "llama.cpp")]
    assert narrowed(space, ("new",), ()).targets == [("new", "fake"), ("new", "llama.cpp")]
    assert narrowed(space, (), space.runtimes[1:]).targets == [("phone", "llama.cpp")]
    assert narrowed(space, ("phone",), space.runtimes[:1]).targets == [("phone", "fake")]
    local = narrowed(space, ("local",), ())
    assert (local.targets, local.objectives[1].runtime) == ([("local", "fake")], None)
