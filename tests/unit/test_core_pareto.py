"""Dominance and hypervolume against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nas.core.pareto import contributions, dominates, front_mask, hypervolume, ranks

GRID = st.integers(0, 5).map(float)
# Few distinct values, so that ties are common.
POINTS = st.integers(2, 4).flatmap(lambda m: arrays(float, st.tuples(st.integers(0, 9), st.just(m)), elements=GRID))


def volume_by_cells(points: np.ndarray, corner: int) -> float:
    """Unit cells of the grid below the corner that some point dominates."""
    cells = np.stack(np.meshgrid(*[np.arange(corner)] * points.shape[1], indexing="ij"), axis=-1).reshape(-1, 1)
    cells = cells.reshape(-1, points.shape[1])
    return float(sum(any((point <= cell).all() for point in points) for cell in cells))


@given(POINTS)
def test_hypervolume_counts_dominated_cells(points: np.ndarray) -> None:
    assert hypervolume(points, [4.0] * points.shape[1]) == pytest.approx(volume_by_cells(points, 4))


@given(POINTS)
def test_contribution_is_what_goes_with_the_point(points: np.ndarray) -> None:
    whole = volume_by_cells(points, 4)
    without = [volume_by_cells(np.delete(points, index, axis=0), 4) for index in range(len(points))]
    assert contributions(points, [4.0] * points.shape[1]) == pytest.approx([whole - left for left in without])


@given(POINTS)
def test_ranks_peel_fronts(points: np.ndarray) -> None:
    found = ranks(points)
    beaten = dominates(points, points)
    for index, rank in enumerate(found):
        above = found[beaten[:, index]]
        assert rank == (above.max() + 1 if len(above) else 0)
    assert (front_mask(points) == (found == 0)).all()


def test_equal_points_share_a_rank_and_contribute_nothing() -> None:
    points = [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    assert ranks(points).tolist() == [0, 0, 0, 1]
    assert contributions(points, [2.0, 2.0]).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_points_outside_the_reference_add_nothing() -> None:
    assert hypervolume([[0.0, 3.0], [2.0, 0.0]], [2.0, 2.0]) == 0.0
    assert hypervolume([], [2.0, 2.0]) == 0.0
    assert contributions([[0.0, 3.0], [1.0, 1.0]], [2.0, 2.0]).tolist() == [0.0, 1.0]
