"""The surrogate predicts what it can, says how sure it is, and takes what is missing as missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nas.core.layout import Layout
from nas.search.proposers import Features, Observation, Sampler
from nas.search.proposers.features import BYTES_PER_WEIGHT, GROUPS
from nas.search.proposers.figure_costs import costs_by_name
from nas.search.proposers.hardware import Costs
from nas.search.proposers.surrogate import Kernels, Surrogate, _doubt, _log_density, _stacked
from nas.search.spaces import load_space
from nas.testing.synthetic import OBJECTIVES, SyntheticProblem

PROBLEM = SyntheticProblem(0)
FEATURES = Features(PROBLEM.space)
RNG = np.random.default_rng(5)
LAYOUTS = [Sampler(PROBLEM.space).draw(RNG) for _ in range(140)]
TOP = 2


KERNELS = Kernels(Features(PROBLEM.space, strings=True), Sampler(PROBLEM.space), TOP)
COSTS = costs_by_name(PROBLEM.space, ("ttft", "decode", "memory"))


def fit(observations: list[Observation], costs: Mapping[str, Costs] = COSTS, **options: Any) -> Surrogate:
    worst = dict.fromkeys(OBJECTIVES, 9.0)
    return Surrogate(KERNELS, observations, worst, frozenset({"quality"}), TOP, costs, **options)


def whole(layout: Layout) -> Observation:
    """All figures, as if nothing were over budget."""
    truth, observation = PROBLEM.truth(layout), PROBLEM.observe(layout)
    return Observation(
        layout, "complete", dict(observation.objectives) | {"quality": truth["quality"]}, observation.constraints, TOP
    )


def test_features_are_finite_and_tell_layouts_apart() -> None:
    for name in ("lfm2", "lfm2-demo"):
        space = load_space(name)
        features, sampler = Features(space), Sampler(space)
        layouts = [*(sampler.draw(RNG) for _ in range(50)), *space.references.layouts().values()]
        matrix = features.matrix(layouts)
        assert np.isfinite(matrix).all()
        assert matrix.shape == (52, len(features.names)) and len(set(features.names)) == len(features.names)
        assert len(np.unique(matrix, axis=0)) >= 49


@pytest.mark.parametrize("name", ["lfm2-full", "lfm2-colbert", "lfm2-vl", "lfm2-audio"])
def test_features_of_a_group_are_side_by_side(name: str) -> None:
    groups = Features(load_space(name), strings=True).groups
    assert len(np.unique(groups)) == 8 and (np.diff(groups) >= 0).all()


def test_features_of_a_known_stack() -> None:
    layout = Layout.parse("d512 v8192 ffn=swiglu:1152 [C3*2 A16/4 C5 A16/4 C7*3]")
    named = dict(zip(FEATURES.names, FEATURES.vector(layout), strict=True))
    assert named["gqa.mean"] == pytest.approx(2 / 8) and named["conv.mean"] == pytest.approx(6 / 8)
    assert (named["gqa.gap"], named["gqa.run"], named["conv.run"]) == pytest.approx((3 / 8, 1 / 8, 3 / 8))
    assert named["conv>gqa"] == pytest.approx(2 / 7) and named["gqa>gqa"] == 0
    assert named["gqa@0.3"] > 0.4 > 0.01 > named["gqa@0.9"]
    assert named["swiglu.width.mean"] == pytest.approx(np.log1p(1152)) and named["moe.width.mean"] == 0
    assert sum(abs(named[f"pair{index}"]) for index in range(64)) in (3, 5, 7)  # seven pairs; two of a hash may cancel


def test_neighbours_with_other_arguments_are_other_pairs() -> None:
    rows = FEATURES.matrix([Layout.parse(f"d512 v8192 ffn=swiglu:1152 [C3*6 {tail}]") for tail in ("C5*2", "C7*2")])
    pairs = FEATURES.groups == GROUPS.index("pairs")
    assert (rows[0, pairs] != rows[1, pairs]).any()


def test_no_layout_of_a_space_of_many_kinds_is_far_from_all_others() -> None:
    """Pairs of mixers that were drawn at the bottom alone have next to no weight at the top, and no spread there."""
    space = load_space(Path(__file__).parents[2] / "benchmarks/mixers.yaml")
    sampler = Sampler(space)
    kernels = Kernels(Features(space, strings=True), sampler, len(space.quality.rungs) - 1)
    rows = kernels.rows([sampler.draw(RNG) for _ in range(200)])
    assert 1 < np.median(np.abs(rows).max(axis=1)) < np.abs(rows).max() < 60


def test_device_figures_and_quality_are_predicted() -> None:
    observations, held_out = [whole(layout) for layout in LAYOUTS[:100]], LAYOUTS[100:]
    objectives, constraints = fit(observations).predict(held_out)
    truth = np.array([[whole(layout).objectives[name] for name in OBJECTIVES] for layout in held_out])
    for column, least in ((0, 0.5), (1, 0.9), (2, 0.95)):
        assert np.corrcoef(objectives.mean[:, column], truth[:, column])[0, 1] > least
    assert constraints.mean.shape == (40, 3)
    miss = np.abs(objectives.mean - truth) / objectives.sd
    assert 0.5 < np.mean(miss < 2) <= 1


def test_infeasible_ones_teach_device_figures_but_not_quality() -> None:
    observations = [
        Observation(x, "infeasible", PROBLEM.observe(x).objectives, PROBLEM.observe(x).constraints) for x in LAYOUTS
    ]
    observations = [
        Observation(t.layout, t.status, {k: v for k, v in t.objectives.items() if k != "quality"}, t.constraints)
        for t in observations
    ]
    objectives, _ = fit(observations).predict(LAYOUTS[:5])
    assert len(set(objectives.mean[:, 0])) == 1 and (objectives.sd[:, 0] >= 0.3).all()
    assert len(set(objectives.mean[:, 1])) == 5 and (objectives.sd[:, 1] < 0.3).all()


def test_offset_of_a_low_rung_is_learned() -> None:
    """Half of the layouts stop at rung 0, where quality reads 0.5 worse; predictions are of the top rung."""
    observations = []
    for index, layout in enumerate(LAYOUTS[:100]):
        observation = whole(layout)
        if index % 2:
            low = dict(observation.objectives) | {"quality": observation.objectives["quality"] + 0.5}
            observation = Observation(layout, "stopped", low, observation.constraints, rung=0)
        observations.append(observation)
    objectives, _ = fit(observations).predict(LAYOUTS[100:])
    truth = np.array([PROBLEM.truth(layout)["quality"] for layout in LAYOUTS[100:]])
    assert abs(np.mean(objectives.mean[:, 0] - truth)) < 0.08
    assert np.corrcoef(objectives.mean[:, 0], truth)[0, 1] > 0.3


def test_equal_data_gives_equal_predictions_and_few_points_give_a_prior() -> None:
    observations = [whole(layout) for layout in LAYOUTS[:30]]
    first, again = fit(observations).predict(LAYOUTS[30:40]), fit(observations).predict(LAYOUTS[30:40])
    assert (first[0].mean == again[0].mean).all() and (first[1].sd == again[1].sd).all()
    objectives, constraints = fit(observations[:2]).predict(LAYOUTS[30:33])
    assert (objectives.sd >= 0.3).all() and (constraints.sd >= 0.3).all()
    nothing, none = fit([Observation(LAYOUTS[0], "failed")]).predict(LAYOUTS[:2])
    assert (nothing.mean == 9.0).all() and none.mean.shape == (2, 0)


def test_known_noise_is_believed() -> None:
    """One of two equal measurements is passed as noisy: predictions there follow it less."""
    observations = [whole(layout) for layout in LAYOUTS[:40]]
    off = dict(observations[0].objectives) | {"quality": observations[0].objectives["quality"] + 0.4}
    means = []
    for noise in ({}, {"quality": 0.4}):
        odd = Observation(LAYOUTS[0], "complete", off, observations[0].constraints, TOP, noise)
        means.append(fit([odd, *observations[1:]]).predict([LAYOUTS[0]])[0].mean[0, 0])
    assert means[1] < means[0]


def test_targets_that_are_one_figure_share_one_model() -> None:
    observations = []
    for layout in LAYOUTS[:20]:
        observation = whole(layout)
        observations.append(replace(observation, constraints={"memory": observation.objectives["memory"] - 4.0}))
    objectives, constraints = fit(observations).predict(LAYOUTS[20:30])
    assert constraints.mean[:, 0] == pytest.approx(objectives.mean[:, 2] - 4.0)
    assert constraints.sd[:, 0] == pytest.approx(objectives.sd[:, 2])


def test_sizes_are_those_of_the_layout() -> None:
    for layout in LAYOUTS[:20]:
        named = dict(zip(FEATURES.names, FEATURES.vector(layout), strict=True))
        context = PROBLEM.space.workloads["chat"].window
        cache = layout.kv_bytes(context)
        assert named[f"flops@{context}"] == pytest.approx(np.log(layout.flops(context)))
        assert named[f"read@{context}"] == pytest.approx(np.log(BYTES_PER_WEIGHT * layout.params.active + cache))
        assert named["state"] == pytest.approx(np.log1p(layout.state_bytes()))


def test_near_pending_layouts_less_is_uncertain_and_all_is_expected_as_before() -> None:
    observations, pending, others = [whole(layout) for layout in LAYOUTS[:40]], LAYOUTS[40:44], LAYOUTS[44:60]
    before = fit(observations)
    after = fit(observations, tuned=before.tuned, pending=pending)
    for old, new in zip(before.predict([*pending, *others]), after.predict([*pending, *others]), strict=True):
        assert new.mean == pytest.approx(old.mean, abs=1e-5)
        assert (new.sd <= old.sd * (1 + 1e-9)).all()
        assert (new.sd[:4] < old.sd[:4]).all()
        assert np.mean(new.sd[:4] / old.sd[:4]) < np.mean(new.sd[4:] / old.sd[4:])


def test_a_value_may_have_an_effect_that_does_not_follow_its_size() -> None:
    named = dict(
        zip(FEATURES.names, FEATURES.vector(Layout.parse("d512 v8192 ffn=swiglu:1152 [C3*2 A16/4 C5]")), strict=True)
    )
    assert [named[f"conv.kernel={size}"] for size in (3, 5, 7)] == [0.5, 0.25, 0]


def test_string_features_tell_what_stands_where() -> None:
    features = Features(PROBLEM.space, strings=True)
    texts = ("[C3*2 A16/4 C5 A16/4 C7*3]", "[A16/4 C3*2 C5 A16/4 C7*3]")
    rows = features.matrix([Layout.parse(f"d512 v8192 ffn=swiglu:1152 {text}") for text in texts])
    named = [dict(zip(features.names, row, strict=True)) for row in rows]
    assert named[0]["gqa@0.05"] < 0.01 < 0.9 < named[1]["gqa@0.05"]
    assert named[1]["gqa>conv@0.1"] > 5 * named[0]["gqa>conv@0.1"]
    assert any(named[0][f"triple{index}"] != named[1][f"triple{index}"] for index in range(128))
    assert (
        rows[:, : len(FEATURES.names)]
        == FEATURES.matrix([Layout.parse(f"d512 v8192 ffn=swiglu:1152 {t}") for t in texts])
    ).all()


def test_figures_of_devices_start_from_sums_of_costs() -> None:
    observations, held_out = [whole(layout) for layout in LAYOUTS[:60]], LAYOUTS[100:]
    surrogate = fit(observations)
    assert surrogate.tuned["objective memory"].prices is not None
    truth = np.array([np.log(PROBLEM.truth(layout)["memory"]) for layout in held_out])
    errors = [
        float(np.sqrt(((model.predict(held_out)[0].mean[:, 2] - truth) ** 2).mean()))
        for model in (fit(observations, costs={}), surrogate)
    ]
    assert errors[1] < 0.7 * errors[0] and errors[1] < 0.1 * truth.std()


def test_quality_is_an_average_with_shares_that_knows_its_errors() -> None:
    observations, held_out = [whole(layout) for layout in LAYOUTS[:100]], LAYOUTS[100:]
    surrogate = fit(observations)
    tuning = surrogate.tuned["objective quality"]
    assert sum(tuning.shares) == pytest.approx(1) and len(tuning.shares) == len(tuning.members) <= 3
    guess = surrogate.predict(held_out)[0]
    away = (np.array([PROBLEM.truth(layout)["quality"] for layout in held_out]) - guess.mean[:, 0]) / guess.sd[:, 0]
    assert 0.6 < np.sqrt((away**2).mean()) < 1.6


def test_shares_go_to_what_predicts() -> None:
    errors = np.random.default_rng(0).normal(0, 1, (2, 200))
    densities = _log_density(errors * np.array([[1.0], [4.0]]), np.ones((2, 200)))
    assert _stacked(densities)[0] > 0.9
    assert _stacked(densities[:, :0]) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0])
def test_doubt_is_how_much_larger_errors_are_than_stated(factor: float) -> None:
    errors = np.random.default_rng(1).normal(0, factor, 400)
    doubt = _doubt(errors, np.full(400, 0.9999), np.full(400, 1e-4))
    assert doubt == pytest.approx(max(1.0, factor), rel=0.12)


def in_parts(layout: Layout, parts: bool = True) -> Observation:
    """Quality is the sum of weights, nearly exact, and of attention, very noisy."""
    rng = np.random.default_rng(int(layout.id[:8], 16))
    heads = sum(layer.mixers[0].kind == "gqa" for layer in layout.layers)
    exact, rough = np.log(layout.params.active / 1e7), 0.1 * heads + float(rng.normal(0, 0.3))
    units = {"quality": {"lm": exact, "recall": rough}} if parts else {}
    return Observation(layout, "complete", {"quality": exact + rough}, {}, TOP, parts=units)


def test_units_of_quality_have_models_of_their_own_that_add_up() -> None:
    observations, held_out = [in_parts(layout) for layout in LAYOUTS[:60]], LAYOUTS[100:]
    surrogate = fit(observations)
    names = {name for name in surrogate.tuned if "quality" in name}
    assert names == {"objective quality/lm", "objective quality/recall"}
    noises = {name: min(member.noise for member in surrogate.tuned[name].members) for name in names}
    assert noises["objective quality/lm"] < 0.1 * noises["objective quality/recall"]
    truth = np.array([
        np.log(x.params.active / 1e7) + 0.1 * sum(layer.mixers[0].kind == "gqa" for layer in x.layers) for x in held_out
    ])  # fmt: skip
    guess = surrogate.predict(held_out)[0]
    assert float(np.sqrt(((guess.mean[:, 0] - truth) ** 2).mean())) < 0.25
    assert (guess.sd[:, 0] > 0).all()


def test_quality_is_one_model_where_an_observation_lacks_its_units() -> None:
    observations = [in_parts(layout, parts=index > 0) for index, layout in enumerate(LAYOUTS[:20])]
    assert "objective quality" in fit(observations).tuned
    rest = [
        replace(observation, objectives={"quality": observation.objectives["quality"] + 1.0})
        for observation in map(in_parts, LAYOUTS[:20])
    ]
    whole_mean = fit(rest).predict(LAYOUTS[20:40])[0].mean[:, 0]
    assert whole_mean == pytest.approx(
        1.0 + fit([in_parts(x) for x in LAYOUTS[:20]]).predict(LAYOUTS[20:40])[0].mean[:, 0]
    )
