"""A front that takes points one by one, with the hypervolume that it covers. Everything is minimised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nas.core.hypervolume import hypervolume
from nas.core.pareto import dominates

_CHUNK = 1024


class FrontArchive:
    """The points that no other dominates; of equal ones all stay, as in `nas.core.pareto.front_mask`.

    A point costs O(front), and one that gets onto the front a hypervolume of the front besides: the volume that is
    gained is that of the point's own box without the part which the others cover in it (Bringmann and Friedrich 2010,
    "An efficient algorithm for computing hypervolume contributions", lemma 1).

    Args:
        reference: [M], the worst corner. Points that are not better on every coordinate gain nothing.
    """

    def __init__(self, reference: ArrayLike) -> None:
        self._reference = np.asarray(reference, dtype=np.float64)
        self._points = np.empty((0, len(self._reference)))
        self._keys = np.empty(0, dtype=np.int64)
        self.hypervolume = 0.0
        """Of the points so far."""

    @property
    def keys(self) -> NDArray[np.int64]:
        """[F] of the points on the front, in the order in which they came."""
        return self._keys

    @property
    def points(self) -> NDArray[np.float64]:
        """[F, M]."""
        return self._points

    def take(self, keys: Sequence[int] | NDArray[np.int64], points: ArrayLike) -> NDArray[np.float64]:
        """[P] the hypervolume that each point gained when it came; they come in this order.

        Args:
            keys: [P] what the points are called.
            points: [P, M], finite.
        """
        values = np.asarray(points, dtype=np.float64).reshape(-1, len(self._reference))
        assert len(keys) == len(values) and np.isfinite(values).all(), "every point has a key, and is a point"
        gains = np.zeros(len(values))
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            # What the front beats already, it will beat when the point's turn comes.
            for i in (start + np.flatnonzero(~dominates(self._points, chunk).any(axis=0))).tolist():
                gains[i] = self._take(int(keys[i]), values[i])
        return gains

    def _take(self, key: int, point: NDArray[np.float64]) -> float:
        if dominates(self._points, point[None]).any():
            return 0.0
        gain = self._gain(point)
        kept = ~dominates(point[None], self._points)[0]
        self._points = np.concatenate([self._points[kept], point[None]])
        self._keys = np.append(self._keys[kept], key)
        self.hypervolume += gain
        return gain

    def _gain(self, point: NDArray[np.float64]) -> float:
        if not (point < self._reference).all():
            return 0.0
        box = float(np.prod(self._reference - point))
        # Rounding may leave less than nothing of a box that is covered.
        return max(0.0, box - hypervolume(np.maximum(self._points, point), self._reference))
