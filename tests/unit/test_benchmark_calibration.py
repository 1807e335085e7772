"""Calibration of the quality score: its statistics on made-up data, and what is trained."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import kendalltau  # type: ignore[import-untyped]

from benchmarks.quality.calibration import (
    SPACE,
    STUDY,
    Calibration,
    Plan,
    agreement,
    ceiling,
    complete_layouts,
    families,
    kendall,
    last_rung,
    measured,
    named,
    recorded_front,
    report,
    scales,
)
from benchmarks.search.recorded import load
from nas.core.quality_config import QualityConfig
from nas.model.text.corpus import CorpusRef
from nas.search.spaces import load_space

CORPUS = CorpusRef(source="default", hash="0" * 64)
ALL = np.ones((5, 5), dtype=np.bool_)


@pytest.mark.parametrize(
    ("order", "tau"), [([1, 2, 3, 4, 5], 1.0), ([5, 4, 3, 2, 1], -1.0), ([2, 1, 3, 4, 5], 0.8), ([2, 1, 3, 5, 4], 0.6)]
)
def test_tau_of_known_orders(order: list[int], tau: float) -> None:
    assert kendall(np.arange(5.0), np.array(order, dtype=float), ALL) == pytest.approx(tau)
    scores = Calibration(np.arange(5.0), 0.0, np.array(order, dtype=float)[:, None], 0.0)
    agreed = agreement(scores)
    assert (agreed.tau, agreed.ceiling, agreed.share) == pytest.approx((tau, 1.0, tau)), (
        "without noise all can be known"
    )


def test_tau_is_scipys_ties_included() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(4, size=(2, 30)).astype(float)
    assert kendall(first, second, np.ones((30, 30), dtype=np.bool_)) == pytest.approx(kendalltau(first, second)[0])
    assert math.isnan(kendall(np.zeros(5), np.arange(5.0), ALL))


def test_only_pairs_of_one_family_are_compared() -> None:
    # Families are far apart, and each is ordered the wrong way round.
    short, long = np.array([1.0, 2, 3, 11, 12, 13]), np.array([3.0, 2, 1, 13, 12, 11])
    scores = Calibration(short, 0.0, long[:, None], 0.0)
    assert agreement(scores).tau == pytest.approx((9 - 6) / 15)
    assert agreement(scores, ["a"] * 3 + ["b"] * 3).tau == pytest.approx(-1.0)


def test_the_ceiling_of_noise_as_large_as_the_differences() -> None:
    """Both scores correlate with the truth by sqrt(1/2), so with each other by 1/2: tau is 2/pi asin(1/2) = 1/3."""
    rng, count = np.random.default_rng(0), 200
    true = rng.standard_normal(count)
    short, long = (true + rng.standard_normal(count) for _ in range(2))
    scores = Calibration(short, 1.0, long[:, None], 1.0)
    assert ceiling(scores, np.ones((count, count), dtype=np.bool_), rng, 10) == pytest.approx(1 / 3, abs=0.06)


def test_intervals_hold_the_value_and_shrink_with_layouts() -> None:
    rng, widths = np.random.default_rng(1), []
    for count in (8, 24):
        true = rng.standard_normal(count)
        scores = Calibration(
            true + 0.3 * rng.standard_normal(count), 0.3, true[:, None] + 0.3 * rng.standard_normal((count, 3)), 0.17
        )
        agreed = agreement(scores)
        low, high = agreed.tau_interval
        assert low < agreed.tau < high
        assert 0.6 < agreed.ceiling < 0.9
        assert agreed.share == pytest.approx(agreed.tau / agreed.ceiling)
        widths.append(high - low)
    assert widths[1] < widths[0]


def test_layouts_are_named_beforehand_half_from_the_front() -> None:
    space, study = load_space(SPACE), load(STUDY)
    origins = named(space, study, 12)
    assert [*origins.values()] == ["front", "random"] * 6
    assert named(space, study, 5).items() <= origins.items(), "fewer are a prefix of more"
    assert {layout for layout, origin in origins.items() if origin == "front"} <= set(recorded_front(study))


def test_families_of_layouts() -> None:
    assert families("d64 v64 ffn=swiglu:64 [C3*3 A4/2]") == ("dense", "little attention")
    assert families("d64 v64 ffn=moe:4x2:32 [C3+swiglu:64 W4/2@8 A4/2]") == ("MoE", "much attention")


def test_the_last_rung_holds_all_trainings_that_count_there() -> None:
    config = QualityConfig.model_validate(
        {
            "rungs": [
                {"name": "a", "tasks": {"selcopy": {"steps": 10}, "mqar": {"steps": 20}}},
                {"name": "b", "lm_steps": 30, "seeds": [0, 1], "tasks": {"mqar": {"steps": 40}}},
            ]
        }
    )
    (rung,) = last_rung(config, 3).rungs
    assert rung.lm_steps == 90
    assert {name: (stage.steps, stage.seeds) for name, stage in rung.tasks.items()} == {
        "selcopy": (30, (0,)),
        "mqar": (120, (0, 1)),
    }


def test_scores_are_those_of_complete_layouts_relative_to_the_published_one() -> None:
    space = load_space(SPACE)
    layouts = dict.fromkeys(
        ["d512 v8192 ffn=swiglu:1024 [C3*4 A8/2]", "d512 v8192 ffn=swiglu:1024 [C4*4 A8/2]"], "front"
    )
    plan = Plan(space, CORPUS, layouts, times=4, seeds=2)
    first, second = layouts
    worth = {anchor: 0.6 + 0.1 * number for number, anchor in enumerate(plan.anchors)}
    worth |= {plan.published: 1.0, first: 1.2, second: 0.9}
    trained = {}
    for key, (layout, job) in plan.all_jobs().items():
        group = "lm/prose" if job.run.kind == "lm" else f"task/{job.run.name}"
        long = job.seed >= 1000
        trained[key] = {"cpu_seconds": 1.0, "scores": {group: worth[layout] * (2.0 if long else 1.0)}}
        assert job.steps == 512 if long else job.steps in (64, 128)
    complete = complete_layouts(plan, trained)
    by_anchors, by_priors, equal = scales(plan, trained).values()
    assert by_anchors.anchors == len(plan.anchors) == 5
    assert by_priors.anchors == 0 and by_priors.weights and not equal.weights
    scores = measured(plan, trained, by_anchors, complete)
    assert complete == [first, second]
    assert scores.short == pytest.approx([1.2, 0.9])
    assert scores.long == pytest.approx(np.array([[1.2, 1.2], [0.9, 0.9]]))
    trained.popitem()
    assert complete_layouts(plan, trained) == [first], "a layout that lacks a training is left out"
    assert report(plan, trained).startswith(
        "1 of 2 layouts of `lfm2-study` named, 4 times the steps, 2 seeds; 5 trainings"
    )
    assert "not trained yet" in report(plan, {})
