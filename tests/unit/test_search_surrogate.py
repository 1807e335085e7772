"""The surrogate predicts what it can, says how sure it is, and takes what is missing as missing."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge as SklearnRidge  # type: ignore[import-untyped]

from nas.core.layout import Layout
from nas.search import Features, Observation, Sampler
from nas.search.ridge import fit_ridge
from nas.search.surrogate import Surrogate
from nas.search_spaces import load_space
from nas.testing.synthetic import OBJECTIVES, SyntheticProblem

PROBLEM = SyntheticProblem(0)
FEATURES = Features(PROBLEM.space)
RNG = np.random.default_rng(5)
LAYOUTS = [Sampler(PROBLEM.space).draw(RNG) for _ in range(140)]
TOP = 2


def fit(observations: list[Observation]) -> Surrogate:
    return Surrogate(FEATURES, observations, OBJECTIVES, frozenset({"quality"}), TOP, seed=0)


def whole(layout: Layout) -> Observation:
    """All figures, as if nothing were over budget."""
    truth, seen = PROBLEM.truth(layout), PROBLEM.observe(layout)
    return Observation(layout, "complete", dict(seen.objectives) | {"quality": truth["quality"]}, seen.constraints, TOP)


def test_features_are_finite_and_tell_layouts_apart() -> None:
    for name in ("lfm2", "lfm2-demo", "lfm2-mixed"):
        space = load_space(name)
        features, sampler = Features(space), Sampler(space)
        layouts = [*(sampler.draw(RNG) for _ in range(50)), *space.references.layouts().values()]
        matrix = features.matrix(layouts)
        assert np.isfinite(matrix).all()
        assert matrix.shape == (52, len(features.names)) and len(set(features.names)) == len(features.names)
        assert len(np.unique(matrix, axis=0)) >= 49


def test_features_of_a_known_stack() -> None:
    layout = Layout.parse("d512 v8192 ffn=swiglu:1152 [C3*2 A16/4 C5 A16/4 C7*3]")
    named = dict(zip(FEATURES.names, FEATURES.vector(layout), strict=True))
    assert named["gqa.share"] == pytest.approx(2 / 8)
    assert (named["gqa.first"], named["gqa.last"], named["gqa.gap"]) == pytest.approx((2 / 8, 5 / 8, 3 / 8))
    assert named["conv>gqa"] == pytest.approx(2 / 7) and named["gqa>gqa"] == 0
    assert [named[f"gqa.third{third}"] for third in range(3)] == pytest.approx([1 / 8, 1 / 8, 0])
    assert named["swiglu.width"] == pytest.approx(np.log1p(1152)) and named["moe.width"] == 0


def test_ridge_is_ridge_and_its_error_is_leave_one_out() -> None:
    rows = RNG.normal(size=(25, 6)) * [1, 2, 3, 4, 5, 0]
    targets, weights = rows @ [1, -1, 0.5, 0, 0, 0] + RNG.normal(size=25), RNG.uniform(0.2, 1, 25)
    found = fit_ridge(rows, targets, weights)
    scaled = (rows - found.centre) / found.scale
    model = SklearnRidge(alpha=found.penalty).fit(scaled, targets, sample_weight=weights)
    assert found.predict(rows)[0] == pytest.approx(model.predict(scaled))
    left_out = []
    for index in range(25):
        keep = np.arange(25) != index
        model.fit(scaled[keep], targets[keep], sample_weight=weights[keep])
        left_out.append(targets[index] - model.predict(scaled[[index]])[0])
    assert found.error == pytest.approx(np.sum(weights * np.square(left_out)) / weights.sum(), rel=1e-6)


def test_device_figures_and_quality_are_predicted() -> None:
    told, held_out = [whole(layout) for layout in LAYOUTS[:100]], LAYOUTS[100:]
    objectives, constraints = fit(told).predict(held_out)
    truth = np.array([[whole(layout).objectives[name] for name in OBJECTIVES] for layout in held_out])
    for column, least in ((0, 0.5), (1, 0.9), (2, 0.95)):
        assert np.corrcoef(objectives.mean[:, column], truth[:, column])[0, 1] > least
    assert constraints.mean.shape == (40, 3)
    miss = np.abs(objectives.mean - truth) / objectives.sd
    assert 0.5 < np.mean(miss < 2) <= 1


def test_infeasible_ones_teach_device_figures_but_not_quality() -> None:
    told = [
        Observation(x, "infeasible", PROBLEM.observe(x).objectives, PROBLEM.observe(x).constraints) for x in LAYOUTS
    ]
    told = [Observation(t.layout, t.status, {k: v for k, v in t.objectives.items() if k != "quality"}, t.constraints)
            for t in told]  # fmt: skip
    objectives, _ = fit(told).predict(LAYOUTS[:5])
    assert len(set(objectives.mean[:, 0])) == 1 and (objectives.sd[:, 0] >= 0.3).all()
    assert len(set(objectives.mean[:, 1])) == 5 and (objectives.sd[:, 1] < 0.3).all()


def test_offset_of_a_low_rung_is_learned() -> None:
    """Half of the layouts stop at rung 0, where quality reads 0.5 worse; predictions are of the top rung."""
    told = []
    for index, layout in enumerate(LAYOUTS[:100]):
        seen = whole(layout)
        if index % 2:
            low = dict(seen.objectives) | {"quality": seen.objectives["quality"] + 0.5}
            seen = Observation(layout, "stopped", low, seen.constraints, rung=0)
        told.append(seen)
    objectives, _ = fit(told).predict(LAYOUTS[100:])
    truth = np.array([PROBLEM.truth(layout)["quality"] for layout in LAYOUTS[100:]])
    assert abs(np.mean(objectives.mean[:, 0] - truth)) < 0.08
    assert np.corrcoef(objectives.mean[:, 0], truth)[0, 1] > 0.3


def test_equal_data_gives_equal_predictions_and_few_points_give_a_prior() -> None:
    told = [whole(layout) for layout in LAYOUTS[:30]]
    first, again = fit(told).predict(LAYOUTS[30:40]), fit(told).predict(LAYOUTS[30:40])
    assert (first[0].mean == again[0].mean).all() and (first[1].sd == again[1].sd).all()
    objectives, constraints = fit(told[:2]).predict(LAYOUTS[30:33])
    assert (objectives.sd >= 0.3).all() and (constraints.sd >= 0.3).all()
    nothing, none = fit([Observation(LAYOUTS[0], "failed")]).predict(LAYOUTS[:2])
    assert (nothing.mean == 0).all() and none.mean.shape == (2, 0)
