"""Gaussian process regression whose kernel is a weighted sum of fixed ones (Rasmussen and Williams 2006, chapter 2).

The weights and the noise are those of greatest posterior density (ibid., eq. 5.9 for the gradient), under a wide prior
on their logarithms. Since the kernels themselves are fixed, one set of Gram matrices serves all targets and all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PRIOR_MEAN, _PRIOR_SD = -2.0, 2.0
"""Of the logarithm of a kernel's weight, for targets of unit variance."""
_NOISE_MEAN, _NOISE_LOW, _NOISE_HIGH = -4.0, -9.0, 1.0
_STEPS = 40


@dataclass(frozen=True)
class Weights:
    """Hyperparameters of one target.

    Args:
        kernels: [G] weights of the kernels.
        noise: variance of the noise of an observation, besides what is known of it; targets have unit variance.
    """

    kernels: Array
    noise: float


@dataclass(frozen=True)
class Process:
    """A fitted process.

    Args:
        weights: of kernels and noise.
        factor: [N, N] lower Cholesky factor of the covariance of the observations.
        solved: [N] covariance^-1 targets.
        offset: subtracted from the targets.
        scale: the targets were divided by it.
    """

    weights: Weights
    factor: Array
    solved: Array
    offset: float
    scale: float

    def predict(self, cross: Array, own: Array) -> tuple[Array, Array]:
        """[P] means and standard deviations of the noise-free target.

        Args:
            cross: [G, P, N] kernels between new points and observed ones.
            own: [G, P] kernels of new points with themselves.
        """
        from scipy.linalg import solve_triangular  # type: ignore[import-untyped]

        between = np.tensordot(self.weights.kernels, cross, axes=1)
        explained = solve_triangular(self.factor, between.T, lower=True, check_finite=False)
        variance = self.weights.kernels @ own - (explained**2).sum(axis=0)
        mean = self.offset + self.scale * (between @ self.solved)
        return mean, self.scale * np.sqrt(np.maximum(variance, 1e-6))


def fit(grams: Array, targets: Array, known_noise: Array, weights: Weights) -> Process:
    """Conditions on observations.

    Args:
        grams: [G, N, N] kernels between them.
        targets: [N].
        known_noise: [N] variances that are known, in units of the targets.
        weights: from `tune`, of the same targets or of some of them.
    """
    from scipy.linalg import cho_solve, cholesky

    offset, scale = _standard(targets)
    covariance = np.tensordot(weights.kernels, grams, axes=1)
    covariance[np.diag_indices_from(covariance)] += weights.noise + known_noise / scale**2 + 1e-8
    factor = cholesky(covariance, lower=True, check_finite=False)
    solved = cho_solve((factor, True), (targets - offset) / scale, check_finite=False)
    return Process(weights, factor, solved, offset, scale)


def tune(grams: Array, targets: Array, known_noise: Array) -> Weights:
    """The weights of greatest posterior density; arguments as of `fit`."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    offset, scale = _standard(targets)
    count = len(grams)
    start = np.full(count + 1, _PRIOR_MEAN)
    start[count] = _NOISE_MEAN
    found = minimize(
        _loss, start, ((targets - offset) / scale, grams, known_noise / scale**2), "L-BFGS-B", jac=True,
        bounds=[(-9.0, 3.0)] * count + [(_NOISE_LOW, _NOISE_HIGH)], options={"maxiter": _STEPS},
    )  # fmt: skip
    return Weights(np.exp(found.x[:count]), float(np.exp(found.x[count])))


def _loss(logs: Array, targets: Array, grams: Array, known_noise: Array) -> tuple[float, Array]:
    """Negative log posterior density and its gradient."""
    from scipy.linalg import lapack

    weights = np.exp(logs)
    covariance = np.tensordot(weights[:-1], grams, axes=1)
    covariance[np.diag_indices_from(covariance)] += weights[-1] + known_noise + 1e-8
    factor, failed = lapack.dpotrf(covariance, lower=1)
    assert not failed, "sums of kernels and noise are positive definite"
    inverse, _ = lapack.dpotri(factor, lower=1)
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    solved = inverse @ targets
    sensitivity = inverse - np.outer(solved, solved)
    slope = np.append(np.tensordot(grams, sensitivity, axes=2), np.trace(sensitivity)) * weights / 2
    gap = (logs - np.append(np.full(len(grams), _PRIOR_MEAN), _NOISE_MEAN)) / _PRIOR_SD
    density = 0.5 * float(targets @ solved) + float(np.log(np.diag(factor)).sum()) + 0.5 * float(gap @ gap)
    return density, slope + gap / _PRIOR_SD


def _standard(targets: Array) -> tuple[float, float]:
    """Mean and standard deviation; 1 for targets without spread."""
    spread = float(targets.std())
    return float(targets.mean()), spread if spread > 1e-9 else 1.0
