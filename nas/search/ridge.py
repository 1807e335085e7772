"""Ridge regression with its penalty chosen by leave-one-out error, and the variance of its predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PENALTIES = np.logspace(-2, 4, 13)


@dataclass(frozen=True)
class Ridge:
    """A fitted ridge regression on standardised columns.

    Args:
        centre: [F] column means.
        scale: [F] column standard deviations; columns without spread are divided by 1.
        offset: mean of the targets.
        basis: [F, R] right singular vectors.
        coefficients: [R] weights on the basis.
        shrink: [R] squared singular values + penalty.
        penalty: the chosen one.
        error: leave-one-out mean squared error.
    """

    centre: Array
    scale: Array
    offset: float
    basis: Array
    coefficients: Array
    shrink: Array
    penalty: float
    error: float

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """[N] means and [N] variances of the mean, for [N, F] rows.

        The variance is error * x' (X'X + penalty I)^-1 x (Hoerl and Kennard 1970; Rasmussen and Williams 2006,
        eq. 2.9), so it grows in directions that no training row has shown.
        """
        scaled = (rows - self.centre) / self.scale
        seen = scaled @ self.basis
        unseen = np.maximum((scaled**2).sum(axis=1) - (seen**2).sum(axis=1), 0.0)
        variance = self.error * ((seen**2 / self.shrink).sum(axis=1) + unseen / self.penalty)
        return self.offset + seen @ self.coefficients, variance


def fit_ridge(rows: Array, targets: Array, weights: Array) -> Ridge:
    """The ridge regression of [N] targets on [N, F] rows, N >= 2; a row of weight w counts as w rows.

    Leave-one-out residuals follow from the fit itself: r_i / (1 - h_i) (Hastie, Tibshirani and Friedman 2009, 7.52).
    """
    share = weights / weights.sum()
    centre, offset = share @ rows, float(share @ targets)
    spread = np.sqrt(share @ (rows - centre) ** 2)
    scale = np.where(spread > 1e-12, spread, 1.0)
    root = np.sqrt(weights)
    left, singular, right = np.linalg.svd((rows - centre) / scale * root[:, None], full_matrices=False)
    residual_of = root * (targets - offset)
    best: tuple[float, float] | None = None
    for penalty in _PENALTIES:
        hat = left * (singular**2 / (singular**2 + penalty))
        leverage = (hat * left).sum(axis=1) + share
        loo = (residual_of - hat @ (left.T @ residual_of)) / np.maximum(1 - leverage, 1e-3)
        error = float((loo**2).sum() / weights.sum())
        if best is None or error < best[0]:
            best = error, float(penalty)
    assert best is not None
    error, penalty = best
    shrink = singular**2 + penalty
    return Ridge(centre, scale, offset, right.T, singular / shrink * (left.T @ residual_of), shrink, penalty, error)
