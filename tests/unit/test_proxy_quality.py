"""Quality: arithmetic by hand, spreads, ties."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.errors import InvalidInput
from nas.search.proxy.quality import (
    LM_PRIOR,
    LM_SIGNAL,
    TASK_PRIOR,
    TASK_SIGNAL,
    Anchors,
    QualityScale,
    Spread,
    fix_scale,
    paired_spread,
    pool,
)

PUBLISHED = {
    0: {"lm/code": 2.0, "lm/prose": 1.0, "task/mqar": 0.05},
    1: {"lm/code": 2.2, "lm/prose": 1.0, "task/mqar": 0.0},
}
ATTENTION = {
    0: {"lm/code": 1.0, "lm/prose": 0.5, "task/mqar": 0.5},
    1: {"lm/code": 1.2, "lm/prose": 0.5, "task/mqar": 1.0},
}


@pytest.fixture
def scale() -> QualityScale:
    return fix_scale("short", PUBLISHED, [ATTENTION], minimum=0.1)


def test_the_published_reference_has_quality_one(scale: QualityScale) -> None:
    quality = scale.quality(PUBLISHED)
    assert quality.value == pytest.approx(1.0)
    assert quality.n_seeds == 2


def test_domains_weigh_the_same_and_seeds_are_averaged(scale: QualityScale) -> None:
    quality = scale.quality({0: {"lm/code": 1.05, "lm/prose": 1.5}, 1: {"lm/code": 3.15, "lm/prose": 0.9}})
    assert quality.per_group == pytest.approx({"lm/code": 1.0, "lm/prose": 1.2})
    assert quality.value == pytest.approx(1.1)


def test_chance_is_zero_and_worse_is_negative(scale: QualityScale) -> None:
    assert scale.quality({0: {"lm/code": 0.0, "lm/prose": 0.0}}).value == 0
    assert scale.quality({0: {"lm/code": -2.1, "lm/prose": -1.0}}).value == pytest.approx(-1.0)


def test_a_group_that_the_reference_did_not_learn_is_left_out_and_said_so(scale: QualityScale) -> None:
    assert set(scale.reference) == {"lm/code", "lm/prose"}
    assert scale.left_out == pytest.approx({"task/mqar": 0.025})
    assert scale.minimum == 0.1
    with_mqar = scale.quality({0: {"lm/code": 2.1, "lm/prose": 1.0, "task/mqar": 99.0}})
    assert with_mqar.value == pytest.approx(1.0)


def test_a_rung_in_which_the_reference_learns_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs more steps"):
        fix_scale("short", {0: {"task/mqar": 0.01}}, minimum=0.1)


def test_a_candidate_without_a_group_that_counts_is_refused(scale: QualityScale) -> None:
    with pytest.raises(KeyError, match="lm/prose"):
        scale.quality({0: {"lm/code": 2.0}})


def test_seeds_may_differ_between_groups() -> None:
    scale = fix_scale("r", {0: {"lm/code": 2.0, "task/mqar": 1.0}, 1: {"lm/code": 2.0}}, minimum=0.1)
    quality = scale.quality({0: {"lm/code": 1.0, "task/mqar": 0.5}, 1: {"lm/code": 3.0}})
    assert quality.per_group == pytest.approx({"lm/code": 1.0, "task/mqar": 0.5})
    assert quality.n_seeds == 1
    text, task = scale.weights["lm/code"], scale.weights["task/mqar"]
    assert quality.sd == pytest.approx(math.sqrt((text * LM_PRIOR.sd) ** 2 / 2 + (task * TASK_PRIOR.sd) ** 2))


def test_without_anchors_a_noisy_task_moves_quality_little() -> None:
    """A task of one lucky seed may not outweigh a language model that tells layouts apart."""
    one = {0: {"lm/code": 1.0, "task/selcopy": 1.0}}
    scale = fix_scale("r", one, minimum=0.1)
    assert scale.weights["task/selcopy"] / scale.weights["lm/code"] == pytest.approx(
        (1 + (LM_PRIOR.sd / LM_SIGNAL) ** 2) / (1 + (TASK_PRIOR.sd / TASK_SIGNAL) ** 2) * LM_SIGNAL / TASK_SIGNAL
    )
    lucky = scale.quality({0: {"lm/code": 1.0, "task/selcopy": 1.0 + TASK_PRIOR.sd}})
    assert 1 < lucky.value < 1 + TASK_PRIOR.sd / 4
    assert fix_scale("r", {0: {"task/selcopy": 1.0}}, minimum=0.1).quality({0: {"task/selcopy": 0.5}}).value == 0.5


def test_more_seeds_raise_the_weight_of_a_task_without_anchors() -> None:
    weights = [
        fix_scale("r", {seed: {"lm/code": 1.0, "task/selcopy": 1.0} for seed in range(seeds)}, minimum=0.1).weights
        for seeds in (1, 4)
    ]
    assert weights[0]["task/selcopy"] < weights[1]["task/selcopy"] < weights[1]["lm/code"]


def test_the_scale_survives_json(scale: QualityScale) -> None:
    assert QualityScale.model_validate_json(scale.model_dump_json()) == scale


def test_domains_of_one_training_count_as_one_unit() -> None:
    """Three domains that move together are not three measurements."""
    one = fix_scale("r", {0: {"lm/a": 1.0}}, minimum=0.1).quality({0: {"lm/a": 1.0}})
    three = {0: {"lm/a": 1.0, "lm/b": 1.0, "lm/c": 1.0}}
    assert fix_scale("r", three, minimum=0.1).quality(three).sd == pytest.approx(one.sd)


def test_more_seeds_shrink_the_deviation() -> None:
    runs = {seed: {"lm/a": 1.0} for seed in range(4)}
    scale = fix_scale("r", runs, minimum=0.1)
    assert scale.quality(runs).sd == pytest.approx(scale.quality({0: runs[0]}).sd / 2)


def test_paired_spread_takes_out_layouts_and_seeds() -> None:
    shifted = [{0: 1.0, 1: 1.3, 2: 0.9}, {0: 0.5, 1: 0.8, 2: 0.4}]
    assert paired_spread(shifted) == pytest.approx((0.0, 2))
    crossed = [{0: 1.0, 1: 1.2}, {0: 0.5, 1: 0.5}]
    # Residuals are +-0.05, four of them, on one degree of freedom.
    assert paired_spread(crossed) == pytest.approx((0.1, 1))


@given(st.floats(0.01, 1), st.lists(st.floats(-1, 1), min_size=2, max_size=2, unique=True))
def test_paired_spread_of_two_layouts_is_that_of_their_difference(offset: float, noise: list[float]) -> None:
    spread = paired_spread([{0: noise[0], 1: noise[1]}, {0: offset, 1: offset}])
    assert spread.sd * math.sqrt(2) == pytest.approx(abs(noise[0] - noise[1]) / math.sqrt(2), abs=1e-9)


@pytest.mark.parametrize("layouts", [[{0: 1.0, 1: 2.0}], [{0: 1.0}, {0: 2.0}], [{0: 1.0, 1: 2.0}, {2: 1.0, 3: 2.0}]])
def test_paired_spread_without_pairs_has_no_degrees_of_freedom(layouts: list[dict[int, float]]) -> None:
    assert paired_spread(layouts) == (0.0, 0.0)


def test_pooling_weighs_variances_by_degrees_of_freedom() -> None:
    assert pool(Spread(1.0, 1), Spread(3.0, 3)) == pytest.approx((math.sqrt(7.0), 4))


def test_one_seed_falls_back_on_the_prior() -> None:
    single = fix_scale("short", {0: {"lm/code": 2.0}}, [{0: {"lm/code": 1.0}}], minimum=0.1)
    assert single.spreads == {"lm": LM_PRIOR}
    assert single.quality({0: {"lm/code": 1.5}}).sd == pytest.approx(LM_PRIOR.sd)


def test_references_with_several_seeds_move_the_spread() -> None:
    published, other = {0: {"lm/code": 2.0}, 1: {"lm/code": 2.0}}, {0: {"lm/code": 1.0}, 1: {"lm/code": 1.8}}
    scale = fix_scale("short", published, [other], minimum=0.1)
    # Their ratios differ by 0.5 and by 0.1: residuals +-0.1, so a deviation of 0.2 on one degree of freedom.
    dof = LM_PRIOR.dof - 0.5
    expected = math.sqrt((dof * LM_PRIOR.sd**2 + 1 * 0.2**2) / (dof + 1))
    assert scale.spreads["lm"] == pytest.approx((expected, dof + 1))


def anchors(seeds: int = 3, **groups: tuple[float, float]) -> Anchors:
    """Six layouts whose groups differ by steps of the first number, with normal errors of the second."""
    layouts = [
        {
            seed: {
                f"task/{name}": 2.0 + 2 * step * (layout - 2.5) + 2 * noise * Random(f"{layout} {seed}").gauss()
                for name, (step, noise) in groups.items()
            }
            for seed in range(4)
        }
        for layout in range(6)
    ]
    return Anchors(layouts, {f"task/{name}": seeds for name in groups})


def anchored(anchors: Anchors, minimum: float = 0.1) -> QualityScale:
    published = {seed: dict.fromkeys(scores, 2.0) for seed, scores in anchors.layouts[0].items()}
    return fix_scale("r", published, minimum=minimum, anchors=anchors)


def test_anchors_move_the_noise_far_from_a_prior_that_is_wrong() -> None:
    loud = anchored(anchors(a=(1.0, 0.6))).spreads["task/a"]
    quiet = anchored(anchors(a=(1.0, 0.001))).spreads["task/a"]
    assert loud.dof == quiet.dof == 15
    assert loud.sd == pytest.approx(600 * quiet.sd), "no prior is left"


def test_a_group_of_little_signal_does_not_count_and_says_why() -> None:
    scale = anchored(anchors(clear=(1.0, 0.1), lost=(0.01, 0.6)))
    assert set(scale.reference) == {"task/clear"}
    assert scale.left_out == {"task/lost": 2.0}
    assert "signal to noise" in scale.reasons["task/lost"]
    assert scale.anchors == 6


def test_a_noisy_group_of_recall_counts_in_recall_alone() -> None:
    scale = anchored(anchors(clear=(1.0, 0.1), mqar=(0.01, 0.6)))
    assert set(scale.reference) == {"task/clear"} and scale.noisy_recall == {"task/mqar": 2.0}
    assert scale.reasons["task/mqar"].endswith("less than 2; it counts in recall alone")
    scale = QualityScale.model_validate(scale.model_dump(mode="json"))
    quality = scale.quality({0: {"task/clear": 1.0, "task/mqar": 3.0}})
    assert (quality.value, quality.recall) == (0.5, 1.5)
    assert quality.recall_sd == pytest.approx(0.6, rel=0.3) and quality.sd < 0.2
    fresh = scale.rescored({7: {"task/clear": 2.0, "task/mqar": 4.0}})
    assert fresh.quality({7: {"task/clear": 1.0, "task/mqar": 3.0}}).recall == 0.75
    layouts = [{seed: {"task/clear": 2.0, "task/mqar": 2.0} for seed in range(4)}] * 4
    assert fresh.with_noise_of(layouts).recall_spreads["task/mqar"].sd < scale.recall_spreads["task/mqar"].sd


def test_the_group_of_most_signal_counts_even_if_it_is_little() -> None:
    scale = anchored(anchors(little=(0.2, 0.6), none=(0.0, 0.6)))
    assert set(scale.reference) == {"task/little"}


def test_more_seeds_at_the_rung_raise_signal_to_noise() -> None:
    one, four = (anchored(anchors(seeds, a=(0.4, 0.4))).signals["task/a"] for seeds in (1, 4))
    assert four.ratio == pytest.approx(2 * one.ratio)
    assert four.between == one.between


def test_groups_weigh_by_precision_on_the_scale_of_their_own_signal() -> None:
    scale = anchored(anchors(sure=(0.5, 0.01), loose=(0.5, 0.6), wide=(2.0, 0.04)))
    weights = scale.weights
    assert sum(weights.values()) == pytest.approx(1.0)
    signals = scale.signals
    pulls = {group: weights[group] * signals[group].between for group in weights}
    assert pulls["task/wide"] == pytest.approx(pulls["task/sure"], rel=0.01), "a wide range is no more weight"
    assert 0.5 < pulls["task/loose"] / pulls["task/sure"] < 0.95
    runs = {0: {"task/sure": 3.0, "task/loose": 2.0, "task/wide": 2.0}}
    assert scale.quality(runs).value == pytest.approx(1 + 0.5 * weights["task/sure"])


def test_recall_is_the_mean_of_its_groups_alone() -> None:
    published = {0: {"task/mqar-16": 1.0, "task/selcopy": 2.0, "lm/code": 1.0}}
    quality = fix_scale("r", published, minimum=0.1).quality(
        {0: {"task/mqar-16": 0.5, "task/selcopy": 2.0, "lm/code": 0}}
    )
    assert quality.recall == pytest.approx(0.75)
    assert 0 < quality.value < 0.375, "text weighs more than tasks of one seed"
    assert quality.recall_sd == pytest.approx(TASK_PRIOR.sd / math.sqrt(2))
    assert fix_scale("r", {0: {"lm/code": 1.0}}, minimum=0.1).quality({0: {"lm/code": 1.0}}).recall is None


def test_fresh_seeds_compare_with_the_published_reference_on_the_same_seeds() -> None:
    scale = fix_scale("r", {0: {"lm/code": 2.0}}, minimum=0.1).rescored({7: {"lm/code": 4.0}, 8: {"lm/code": 4.0}})
    quality = scale.quality({7: {"lm/code": 4.0}, 8: {"lm/code": 2.0}})
    assert quality.value == pytest.approx(0.75)
    assert scale.per_seed({7: {"lm/code": 4.0}, 8: {"lm/code": 2.0}}) == pytest.approx({7: 1.0, 8: 0.5})


def test_ratios_are_bounded_where_the_reference_learns_nothing_on_fresh_seeds() -> None:
    scale = fix_scale("r", {0: {"task/selcopy": 0.5}}, minimum=0.25)
    for learned in (0.1, 0.0, -0.1):
        assert scale.rescored({7: {"task/selcopy": learned}}).quality({7: {"task/selcopy": 0.5}}).value == 2.0


def test_recall_of_fresh_seeds_alone_counts_in_recall() -> None:
    scale = fix_scale("r", {0: {"lm/code": 2.0, "task/mqar": 0.01}}, minimum=0.1)
    assert scale.quality({0: {"lm/code": 1.0}}).recall is None
    lm = {"lm/code": 2.0, "task/mqar": 1.0}
    fresh = scale.rescored({7: lm | {"task/automata": 0.5}, 8: lm | {"task/selcopy": 0.05}})
    assert fresh.noisy_recall == {"task/automata": 0.5}, "a group that did not count at the rung does not here"
    runs = {7: {"lm/code": 1.0, "task/automata": 1.0}, 8: {"lm/code": 2.0}}
    assert (fresh.quality(runs).value, fresh.quality(runs).recall) == (0.75, 2.0)
    assert fresh.quality(runs).recall_sd == pytest.approx(TASK_PRIOR.sd)
    assert fresh.per_seed(runs) == {7: 0.5, 8: 1.0}
    assert fresh.with_noise_of([runs, runs]).quality(runs).recall == 2.0


def test_further_layouts_tell_the_noise_by_their_degrees_of_freedom() -> None:
    scale = fix_scale("r", {0: {"lm/code": 1.0}}, minimum=0.1)
    assert scale.sd_of(4) == pytest.approx(LM_PRIOR.sd / 2)
    one, other = {0: 1.1, 1: 0.9, 2: 1.0}, {0: 0.9, 1: 1.1, 2: 1.0}
    spread = paired_spread([one, other])
    pooled = scale.with_noise_of([{seed: {"lm/code": value} for seed, value in runs.items()} for runs in (one, other)])
    assert pooled.spreads["lm"] == pool(LM_PRIOR, spread)
    assert pooled.quality({0: {"lm/code": 1.0}, 1: {"lm/code": 1.0}}).sd == pytest.approx(pooled.sd_of(2))
    assert pooled.sd_of(2) > scale.sd_of(2)


def test_a_scale_of_version_0_1_0_is_read_and_weighs_groups_alike() -> None:
    stored = {
        "rung": "r", "reference": {"lm/a": 1.0, "task/b": 2.0}, "left_out": {}, "minimum": 0.25,
        "spreads": {"lm": [0.02, 4.0], "task/b": [0.15, 4.0]},
    }  # fmt: skip
    scale = QualityScale.model_validate(stored)
    assert scale.quality({0: {"lm/a": 1.0, "task/b": 0.0}}).value == pytest.approx(0.5)
    assert scale.anchors == 0
