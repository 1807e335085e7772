"""Expected hypervolume improvement, weighed by the chance that all budgets are kept. Everything is minimised.

The improvement of a point y over a front is the volume of what y dominates and the front does not. Its expectation is
an integral over that volume of the chance that a candidate dominates z (Emmerich, Giannakoglou and Naujoks 2006, with
the order of integrals changed), which for independent normal coordinates is a product of normal distribution functions.
Along the first axis the integral is known: above each point of the other axes, the volume reaches up to the least first
coordinate of the front below it. The other axes are summed over one fixed set of points. So the estimate is vectorised,
deterministic, works for any number of objectives, and its small error is shared by candidates, which are only ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from nas.search.gp import Array

_POINTS_LOG2 = {1: 8}
_MANY_POINTS_LOG2 = 10
"""Points over the other axes: 256 for one of them, 1,024 for more."""
_WIDE = 3.0
"""Standard deviations below the best mean that the integral reaches."""


class Improvement:
    """The expected improvement over one front.

    Args:
        front: [F, M] coordinates reached, F >= 0, M >= 2.
        reference: [M], the worst corner.
        lowest: [M] below which no candidate is looked for.
    """

    def __init__(self, front: Array, reference: Sequence[float], lowest: Array) -> None:
        corner = np.asarray(reference, dtype=np.float64)
        low = np.minimum(lowest, corner)[1:]
        points = low + _unit_points(len(corner) - 1) * (corner[1:] - low)
        roof = np.full(len(points), corner[0])
        for reached in front:
            below = (reached[1:] <= points).all(axis=1)
            roof[below] = np.minimum(roof[below], reached[0])
        self._points, self._roof = points, roof
        self._share = float(np.prod(corner[1:] - low)) / len(points)

    def expected(self, mean: Array, sd: Array) -> Array:
        """[N] expected gains of [N, M] forecasts with standard deviations above 0."""
        from scipy.special import ndtr  # type: ignore[import-untyped]

        roofs, where = np.unique(self._roof, return_inverse=True)
        away = (roofs - mean[:, :1]) / sd[:, :1]
        depth = sd[:, :1] * (away * ndtr(away) + np.exp(-0.5 * away**2) / np.sqrt(2 * np.pi))
        gain = depth[:, where]
        for axis in range(1, mean.shape[1]):
            gain *= ndtr((self._points[None, :, axis - 1] - mean[:, axis, None]) / sd[:, axis, None])
        return np.asarray(gain.sum(axis=1) * self._share, dtype=np.float64)


def expected_improvement(mean: Array, sd: Array, front: Array, reference: Sequence[float]) -> Array:
    """[N] expected hypervolume improvement.

    Args:
        mean: [N, M] predicted coordinates.
        sd: [N, M] their standard deviations, above 0.
        front: [F, M] coordinates reached, F >= 0.
        reference: [M], the worst corner.
    """
    return Improvement(front, reference, lowest(mean, sd)).expected(mean, sd)


def lowest(mean: Array, sd: Array) -> Array:
    """[M] below what any of [N, M] forecasts is likely to reach."""
    return np.asarray((mean - _WIDE * sd).min(axis=0))


def chance_feasible(mean: Array, sd: Array) -> Array:
    """[N] the chance that every log ratio is at most 0, for [N, C] forecasts; 1 where there is no constraint."""
    from scipy.special import ndtr

    return np.asarray(np.prod(ndtr(-mean / sd), axis=1), dtype=np.float64)


@lru_cache
def _unit_points(dimensions: int) -> Array:
    """[P, M] a fixed low-discrepancy set in the unit cube (Sobol 1967)."""
    from scipy.stats import qmc  # type: ignore[import-untyped]

    count = _POINTS_LOG2.get(dimensions, _MANY_POINTS_LOG2)
    return np.asarray(qmc.Sobol(dimensions, scramble=False).random_base2(count), dtype=np.float64)
