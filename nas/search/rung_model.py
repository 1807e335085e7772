"""What a quality at one rung says of the quality at the next: a line per rung, learned from those that climbed.

Promotion selects by the lower rung's quality, and a regression on that quality is not biased by it. Each line is
Bayesian (normal-inverse-gamma; Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.8): with nobody above yet, it
is the identity with a deviation of half of what candidates of the rung differ by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SLOPE_ROWS = 2.0
"""Observations that the prior slope of 1 is worth."""
_MEAN_ROWS = 0.01
"""Observations that 'no shift between rungs' is worth: rungs evaluate different things."""
_PRIOR_DOF = 4.0
_PRIOR_SHARE = 0.5
"""Prior deviation of a step, as a share of the spread of candidates at its lower rung."""


@dataclass(frozen=True)
class Step:
    """From one rung to the next.

    Args:
        centre: of the lower rung's qualities.
        mean: [2] level and slope.
        spread: [2, 2] their covariance, as multiples of `variance`.
        variance: of one candidate around the line; predictive, so with the tails of few observations.
    """

    centre: float
    mean: Array
    spread: Array
    variance: float

    def predict(self, quality: Array) -> tuple[Array, Array]:
        """[N] means and standard deviations at the upper rung, of [N] qualities at the lower."""
        rows = np.stack([np.ones_like(quality), quality - self.centre], axis=1)
        leverage = np.einsum("ni,ij,nj->n", rows, self.spread, rows)
        return rows @ self.mean, np.sqrt(self.variance * (1.0 + leverage))


def learn_step(below: Mapping[int, float], above: Mapping[int, float]) -> Step:
    """The step between two rungs.

    Args:
        below: trial -> quality at the lower rung, of all that were there; at least one.
        above: the same at the upper rung.
    """
    everybody = np.array([below[trial] for trial in sorted(below)])
    both = sorted(below.keys() & above.keys())
    x, y = np.array([below[trial] for trial in both]), np.array([above[trial] for trial in both])
    centre = float(everybody.mean())
    width = max(float(everybody.std()), 1e-6)
    rows = np.stack([np.ones_like(x), x - centre], axis=1)
    prior, start = np.diag([_MEAN_ROWS, _SLOPE_ROWS * width**2]), np.array([centre, 1.0])
    precision = prior + rows.T @ rows
    spread = np.linalg.inv(precision)
    mean = spread @ (prior @ start + rows.T @ y)
    left = y - rows @ mean
    pulled = mean - start
    dof = _PRIOR_DOF + len(both)
    squares = _PRIOR_DOF * (_PRIOR_SHARE * width) ** 2 + float(left @ left) + float(pulled @ prior @ pulled)
    return Step(centre, mean, _known_level(spread) if not both else spread, squares / (dof - 2.0))


def learn_steps(seen: Sequence[Mapping[int, float]]) -> list[Step]:
    """The step from each rung but the last to the next.

    Args:
        seen: for every rung, trial -> quality; somebody was at each but the last.
    """
    return [learn_step(below, above) for below, above in pairwise(seen)]


def _known_level(spread: Array) -> Array:
    """Before anybody has climbed, the shift between rungs is unknown without end, and would make everyone worth all."""
    known = spread.copy()
    known[0, 0] = 1.0
    return known
