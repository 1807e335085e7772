"""Expected hypervolume improvement, weighed by the chance that all budgets are kept. Everything is minimised.

The improvement of a point y over a front is the volume of what y dominates and the front does not. Its expectation is
therefore an integral over that volume of the chance that a candidate dominates z (Emmerich, Giannakoglou and Naujoks
2006, with the order of integrals changed), which for independent normal coordinates is a product of normal
distribution functions. One set of points z serves all candidates: the estimate is vectorised, deterministic, works for
any number of objectives, and its error is shared by all candidates, which are only ranked by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nas.search.ridge import Array

_POINTS_LOG2 = 12
_WIDE = 3.0
"""Standard deviations below the best mean that the integral reaches."""


def expected_improvement(mean: Array, sd: Array, front: Array, reference: Sequence[float]) -> Array:
    """[N] expected hypervolume improvement.

    Args:
        mean: [N, M] predicted coordinates.
        sd: [N, M] their standard deviations, above 0.
        front: [F, M] coordinates reached, F >= 0.
        reference: [M], the worst corner.
    """
    from scipy.special import ndtr  # type: ignore[import-untyped]

    corner = np.asarray(reference, dtype=np.float64)
    lowest = np.minimum((mean - _WIDE * sd).min(axis=0), corner)
    volume = float(np.prod(corner - lowest))
    points = lowest + _unit_points(len(corner)) * (corner - lowest)
    for reached in front:
        points = points[~(reached <= points).all(axis=1)]
    chance = np.ones((len(mean), len(points)))
    for axis in range(len(corner)):
        chance *= ndtr((points[None, :, axis] - mean[:, axis, None]) / sd[:, axis, None])
    return np.asarray(chance.sum(axis=1) * volume / (1 << _POINTS_LOG2), dtype=np.float64)


def chance_feasible(mean: Array, sd: Array) -> Array:
    """[N] the chance that every log ratio is at most 0, for [N, C] forecasts; 1 where there is no constraint."""
    from scipy.special import ndtr

    return np.asarray(np.prod(ndtr(-mean / sd), axis=1), dtype=np.float64)


def _unit_points(dimensions: int) -> Array:
    """[P, M] a fixed low-discrepancy set in the unit cube (Sobol 1967)."""
    from scipy.stats import qmc  # type: ignore[import-untyped]

    return np.asarray(qmc.Sobol(dimensions, scramble=False).random_base2(_POINTS_LOG2), dtype=np.float64)
