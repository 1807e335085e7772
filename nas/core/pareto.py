"""Dominance. Everything is minimised: rows are points, columns are coordinates."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def dominates(points: ArrayLike, others: ArrayLike) -> NDArray[np.bool_]:
    """[P, O] whether point p is nowhere worse than other o and somewhere better; equal points do not dominate.

    Args:
        points: [P, M].
        others: [O, M].
    """
    a, b = np.asarray(points, dtype=float), np.asarray(others, dtype=float)
    no_worse, better = np.ones((len(a), len(b)), dtype=np.bool_), np.zeros((len(a), len(b)), dtype=np.bool_)
    for mine, theirs in zip(a.T, b.T, strict=True):  # a few axes of many points: several times faster than at once
        no_worse &= mine[:, None] <= theirs
        better |= mine[:, None] < theirs
    return no_worse & better


def front_mask(points: ArrayLike) -> NDArray[np.bool_]:
    """[P] whether no other point dominates it; of equal points all stay."""
    values = np.asarray(points, dtype=float)
    if len(values) == 0:
        return np.zeros(0, dtype=bool)
    return np.asarray(~np.any(dominates(values, values), axis=0), dtype=np.bool_)


def ranks(points: ArrayLike) -> NDArray[np.int64]:
    """[P] non-dominated rank: 0 on the front, 1 on the front of the rest, and so on (Deb et al. 2002, NSGA-II)."""
    values = np.asarray(points, dtype=float)
    rank = np.full(len(values), -1, dtype=np.int64)
    beaten = dominates(values, values) if len(values) else np.zeros((0, 0), dtype=np.bool_)
    better = beaten.sum(axis=0)
    level = 0
    while (front := (rank < 0) & (better == 0)).any():
        rank[front] = level
        better = better - beaten[front].sum(axis=0)
        level += 1
    return rank
