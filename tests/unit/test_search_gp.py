"""Gaussian processes against another implementation, their gradient against differences, and what weights are for."""

from __future__ import annotations

import numpy as np
import pytest

from nas.search.proposers.gp import Array, Weights, _loss, fit, left_out, tune

RNG = np.random.default_rng(2)
ROWS = RNG.normal(size=(30, 2))
NEW = RNG.normal(size=(7, 2))


def rbf(a: Array, b: Array, length: float) -> Array:
    squared = ((a[:, None] - b[None]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * squared / length**2))


def kernels(a: Array, b: Array) -> Array:
    return np.array([rbf(a, b, 1.0), a @ b.T])


def test_posterior_is_that_of_another_implementation() -> None:
    # Imported in the test, because every process of a test run imports every test file.
    from sklearn.gaussian_process import GaussianProcessRegressor  # type: ignore[import-untyped]
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel  # type: ignore[import-untyped]

    targets = np.sin(ROWS[:, 0]) + 5.0
    noise = RNG.uniform(0.001, 0.05, 30)
    scale = targets.std()
    process = fit(0.7 * rbf(ROWS, ROWS, 1.0), targets, noise, 0.01)
    mean, sd = process.predict(0.7 * rbf(NEW, ROWS, 1.0), np.full(7, 0.7))
    other = GaussianProcessRegressor(ConstantKernel(0.7) * RBF(1.0), alpha=0.01 + noise / scale**2, optimizer=None)
    other.fit(ROWS, (targets - targets.mean()) / scale)
    expected, expected_sd = other.predict(NEW, return_std=True)
    assert mean == pytest.approx(expected, abs=1e-6) and sd == pytest.approx(expected_sd, abs=1e-5)
    assert (process.offset, process.scale) == pytest.approx((targets.mean(), scale))


def test_gradient_is_that_of_differences() -> None:
    targets = RNG.normal(size=30)
    grams, noise = kernels(ROWS, ROWS), RNG.uniform(0.0, 0.1, 30)
    at = np.array([-0.3, -1.1, -2.0])
    _, gradient = _loss(at, targets, grams, noise)
    for index, step in enumerate(1e-5 * np.eye(3)):
        up, down = _loss(at + step, targets, grams, noise)[0], _loss(at - step, targets, grams, noise)[0]
        assert gradient[index] == pytest.approx((up - down) / 2e-5, rel=1e-4)


def test_weights_tell_which_kernel_matters_and_how_noisy_targets_are() -> None:
    rows = RNG.normal(size=(80, 2))
    clean = rows @ np.array([1.0, -2.0])
    sure = tune(kernels(rows, rows), clean, np.zeros(80))
    assert sure.kernels[1] > 10 * sure.kernels[0] and sure.noise < 1e-3
    noisy = clean + RNG.normal(0, clean.std(), 80)
    assert 0.25 < tune(kernels(rows, rows), noisy, np.zeros(80)).noise < 1.0


def test_known_noise_is_not_learned_again() -> None:
    rows = RNG.normal(size=(80, 2))
    clean = rows @ np.array([1.0, -2.0])
    noisy = clean + RNG.normal(0, clean.std(), 80)
    weights = tune(kernels(rows, rows), noisy, np.full(80, float(clean.var())))
    assert weights.noise < 0.5 * tune(kernels(rows, rows), noisy, np.zeros(80)).noise


def test_targets_without_spread_are_predicted() -> None:
    weights = Weights(np.array([0.1, 0.2]), 0.01)
    process = fit(weights.sum(kernels(ROWS, ROWS)), np.full(30, 3.0), np.zeros(30), weights.noise)
    mean, _ = process.predict(weights.sum(kernels(NEW, ROWS)), weights.sum(np.ones((2, 7))))
    assert process.offset + process.scale * mean == pytest.approx(np.full(7, 3.0))


def test_neighbours_are_left_out_too() -> None:
    rows = np.vstack([ROWS, ROWS[:1] + 1e-3])
    targets, gram = np.sin(rows[:, 0]), 0.7 * rbf(rows, rows, 1.0)
    alone, pair = (left_out(gram, targets, np.zeros(31), 1e-4, neighbours)[1] for neighbours in (0, 1))
    rest = left_out(gram[:30, :30], targets[:30], np.zeros(30), 1e-4)[1] / targets[:30].var() * targets.var()
    assert pair[0] == pytest.approx(rest[0], rel=1e-3) and pair[0] > alone[0]


def test_what_is_left_out_is_predicted_by_the_rest() -> None:
    targets, noise = np.sin(ROWS[:, 0]) + 5.0, RNG.uniform(0.001, 0.05, 30)
    gram, priors = 0.7 * rbf(ROWS, ROWS, 1.0), np.full(30, 0.7)
    mean, variance = left_out(gram, targets, noise, 0.01)
    standard = float(targets.mean()), float(targets.std())
    for row in (0, 7, 29):
        rest = np.arange(30) != row
        process = fit(gram[np.ix_(rest, rest)], targets[rest], noise[rest], 0.01, standard)
        centre, spread = process.predict(gram[row : row + 1, rest], priors[:1])
        assert mean[row] == pytest.approx(standard[0] + standard[1] * centre[0], abs=1e-6)
        latent = (standard[1] * spread[0]) ** 2
        assert variance[row] == pytest.approx(latent + noise[row] + 0.01 * standard[1] ** 2, rel=1e-4)
