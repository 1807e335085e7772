"""Similarities of layouts: linear in each group of features, and smooth ones for what sums do not say."""

from __future__ import annotations

import numpy as np

from nas.core.layout import Layout
from nas.search.features import GROUPS, Features
from nas.search.gp import Array
from nas.search.sampling import Sampler

_CROWD = 64
_SMOOTH = ((("sizes",), (2.0,)), (("sizes", "heights", "neighbours"), (1.0, 3.0)))
"""Groups and length scales of the Matern kernels, in standard deviations of a random layout."""


class Kernels:
    """The kernels of one space.

    Columns are scaled by what random layouts of the space differ in, so that a kernel does not change as more is told.
    Behind the features stand columns that say how far below the top rung a figure was taken: all 0 to predict.

    Args:
        features: of the space.
        sampler: of the space.
        rungs: columns for rungs.
    """

    def __init__(self, features: Features, sampler: Sampler, rungs: int) -> None:
        rng = np.random.default_rng(0)
        crowd = features.matrix([sampler.draw(rng) for _ in range(_CROWD)])
        spread = crowd.std(axis=0)
        self._features, self._rungs = features, rungs
        self._centre = crowd.mean(axis=0)
        self._scale = np.where(spread > 1e-9, spread, 1.0)
        self._columns = [features.groups == index for index in range(len(GROUPS))]
        named = [np.isin(features.groups, [GROUPS.index(name) for name in names]) for names, _ in _SMOOTH]
        self._smooth = [(columns, lengths) for columns, (_, lengths) in zip(named, _SMOOTH, strict=True)]

    def rows(self, layouts: list[Layout], below: Array | None = None) -> Array:
        """[L, F + rungs] scaled features; `below` [L] is how many rungs under the top each was taken."""
        scaled = (self._features.matrix(layouts) - self._centre) / self._scale
        levels = np.zeros((len(layouts), self._rungs))
        if below is not None:
            for level in range(1, self._rungs + 1):
                levels[below == level, level - 1] = 1.0
        return np.hstack([scaled, levels])

    def between(self, a: Array, b: Array) -> Array:
        """[G, A, B] of [A, F] and [B, F] rows."""
        size = len(self._centre)
        parts = [np.ones((len(a), len(b))), a[:, size:] @ b[:, size:].T]
        for columns in self._columns:
            parts.append(a[:, :size][:, columns] @ b[:, :size][:, columns].T / columns.sum())
        for columns, lengths in self._smooth:
            distance = _distance(a[:, :size][:, columns], b[:, :size][:, columns])
            parts += [_matern(distance / length) for length in lengths]
        return np.array(parts)

    def own(self, a: Array) -> Array:
        """[G, A] of each row with itself."""
        size = len(self._centre)
        parts = [np.ones(len(a)), (a[:, size:] ** 2).sum(axis=1)]
        parts += [(a[:, :size][:, columns] ** 2).mean(axis=1) for columns in self._columns]
        return np.array(parts + [np.ones(len(a))] * sum(len(lengths) for _, lengths in self._smooth))


def _distance(a: Array, b: Array) -> Array:
    """[A, B] root mean square differences of rows."""
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(squared, 0.0) / a.shape[1]))


def _matern(distance: Array) -> Array:
    """Matern covariance with smoothness 5/2 at distances in length scales (Rasmussen and Williams 2006, eq. 4.17)."""
    scaled = np.sqrt(5) * distance
    return np.asarray((1 + scaled + scaled**2 / 3) * np.exp(-scaled))
