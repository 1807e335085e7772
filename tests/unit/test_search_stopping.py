"""Hypervolume with its interval, and the end of a search."""

from __future__ import annotations

import pytest

from nas.search import is_exhausted, volume


def test_interval_holds_the_value_and_grows_with_noise() -> None:
    points, corner = [[0.2, 0.8], [0.5, 0.5], [0.8, 0.2]], [1.0, 1.0]
    sure, unsure = volume(points, [[0.001, 0.001]] * 3, corner), volume(points, [[0.05, 0.05]] * 3, corner)
    assert sure.value == unsure.value == pytest.approx(0.2 * 0.8 + 0.3 * 0.5 + 0.3 * 0.2)
    assert unsure.low < sure.low < sure.value < sure.high < unsure.high


def test_without_points_there_is_no_volume() -> None:
    assert volume([], [], [1.0, 1.0]) == (0.0, 0.0, 0.0)


def test_a_search_ends_when_a_whole_batch_would_add_little() -> None:
    assert is_exhausted(0.0005, 1.0, 8) and not is_exhausted(0.0007, 1.0, 8)
    assert not is_exhausted(None, 1.0, 8) and not is_exhausted(0.0, 0.0, 8)
