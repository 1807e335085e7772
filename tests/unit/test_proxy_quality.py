"""Quality: arithmetic by hand, spreads, ties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.errors import InvalidInput
from nas.proxy.quality import (
    LM_PRIOR,
    TASK_PRIOR,
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


def test_groups_weigh_the_same_and_seeds_are_averaged(scale: QualityScale) -> None:
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
    assert quality.sd == pytest.approx(math.sqrt((LM_PRIOR.sd / 2) ** 2 / 2 + (TASK_PRIOR.sd / 2) ** 2))


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
    expected = math.sqrt((LM_PRIOR.dof * LM_PRIOR.sd**2 + 1 * 0.2**2) / (LM_PRIOR.dof + 1))
    assert scale.spreads["lm"] == pytest.approx((expected, LM_PRIOR.dof + 1))
