"""The ranked front: ranks, hypervolume contributions, and how sure membership is under noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.hypervolume import contributions, hypervolume
from nas.core.pareto import front_mask, ranks
from nas.core.scoring import Axis, tie

DRAWS = 1000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Ranked:
    """One complete trial's place.

    Args:
        trial: number.
        rank: 0 for the front, 1 for the front without that, ...
        hv_contribution: hypervolume that only this trial adds within its rank.
        p_front: share of draws from the trials' noise in which it is on the front.
        ties: trials that no axis tells apart from it.
    """

    trial: int
    rank: int
    hv_contribution: float
    p_front: float
    ties: tuple[int, ...]


def rank_trials(
    axes: Mapping[int, Sequence[Axis]], reference_point: Sequence[float], draws: int = DRAWS
) -> list[Ranked]:
    """Complete trials by non-dominated rank, then by hypervolume contribution, then by number.

    Args:
        axes: trial -> its objectives.
        reference_point: in coordinates.
        draws: from the noise; 0 leaves `p_front` at 1 on the front and 0 behind it.
    """
    trials = sorted(axes)
    if not trials:
        return []
    points = _coordinates(axes, trials)
    rank = ranks(points)
    parts = np.zeros(len(trials))
    for level in range(int(rank.max()) + 1):
        members = rank == level
        parts[members] = contributions(points[members], reference_point)
    sure = front_chances(points, [axes[trial] for trial in trials], draws)
    placed = [
        Ranked(
            trial=trial,
            rank=int(rank[i]),
            hv_contribution=float(parts[i]),
            p_front=float(sure[i]),
            ties=tuple(other for other in trials if other != trial and tie(axes[trial], axes[other])),
        )
        for i, trial in enumerate(trials)
    ]
    return sorted(placed, key=lambda place: (place.rank, -place.hv_contribution, place.trial))


def front_hypervolume(axes: Mapping[int, Sequence[Axis]], reference_point: Sequence[float]) -> float:
    """Hypervolume of the complete trials; 0.0 without any."""
    trials = sorted(axes)
    return hypervolume(_coordinates(axes, trials), reference_point) if trials else 0.0


def _coordinates(axes: Mapping[int, Sequence[Axis]], trials: Sequence[int]) -> NDArray[np.float64]:
    return np.array([[axis.coordinate for axis in axes[trial]] for trial in trials], dtype=np.float64)


def front_chances(points: NDArray[np.float64], axes: Sequence[Sequence[Axis]], draws: int) -> NDArray[np.float64]:
    """[P] the share of draws from the noise in which each point is on the front.

    Args:
        points: [P, M].
        axes: of each point.
        draws: 0: 1 on the front and 0 behind it.
    """
    if not draws:
        return front_mask(points).astype(np.float64)
    sd = np.array([[axis.sd for axis in row] for row in axes])
    noise = np.random.default_rng(_SEED).standard_normal((draws, *points.shape))
    for column in range(points.shape[1]):
        # One proxy has one error, however many layouts it stands for.
        first: dict[str, int] = {}
        for i, row in enumerate(axes):
            if (source := row[column].source) is not None:
                noise[:, i, column] = noise[:, first.setdefault(source, i), column]
    hits = np.zeros(len(points))
    for each in noise:
        hits += front_mask(points + sd * each)
    return hits / draws
