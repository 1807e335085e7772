"""What a quality at one rung says of the quality at the next: a plane per rung, learned from those that climbed.

Two things are known of a candidate: its quality at the rung, and what its proposer forecast of it. How much each is
worth is learned. Promotion selects by both, and a regression on what was selected by is not biased by it. The
regression is Bayesian (normal-inverse-gamma; Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.8): before
anybody has climbed, quality stays half way to the forecast, with a deviation of half of what candidates differ by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SLOPE_ROWS = 2.0
"""Observations that each prior slope is worth."""
_MEAN_ROWS = 0.01
"""Observations that 'no shift between rungs' is worth: rungs evaluate different things."""
_PULL = 0.5
"""Prior share of the way to the forecast."""
_PRIOR_DOF = 4.0
_PRIOR_SHARE = 0.5
"""Prior deviation of a step, as a share of the spread of candidates at its lower rung."""


@dataclass(frozen=True)
class Step:
    """From one rung to the next.

    Args:
        centre: of the lower rung's qualities.
        shift: of forecasts minus those qualities: rungs and forecasts are on scales of their own.
        mean: [3] level, slope, and share of the way to the forecast.
        spread: [3, 3] their covariance, as multiples of `variance`.
        variance: of one candidate around the plane; predictive, so with the tails of few observations.
    """

    centre: float
    shift: float
    mean: Array
    spread: Array
    variance: float

    def predict(self, quality: Array, forecast: float | None) -> tuple[Array, Array]:
        """[N] means and standard deviations at the upper rung, of [N] qualities at the lower and one forecast."""
        away = np.zeros_like(quality) if forecast is None else forecast - quality - self.shift
        rows = np.stack([np.ones_like(quality), quality - self.centre, away], axis=1)
        leverage = np.einsum("ni,ij,nj->n", rows, self.spread, rows)
        return rows @ self.mean, np.sqrt(self.variance * (1.0 + leverage))


def learn_step(below: Mapping[int, float], above: Mapping[int, float], forecasts: Mapping[int, float]) -> Step:
    """The step between two rungs.

    Args:
        below: trial -> quality at the lower rung, of all that were there; at least one.
        above: the same at the upper rung.
        forecasts: trial -> quality that was forecast of it, where any was.
    """
    everybody = sorted(below)
    centre, width = _moments([below[trial] for trial in everybody])
    shift, reach = _moments([forecasts[trial] - below[trial] for trial in everybody if trial in forecasts])
    both = sorted(below.keys() & above.keys())
    x, y = np.array([below[trial] for trial in both]), np.array([above[trial] for trial in both])
    away = np.array([forecasts[trial] - below[trial] - shift if trial in forecasts else 0.0 for trial in both])
    rows = np.stack([np.ones_like(x), x - centre, away], axis=1)
    prior = np.diag([_MEAN_ROWS if both else 1.0, _SLOPE_ROWS * width**2, _SLOPE_ROWS * reach**2])
    start = np.array([centre, 1.0, _PULL])
    spread = np.linalg.inv(prior + rows.T @ rows)
    mean = spread @ (prior @ start + rows.T @ y)
    left, pulled = y - rows @ mean, mean - start
    dof = _PRIOR_DOF + len(both)
    squares = _PRIOR_DOF * (_PRIOR_SHARE * width) ** 2 + float(left @ left) + float(pulled @ prior @ pulled)
    return Step(centre, shift, mean, spread, squares / (dof - 2.0))


def learn_steps(seen: Sequence[Mapping[int, float]], forecasts: Mapping[int, float]) -> list[Step]:
    """The step from each rung but the last to the next.

    Args:
        seen: for every rung, trial -> quality; somebody was at each but the last.
        forecasts: trial -> quality that was forecast of it, where any was.
    """
    return [learn_step(below, above, forecasts) for below, above in pairwise(seen)]


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; a deviation above 0, for no values too."""
    if not values:
        return 0.0, 1e-6
    mean = math.fsum(values) / len(values)
    return mean, max(math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)), 1e-6)
