"""The ranked front."""

from __future__ import annotations

import pytest

from nas.core.pareto import front_hypervolume, rank_trials
from nas.core.scoring import Axis
from nas.search.proposers.promotion import promotion_order

CORNER = [1.0, 1.0]


def axes(*coordinates: float, sd: float = 0.0, source: str | None = None) -> list[Axis]:
    return [Axis(value=0.0, coordinate=coordinate, sd=sd, source=source) for coordinate in coordinates]


def test_by_rank_then_contribution_then_number() -> None:
    points = {0: axes(0.9, 0.1), 1: axes(0.2, 0.2), 2: axes(0.1, 0.9), 3: axes(0.3, 0.3), 4: axes(2.0, 2.0)}
    ranked = rank_trials(points, CORNER)
    assert [place.trial for place in ranked] == [1, 0, 2, 3, 4]
    assert [place.rank for place in ranked] == [0, 0, 0, 1, 2]
    by_trial = {place.trial: place for place in ranked}
    assert by_trial[0].hv_contribution == pytest.approx(0.1 * 0.1)
    assert by_trial[4].hv_contribution == 0.0


def test_the_hypervolume_is_of_the_front_inside_the_corner() -> None:
    assert front_hypervolume({}, CORNER) == 0.0
    assert front_hypervolume({0: axes(0.5, 0.5), 1: axes(0.6, 0.6), 2: axes(-9.0, 2.0)}, CORNER) == pytest.approx(0.25)


def test_equal_trials_tie_and_share_the_front() -> None:
    ranked = rank_trials({3: axes(0.2, 0.2), 7: axes(0.2, 0.2)}, CORNER)
    assert [(place.trial, place.rank, place.ties) for place in ranked] == [(3, 0, (7,)), (7, 0, (3,))]
    assert [place.hv_contribution for place in ranked] == [0.0, 0.0]


def test_without_noise_membership_is_certain() -> None:
    ranked = rank_trials({0: axes(0.1, 0.1), 1: axes(0.2, 0.2)}, CORNER)
    assert [place.p_front for place in ranked] == [1.0, 0.0]


def test_noise_makes_membership_doubtful_in_proportion() -> None:
    close = {0: axes(0.10, 0.10, sd=0.05), 1: axes(0.11, 0.11, sd=0.05)}
    apart = {0: axes(0.10, 0.10, sd=0.05), 1: axes(0.90, 0.90, sd=0.05)}
    assert 0.3 < rank_trials(close, CORNER)[1].p_front < 1.0
    assert rank_trials(apart, CORNER)[1].p_front == 0.0
    assert rank_trials(close, CORNER) == rank_trials(close, CORNER)


def test_who_shares_a_proxy_shares_its_error() -> None:
    """Two layouts of one proxy, one faster: however unsure the quality is, the slower one is never on the front."""
    quality = axes(-0.9, sd=1.0, source="proxy")
    points = {0: [*quality, *axes(0.1)], 1: [*quality, *axes(0.2)]}
    assert [place.p_front for place in rank_trials(points, CORNER)] == [1.0, 0.0]


def test_no_trials_no_ranking() -> None:
    assert rank_trials({}, CORNER) == []
    assert promotion_order([]) == []


def test_on_the_ladder_the_first_coordinate_breaks_ranks_ties() -> None:
    assert promotion_order([(-1.0, 1.0), (-2.0, 2.0), (-0.5, 3.0), (-2.0, 2.0)]) == [1, 3, 0, 2]
    assert promotion_order([(-1.0, float("inf")), (-2.0, float("inf"))]) == [1, 0]
