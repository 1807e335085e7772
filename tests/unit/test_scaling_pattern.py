"""The common pattern of winners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.testing.layout_strategy import layouts
from nas.train.scaling.candidates import ffn_ratio
from nas.train.scaling.source import Winner, find_pattern


def winner(body: str, weight: float = 1.0) -> Winner:
    return Winner(Layout.parse(f"d64 v256 ffn=swiglu:128 [{body}]"), weight)


@given(st.lists(layouts(), min_size=1, max_size=4), st.data())
def test_shares_are_shares_and_the_parent_is_a_winner(stacks: list[Layout], data: st.DataObject) -> None:
    weights = [data.draw(st.sampled_from([0.0, 0.1, 3.0])) for _ in stacks]
    winners = [Winner(layout, weight) for layout, weight in zip(stacks, weights, strict=True)]
    pattern = find_pattern(winners)
    np.testing.assert_allclose(sum(pattern.shares.values()), 1.0)
    assert pattern.parent in winners
    assert 0 <= pattern.distance <= 1


def test_shares_by_depth_are_weighted_by_hypervolume_contribution() -> None:
    pattern = find_pattern([winner("C3 A2/1", 3.0), winner("A2/1 C3", 1.0)])
    np.testing.assert_allclose(pattern.shares["gqa"], [0.25] * 4 + [0.75] * 4)
    assert pattern.parent.layout.format().endswith("[C3 A2/1]")


def test_the_parent_is_the_winner_nearest_to_the_common_pattern() -> None:
    both = winner("C3*2 A2/1 C3 A2/1 C3*2 A2/1")
    pattern = find_pattern([winner("C3*7 A2/1"), winner("C3*2 A2/1 C3 A2/1 C3*3"), both])
    assert pattern.parent is both
    assert pattern.distance == pytest.approx(3 / 8 / 3 / 2)  # half of its blocks are feed-forwards, all alike


def test_feed_forwards_count_as_mixers_do() -> None:
    sparse = [winner("C3+moe:4x1:64 A2/1+moe:4x1:64"), winner("C3+moe:4x1:64 A2/1+moe:4x1:64")]
    assert find_pattern([winner("C3 A2/1", 1.5), *sparse]).parent is sparse[0]


def test_winners_without_contributions_have_equal_weights() -> None:
    pattern = find_pattern([winner("C3", 0.0), winner("A2/1", 0.0)])
    np.testing.assert_allclose(pattern.shares["conv"], 0.5)


@pytest.mark.parametrize(("name", "ratio"), [("LFM2-350M", 4.5), ("LFM2-1.2B", 4.0), ("LFM2-8B-A1B", 3.5)])
def test_the_ratio_of_experts_counts_the_experts_of_one_token(name: str, ratio: float) -> None:
    assert ffn_ratio(Layout.parse(LFM2[name])) == ratio
