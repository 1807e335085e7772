"""Exact hypervolume (Zitzler and Thiele 1998) through moocore. Everything is minimised.

Points that are not better than the reference point on every coordinate add nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def hypervolume(points: ArrayLike, reference: ArrayLike) -> float:
    """Volume between the front of `points` and `reference`.

    Args:
        points: [P, M], any number of them, dominated ones too.
        reference: [M], the worst corner.
    """
    import moocore  # type: ignore[import-untyped]

    corner = np.asarray(reference, dtype=float)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(corner))
    inside = values[(values < corner).all(axis=1)]
    return float(moocore.hypervolume(inside, ref=corner)) if len(inside) else 0.0


def contributions(points: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """[P] the hypervolume lost when that point alone goes; 0 for dominated points and for points that stand twice."""
    import moocore

    corner = np.asarray(reference, dtype=float)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(corner))
    inside = (values < corner).all(axis=1)
    found = np.zeros(len(values))
    if inside.any():
        found[inside] = moocore.hv_contributions(values[inside], ref=corner, ignore_dominated=False)
    return found
