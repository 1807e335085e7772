"""Effects of knobs on objectives."""

from __future__ import annotations

import numpy as np
import pytest

from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.search.analysis.effects import FEWEST, effects, features
from nas.search.spaces import load_space


def test_planted_effects_are_found_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.integers(1, 6, 60), rng.integers(0, 4, 60), rng.uniform(0, 1, 60)]).astype(float)
    target = 0.3 * table[:, 0] - 0.1 * table[:, 1] + rng.normal(0, 0.05, 60)
    target[:5] = np.nan
    fit = effects(table, target)
    assert fit is not None
    assert fit.change[:2] == pytest.approx([0.3 * 4, -0.1 * 3], abs=0.05)
    assert fit.low[2] < 0 < fit.high[2]
    assert (fit.low < fit.change).all() and (fit.change < fit.high).all()
    assert fit.explained > 0.95


def test_noise_explains_nothing() -> None:
    rng = np.random.default_rng(1)
    fit = effects(rng.normal(size=(30, 8)), rng.normal(size=30))
    assert fit is not None and fit.explained < 0.2


def test_too_few_trials_say_nothing() -> None:
    table, target = np.arange(2.0 * FEWEST).reshape(-1, 1), np.full(2 * FEWEST, np.nan)
    target[: FEWEST + 1] = np.arange(FEWEST + 1)
    assert effects(table, target) is None
    target[: FEWEST + 2] = 1.0
    assert effects(table, target) is None, "equal values"


def test_intervals_hold_the_effect_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(3), 0
    for _ in range(400):
        x = rng.standard_normal((30, 8))
        fit = effects(x, x[:, 0] + rng.standard_normal(30))
        assert fit is not None
        held += int(fit.low[0] <= np.ptp(x[:, 0]) <= fit.high[0])
    assert 0.925 <= held / 400 <= 0.975


def test_a_knob_that_others_determine_has_no_effect() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 5, 30).astype(float)
    fit = effects(np.column_stack([first, 8 - first]), first + rng.normal(0, 0.1, 30))
    assert fit is not None
    assert fit.change[0] == pytest.approx(4, abs=0.3)
    assert np.isnan(fit.change[1])


def test_a_knob_that_trials_with_a_value_share_has_no_effect() -> None:
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.integers(0, 5, 30).astype(float), np.full(30, 0.1)])
    target = table[:, 0] + rng.normal(0, 0.1, 30)
    table, target = np.vstack([table, [2.0, 0.7]]), np.append(target, np.nan)
    assert np.ptp(table[:30, 1] - table[:30, 1].mean()) == 0 != table[0, 1] - table[:30, 1].mean(), "rounding"
    fit = effects(table, target)
    assert fit is not None
    assert fit.change[0] == pytest.approx(4, abs=0.3)
    assert np.isnan([fit.change[1], fit.low[1], fit.high[1]]).all()


def test_features_are_counts_shares_and_means_of_knobs_that_differ() -> None:
    texts = (
        "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3]",
        "d1024 v65536 ffn=moe:8x2:512 [C5+swiglu:4608 A16/4 A16/2 C5]",
        "d1024 v65536 ffn=swiglu:4608 [A16/8*4]",
    )
    columns = features(load_space("lfm2"), [Layout.parse(text) for text in texts])
    assert columns["conv layers"].tolist() == [3, 2, 0]
    assert columns["gqa layers"].tolist() == [1, 2, 4]
    assert columns["gqa kv_heads"].tolist() == [8, 3, 8]
    assert columns["conv kernel"].tolist() == [3, 5, 4], "no convolution: the mean of the others"
    assert columns["share of moe"].tolist() == [0, 0.75, 0]
    assert "swiglu width" not in columns and "gqa heads" not in columns
    assert features(load_space("lfm2"), []) == {}


def test_an_expansion_is_the_width_in_multiples_of_the_model() -> None:
    texts = ("d1024 v65536 ffn=swiglu:2048 [C3+swiglu:4096*3 A16/8]", "d1024 v65536 ffn=swiglu:4096 [C3*3 A16/8*2]")
    columns = features(_with_expansion(), [Layout.parse(text) for text in texts])
    assert columns["swiglu expansion"].tolist() == [3.5, 4]


def test_means_that_differ_by_rounding_alone_are_no_feature() -> None:
    layouts = [Layout.parse(f"d320 v65536 ffn=swiglu:896 [C3*{depth} A16/8]") for depth in range(1, 9)]
    assert features(_with_expansion(), layouts).keys() == {"conv layers"}


def _with_expansion() -> SearchSpace:
    ffn = {"swiglu": {"expansion": {"choices": [2.8, 4], "scope": "layer"}}}
    return SearchSpace.model_validate(load_space("lfm2").model_dump(mode="json") | {"ffn": ffn})
