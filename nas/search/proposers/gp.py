"""Gaussian process regression whose kernel is a weighted sum of fixed ones (Rasmussen and Williams 2006, chapter 2).

The weights and the noise maximise the posterior density (ibid., eq. 5.9 for the gradient), under a wide prior on their
logarithms. Since the kernels themselves are fixed, one set of Gram matrices serves all targets and all steps.

| symbol | shape | name here | meaning |
| --- | --- | --- | --- |
| y | N | `targets` | observed values; divided by `scale` after `offset` is subtracted, they have unit variance |
| k_g | G, N, N | `grams` | fixed kernels between observations |
| w_g | G | `Weights.kernels` | weight of each kernel |
| s2 | | `Weights.noise` | variance of the noise beyond the known one, for unit variance |
| d | N | `known_noise` | known noise variances, in units of the targets |
| K | N, N | | sum_g w_g k_g + diag(s2 + d / scale^2) |
| L | N, N | `Process.factor` | lower Cholesky factor of K |
| alpha | N | `Process.solved` | K^-1 y |
| k* | P, N | `between` | sum_g w_g k_g between new points and observations |
| k** | P | `variances` | sum_g w_g k_g of each new point with itself |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PRIOR_MEAN = 0.5
"""Prior mean of log w_g, for targets of unit variance: high, as the first few layouts differ less than later ones."""
_PRIOR_SD = 2.0
"""Prior standard deviation of log w_g, and of log s2."""
_LEAST_LOG_WEIGHT = -9.0
"""Lower bound of log w_g."""
_GREATEST_LOG_WEIGHT = 3.0
"""Upper bound of log w_g."""
_NOISE_MEAN = -5.0
"""Prior mean of log s2."""
_LEAST_LOG_NOISE = -9.0
"""Lower bound of log s2."""
_GREATEST_LOG_NOISE = 0.0
"""Upper bound of log s2: the variance of the targets."""
_STEPS = 30
"""Steps of the optimiser at most."""
_JITTER = 1e-8
"""Added to the diagonal of K, so that it is positive definite."""


@dataclass(frozen=True)
class Weights:
    """Hyperparameters of one target.

    Args:
        kernels: [G] weights of the kernels.
        noise: variance of the noise of an observation beyond the known one; targets have unit variance.
    """

    kernels: Array
    noise: float

    def sum(self, kernels: Array) -> Array:
        """Returns [...] the weighted sum of [G, ...] kernels."""
        return np.tensordot(self.kernels, kernels, axes=1)


@dataclass(frozen=True)
class Process:
    """A fitted process.

    Args:
        factor: [N, N] lower Cholesky factor of the covariance of the observations.
        solved: [N] covariance^-1 targets.
        offset: subtracted from the targets.
        scale: the targets were divided by it.
    """

    factor: Array
    solved: Array
    offset: float
    scale: float

    def predict(self, between: Array, variances: Array) -> tuple[Array, Array]:
        """Returns [P] means and standard deviations of the noise-free target, without offset and scale.

        Args:
            between: [P, N] covariances of new points with observed ones: weighted sums of their kernels.
            variances: [P] of new points, likewise.
        """
        from scipy.linalg import solve_triangular  # type: ignore[import-untyped]

        explained = solve_triangular(self.factor, between.T, lower=True, check_finite=False)
        variance = variances - (explained**2).sum(axis=0)
        return between @ self.solved, np.sqrt(np.maximum(variance, 1e-6))


def fit(
    covariance: Array, targets: Array, known_noise: Array, noise: float, standard: tuple[float, float] | None = None
) -> Process:
    """Fits a process to observations.

    Args:
        covariance: [N, N] between them, for targets of unit variance, without noise: the weighted sum of the kernels.
        targets: [N].
        known_noise: [N] variances that are known, in units of the targets.
        noise: variance of further noise, for targets of unit variance.
        standard: offset and scale of the targets; their own mean and standard deviation where it is left out.
    """
    from scipy.linalg import cho_solve, cholesky

    offset, scale = standard or _standard(targets)
    whole = covariance.copy()
    whole[np.diag_indices_from(whole)] += noise + known_noise / scale**2 + _JITTER
    factor = cholesky(whole, lower=True, check_finite=False)
    solved = cho_solve((factor, True), (targets - offset) / scale, check_finite=False)
    return Process(factor, solved, offset, scale)


def left_out(
    covariance: Array, targets: Array, known_noise: Array, noise: float, neighbours: int = 0
) -> tuple[Array, Array]:
    """Returns [N] means and variances of each target, noise included, without itself (ibid., eq. 5.12).

    Args:
        covariance: [N, N], as for `fit`.
        targets: [N].
        known_noise: [N], as for `fit`.
        noise: as for `fit`.
        neighbours: of each observation, those of highest correlation, that are left out with it.
    """
    offset, scale = _standard(targets)
    whole = covariance.copy()
    whole[np.diag_indices_from(whole)] += noise + known_noise / scale**2 + _JITTER
    inverse = np.linalg.inv(whole)
    solved = inverse @ ((targets - offset) / scale)
    size = np.sqrt(np.diag(covariance))
    alike = covariance / size / size[:, None]
    alike[np.diag_indices_from(alike)] = np.inf
    out = np.argsort(-alike, axis=1, kind="stable")[:, : 1 + min(neighbours, len(targets) - 2)]
    covariances = np.linalg.inv(inverse[out[:, :, None], out[:, None, :]])
    away = (covariances[:, 0] * solved[out]).sum(axis=1)
    return targets - scale * away, scale**2 * covariances[:, 0, 0]


def tune(grams: Array, targets: Array, known_noise: Array) -> Weights:
    """Returns the weights that maximise the posterior density.

    Args:
        grams: [G, N, N] kernels between observations.
        targets: [N].
        known_noise: [N] variances that are known, in units of the targets.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    offset, scale = _standard(targets)
    count = len(grams)
    start = np.full(count + 1, _PRIOR_MEAN)
    start[count] = _NOISE_MEAN
    optimum = minimize(
        _loss,
        start,
        ((targets - offset) / scale, grams, known_noise / scale**2),
        "L-BFGS-B",
        jac=True,
        bounds=[(_LEAST_LOG_WEIGHT, _GREATEST_LOG_WEIGHT)] * count + [(_LEAST_LOG_NOISE, _GREATEST_LOG_NOISE)],
        options={"maxiter": _STEPS},
    )
    return Weights(np.exp(optimum.x[:count]), float(np.exp(optimum.x[count])))


def _loss(logs: Array, targets: Array, grams: Array, known_noise: Array) -> tuple[float, Array]:
    """Returns the negative log posterior density and its gradient."""
    from scipy.linalg import lapack

    weights = np.exp(logs)
    covariance = np.tensordot(weights[:-1], grams, axes=1)
    covariance[np.diag_indices_from(covariance)] += weights[-1] + known_noise + _JITTER
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
    """Returns mean and standard deviation; 1 for targets without spread."""
    spread = float(targets.std())
    return float(targets.mean()), spread if spread > 1e-9 else 1.0
