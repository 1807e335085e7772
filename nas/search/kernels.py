"""Similarities of layouts: linear in each group of features, and smooth ones for what sums do not say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nas.core.layout import Layout
from nas.search.features import GROUPS, Features
from nas.search.gp import Array
from nas.search.sampling import Sampler

_CROWD = 64


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
        columns = {group: features.groups == index for index, group in enumerate(GROUPS)}
        self._columns = {group: mask for group, mask in columns.items() if mask.any()}

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
        squared = {}
        for group, columns in self._columns.items():
            left, right = a[:, :size][:, columns], b[:, :size][:, columns]
            dots = left @ right.T
            parts.append(dots / columns.sum())
            squared[group] = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * dots
        for groups, length, form in _NONLINEAR:
            columns_in = sum(self._columns[group].sum() for group in groups)
            mean = sum((squared[group] for group in groups), np.zeros(parts[0].shape)) / columns_in
            parts.append(form(np.sqrt(np.maximum(mean, 0.0)) / length))
        return np.array(parts)

    def own(self, a: Array) -> Array:
        """[G, A] of each row with itself."""
        size = len(self._centre)
        parts = [np.ones(len(a)), (a[:, size:] ** 2).sum(axis=1)]
        parts += [(a[:, :size][:, columns] ** 2).mean(axis=1) for columns in self._columns.values()]
        return np.array(parts + [np.ones(len(a))] * len(_NONLINEAR))


def _matern(distance: Array) -> Array:
    """Matern covariance with smoothness 5/2 at distances in length scales (Rasmussen and Williams 2006, eq. 4.17)."""
    scaled = np.sqrt(5) * distance
    return np.asarray((1 + scaled + scaled**2 / 3) * np.exp(-scaled))


def _exponential(distance: Array) -> Array:
    """Matern covariance with smoothness 1/2 (ibid., eq. 4.18)."""
    return np.asarray(np.exp(-distance))


_STRUCTURE = ("sizes", "heights", "neighbours")
_NONLINEAR: tuple[tuple[tuple[str, ...], float, Callable[[Array], Array]], ...] = (
    (("sizes",), 2.0, _matern),
    (_STRUCTURE, 1.0, _exponential),
    (_STRUCTURE, 2.0, _matern),
)
"""Groups, length scale in root mean square standard deviations of a random layout, and form: most effects are smooth,
and yet layouts that are nearly alike may differ abruptly."""
