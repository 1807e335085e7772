"""How much hypervolume a candidate adds, as a function of its quality alone: its other coordinates are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nas.core.hypervolume import hypervolume

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Slices:
    """gain(y) = sum over k of weights[k] * max(0, levels[k] - y); exact.

    Args:
        levels: [K] qualities at which the room that is left changes.
        weights: [K] by how much, in volume of the other coordinates.
    """

    levels: Array
    weights: Array

    def gain(self, quality: Array) -> Array:
        """[N] hypervolume that [N] minimised qualities add."""
        return np.asarray(np.maximum(self.levels - quality[:, None], 0.0) @ self.weights)

    def expected(self, mean: Array, sd: Array) -> Array:
        """[N] the same, expected of normal qualities with standard deviations above 0."""
        from scipy.special import ndtr  # type: ignore[import-untyped]

        away = (self.levels - mean[:, None]) / sd[:, None]
        depth = sd[:, None] * (away * ndtr(away) + np.exp(-0.5 * away**2) / np.sqrt(2 * np.pi))
        return np.asarray(depth @ self.weights)


def slices(others: Sequence[float], front: ArrayLike, reference: Sequence[float]) -> Slices:
    """What a candidate adds to a front.

    For a quality t, the points of the front that are at least as good leave it the part of the box between `others`
    and the reference point that none of them reaches; hypervolume is the integral of that over t.

    Args:
        others: [M - 1] the candidate's coordinates but quality.
        front: [F, M] what is reached, quality first.
        reference: [M] the worst corner, quality first.
    """
    corner, own = np.asarray(reference[1:], dtype=np.float64), np.asarray(others, dtype=np.float64)
    points = np.asarray(front, dtype=np.float64).reshape(-1, len(reference))
    points = points[np.argsort(points[:, 0], kind="stable")]
    points = points[(points[:, 0] < reference[0]) & (points[:, 1:] < corner).all(axis=1)]
    box = hypervolume([own], corner)
    if box == 0.0:
        return Slices(np.zeros(1), np.zeros(1))
    shadows = np.maximum(points[:, 1:], own)
    left = [box, *(box - hypervolume(shadows[: count + 1], corner) for count in range(len(points)))]
    levels = np.append(points[:, 0], reference[0])
    return Slices(levels, np.append(-np.diff(left), left[-1]))
