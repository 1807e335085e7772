"""Dominance and hypervolume against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nas.core.pareto import (
    contributions,
    dominates,
    front_chances,
    front_mask,
    front_noise,
    hypervolume,
    rank_trials,
    ranks,
)
from nas.core.scoring import Axis

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
    assert contributions(points, [4.0] * points.shape[1]) == pytest.approx([whole - rest for rest in without])


@given(POINTS)
def test_ranks_peel_fronts(points: np.ndarray) -> None:
    levels = ranks(points)
    beaten = dominates(points, points)
    for index, rank in enumerate(levels):
        above = levels[beaten[:, index]]
        assert rank == (above.max() + 1 if len(above) else 0)
    assert (front_mask(points) == (levels == 0)).all()


def test_equal_points_share_a_rank_and_contribute_nothing() -> None:
    points = [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    assert ranks(points).tolist() == [0, 0, 0, 1]
    assert contributions(points, [2.0, 2.0]).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_points_outside_the_reference_add_nothing() -> None:
    assert hypervolume([[0.0, 3.0], [2.0, 0.0]], [2.0, 2.0]) == 0.0
    assert hypervolume([], [2.0, 2.0]) == 0.0
    assert contributions([[0.0, 3.0], [1.0, 1.0]], [2.0, 2.0]).tolist() == [0.0, 1.0]


def test_noise_that_is_not_known_leaves_chances_unknown_and_separates_nothing() -> None:
    axes = {
        trial: [Axis(value=value, coordinate=value, sd=sd), Axis(value=0.0, coordinate=0.0, sd=0.0)]
        for trial, (value, sd) in enumerate([(0.0, 0.01), (1.0, None), (2.0, 0.01)])
    }
    assert front_chances(axes) == {0: None, 1: None, 2: None}
    rows = {row.trial: row for row in rank_trials(axes, [3.0, 3.0])}
    assert (rows[0].on, rows[0].p_front) == (True, None)
    assert [rows[trial].ties for trial in range(3)] == [(1,), (0, 2), (1,)]


def test_the_share_of_a_front_that_is_noise_counts_noise_once() -> None:
    rng, noise = np.random.default_rng(1), 0.02
    stated, twice, true = [], [], []
    for _ in range(40):
        time = rng.random(40)
        quality = -(0.3 * np.sqrt(time)) + 0.05 * np.abs(rng.standard_normal(40))
        scores = quality + noise * rng.standard_normal(40)
        axes = {
            i: [Axis(value=0, coordinate=float(scores[i]), sd=noise), Axis(value=0, coordinate=float(time[i]), sd=0.0)]
            for i in range(40)
        }
        members = np.flatnonzero(front_mask(np.stack([scores, time], 1)))
        stated.append(front_noise(axes, 200))
        twice.append(1 - np.mean([front_chances(axes, 200)[int(i)] for i in members]))
        true.append(1 - front_mask(np.stack([quality, time], 1))[members].mean())
    assert np.mean(stated) == pytest.approx(np.mean(true), abs=0.04)
    assert np.mean(twice) > 1.25 * np.mean(true)


def test_noise_that_is_not_known_tells_no_share() -> None:
    axes = {0: [Axis(value=0, coordinate=0.0, sd=None)], 1: [Axis(value=0, coordinate=1.0, sd=0.1)]}
    assert front_noise(axes) is None and front_noise({}) is None
