"""Criteria for ending a search: the hypervolume with its interval, and the gain expected of the next batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nas.core.pareto import hypervolume


class Volume(NamedTuple):
    """A hypervolume.

    Args:
        value: of the measured points.
        estimate: of the points without their noise.
        low: lower end of the 95 % interval of `estimate`.
        high: its upper end.
    """

    value: float
    estimate: float
    low: float
    high: float


def volume(points: ArrayLike, sd: ArrayLike, reference: ArrayLike, draws: int = 200) -> Volume:
    """Returns the hypervolume of measured points, and an estimate without the noise in it.

    The estimate is the basic bootstrap of Davison and Hinkley (1997), equation 5.6.

    Args:
        points: [P, M] minimised coordinates.
        sd: [P, M] their standard deviations.
        reference: [M] the reference point.
        draws: number of draws from the noise, at least 1.
    """
    worst = np.asarray(reference, dtype=np.float64)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(worst))
    spread = np.asarray(sd, dtype=np.float64).reshape(values.shape)
    rng = np.random.default_rng(0)
    volumes = [hypervolume(values + spread * rng.standard_normal(values.shape), worst) for _ in range(draws)]
    value = hypervolume(values, worst)
    drawn = [np.mean(volumes), *np.quantile(volumes, [0.975, 0.025])]
    return Volume(value, *np.maximum(0.0, 2 * value - np.array(drawn)).tolist())


def is_exhausted(expected_gain: float | None, reached: float, batch: int, least: float = 0.005) -> bool:
    """Returns whether a batch that gains as its best candidate adds less than the share `least` to what is reached."""
    return expected_gain is not None and reached > 0 and batch * expected_gain < least * reached
