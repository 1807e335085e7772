"""Criteria for ending a search: the hypervolume with its interval, and the gain expected of the next batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nas.core.pareto import hypervolume


class Volume(NamedTuple):
    """A hypervolume, and the bounds that 95 % of draws from the measurements' noise lie between."""

    value: float
    low: float
    high: float


def volume(points: ArrayLike, sd: ArrayLike, reference: ArrayLike, draws: int = 200) -> Volume:
    """Returns the hypervolume of measured points.

    The best of several noisy measurements is too good, and so is their hypervolume: with much noise, `value` is biased
    upwards, which the interval does not show.

    Args:
        points: [P, M] minimised coordinates.
        sd: [P, M] their standard deviations.
        reference: [M], the worst corner.
        draws: number of draws from the noise.
    """
    corner = np.asarray(reference, dtype=np.float64)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(corner))
    spread = np.asarray(sd, dtype=np.float64).reshape(values.shape)
    rng = np.random.default_rng(0)
    found = [hypervolume(values + spread * rng.standard_normal(values.shape), corner) for _ in range(draws)]
    low, high = np.quantile(found, [0.025, 0.975]) if found else (0.0, 0.0)
    return Volume(hypervolume(values, corner), float(low), float(high))


def is_exhausted(expected_gain: float | None, reached: float, batch: int, least: float = 0.005) -> bool:
    """Returns whether the next batch is expected to add less than a share of what is reached.

    Args:
        expected_gain: of the best candidate, `EhviSearch.expected_gain`; None where no model chose it: not exhausted.
        reached: hypervolume.
        batch: layouts; none of them is expected to gain more than the best.
        least: the share.
    """
    return expected_gain is not None and reached > 0 and batch * expected_gain < least * reached
