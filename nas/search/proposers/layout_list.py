"""A finite list of layouts as a space: which are alike, in place of edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.search.proposers.features import Features
from nas.search.proposers.gp import Array

_AXES = 8
"""Principal components of the features at most, by which layouts are compared."""


class Listed:
    """Layouts with positions: the leading principal components of their features, scaled to the unit cube.

    Args:
        space: of the layouts.
        layouts: at least one, each once.
    """

    def __init__(self, space: SearchSpace, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple(layouts)
        self._space = space
        self._index = {layout.id: index for index, layout in enumerate(self.layouts)}

    def __contains__(self, layout_id: str) -> bool:
        return layout_id in self._index

    def position(self, layout: Layout) -> Array:
        """Returns [K] the position of a layout of the list."""
        return np.asarray(self.positions[self._index[layout.id]])

    @cached_property
    def positions(self) -> Array:
        """[L, K] numbers from 0 to 1, with K <= 8."""
        rows = Features(self._space).matrix(self.layouts)
        spread = rows.std(axis=0)
        scaled = (rows - rows.mean(axis=0)) / np.where(spread > 1e-9, spread, np.inf)
        vectors, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
        axes = max(1, min(_AXES, int((sizes > 1e-9 * max(sizes[0], 1e-9)).sum())))
        vectors = vectors[:, :axes] * np.sign(vectors[np.abs(vectors[:, :axes]).argmax(axis=0), range(axes)])
        coordinates = np.round(vectors * sizes[:axes], 9)
        low, span = coordinates.min(axis=0), np.ptp(coordinates, axis=0)
        return np.asarray((coordinates - low) / np.where(span > 0, span, 1.0))

    def near(self, parents: Sequence[Layout], rng: np.random.Generator) -> Layout:
        """Returns a random layout near the middle of `parents` and none of them.

        The logarithm of its rank by distance is uniform, so that near ones are likely and none is out of reach.
        """
        rank = int(np.exp(rng.uniform(0.0, np.log(len(self.layouts) + 1))))
        order = self._by_distance(np.mean([self.position(parent) for parent in parents], axis=0))
        others = order[~np.isin(order, [self._index[parent.id] for parent in parents])]
        return self.layouts[others[min(rank, len(others)) - 1]] if len(others) else parents[0]

    def nearest(self, position: Array, is_taken: Callable[[Layout], bool]) -> Layout | None:
        """Returns the layout nearest to `position` that is not taken; None where all are."""
        layouts = (self.layouts[index] for index in self._by_distance(position))
        return next((layout for layout in layouts if not is_taken(layout)), None)

    def spread(self, count: int) -> list[Layout]:
        """Returns up to `count` layouts that are far from each other, the most central one first."""
        chosen = [int(np.argmin(((self.positions - self.positions.mean(axis=0)) ** 2).sum(axis=1)))]
        gap = ((self.positions - self.positions[chosen[0]]) ** 2).sum(axis=1)
        while len(chosen) < min(count, len(self.layouts)):
            gap[chosen] = -1.0
            chosen.append(int(np.argmax(gap)))
            gap = np.minimum(gap, ((self.positions - self.positions[chosen[-1]]) ** 2).sum(axis=1))
        return [self.layouts[index] for index in chosen[:count]]

    def _by_distance(self, position: Array) -> NDArray[np.intp]:
        """Returns [L] indices of the layouts, the nearest one first."""
        return np.argsort(((self.positions - position) ** 2).sum(axis=1), kind="stable")
