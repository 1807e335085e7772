"""Hardware models: what a device would measure of a layout, learned from what it has measured of others.

A figure (a time, a size) is a sum of costs of the parts of a layout times what the parts do to each other:

    log figure(x) = log sum_j c_j a_j(x) + residual(x),    c_j >= 0

The amounts a_j are arithmetic (`Costs`); the costs c_j are fitted by non-negative least squares on relative errors; the
residual is a Gaussian process over the amounts of each kind of block. On another device, or on the same one with other
threads, the forecast of a model that is there already takes the place of the sum. A handful of measurements then tells
the rest: by how much the device is faster, whether differences are larger there, and on which kinds of blocks (a linear
multi-task model: Bonilla, Chai and Williams 2008, with one task known through its forecast).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nas.core.layout import Layout
from nas.search.gp import Array, Process, Weights, fit, tune
from nas.search.hardware_costs import Costs

MIN_POINTS = 3
"""Measurements below which there is no model."""
_TUNE_POINTS = 12
"""Measurements from which the kernels' weights are learned; with fewer, `_ASSUMED` are taken."""
_TUNE_ROWS = 96
"""Measurements that they are learned from at most."""
_MOST_ROWS = 256
"""Measurements that a model rests on at most."""
_ASSUMED = np.array([1.0, 0.3, 0.1, 0.03, 0.03]) ** 2
_ASSUMED_NOISE = 0.03**2
"""Variances of log figures around what is expected: of all together, of how far differences are stretched, of single
kinds of blocks, of what is smooth in the amounts; and of noise. A device is any number of times as fast, stretches
differences by a third, and handles a kind of block by a tenth better or worse than expected."""
_LENGTHS = (1.0, 3.0)
"""Length scales of the smooth kernels, in typical distances of a measured layout from their mean."""
_FOLDS = 30
_LEAST = 1e-9
"""Variance of log figures that is none."""
_RIDGE = 1e-3
"""Keeps costs apart that the measured layouts do not tell apart."""


@dataclass(frozen=True)
class Estimate:
    """[L] means and standard deviations of the logarithms of figures."""

    mean: Array
    sd: Array


@dataclass(frozen=True)
class Measured:
    """What a model learns from.

    Args:
        layouts: each once.
        logs: [N] logarithms of their figures.
        noise: [N] standard deviations of these, as far as known.
    """

    layouts: Sequence[Layout]
    logs: Array
    noise: Array

    def of(self, rows: Sequence[int]) -> Measured:
        """Some of them."""
        return Measured([self.layouts[row] for row in rows], self.logs[rows], self.noise[rows])


class HardwareModel:
    """One figure under one workload on one device and runtime.

    Args:
        costs: of the workload.
        measured: at least `MIN_POINTS`; of more than a few hundred, evenly spaced ones are taken.
        base: model of the same figure elsewhere, which this one starts from.
        weights: of an earlier fit; learned where they are left out.
    """

    def __init__(
        self, costs: Costs, measured: Measured, base: HardwareModel | None = None, weights: Weights | None = None
    ) -> None:
        assert len(measured.layouts) >= MIN_POINTS, f"{len(measured.layouts)} measurements"
        if len(measured.layouts) > _MOST_ROWS:
            measured = measured.of(_spaced(len(measured.layouts), _MOST_ROWS))
        self._costs, self.measured, self.base = costs, measured, base
        self._prices = np.empty(0) if base else _prices(costs.terms(measured.layouts), measured.logs)
        self._scale: tuple[Array, Array] = base._scale if base else _standard(costs.tracks(measured.layouts))
        expected = self._expected(measured.layouts)
        self._centre = float(expected.mean.mean())
        self._rows = self._placed(measured.layouts, expected)
        residual = measured.logs - expected.mean
        kernels = _kernels(self._rows, self._rows)
        self.weights = weights or _learned(kernels, self._unseen(residual), measured.noise)
        # `fit` takes variances as shares of that of its targets.
        share = 1 / max(float(residual.var()), _LEAST)
        noise = self.weights.noise * share
        self._process: Process = fit(self.weights.sum(kernels) * share, residual, measured.noise**2, noise)

    def moved(self, measured: Measured) -> HardwareModel:
        """A model of the same figure on another device, which starts from this one."""
        return HardwareModel(self._costs, measured, self)

    def predict(self, layouts: Sequence[Layout]) -> Estimate:
        """Of `layouts`, with standard deviations no less than what the model was off by where it could be checked."""
        found = self._raw(layouts)
        return Estimate(found.mean, found.sd * self._doubt)

    def checked(self) -> Estimate:
        """As `left_out`, with the standard deviations that `predict` would give."""
        found = self.left_out()
        return Estimate(found.mean, found.sd * self._doubt)

    @cached_property
    def _doubt(self) -> float:
        """Root mean square of what layouts left out were off by, in standard deviations; at least 1."""
        if len(self.measured.layouts) <= MIN_POINTS:
            return 1.0
        found = self.left_out()
        known = np.hypot(found.sd, self.measured.noise)
        return max(1.0, float(np.sqrt((((found.mean - self.measured.logs) / known) ** 2).mean())))

    def _raw(self, layouts: Sequence[Layout]) -> Estimate:
        expected = self._expected(layouts)
        rows = self._placed(layouts, expected)
        between = self.weights.sum(_kernels(rows, self._rows))
        own = self.weights.sum(_own_kernels(rows))
        share = self._process.scale**2
        mean, sd = self._process.predict(between / share, own / share)
        away = self._process.offset + self._process.scale * mean
        return Estimate(expected.mean + away, np.hypot(expected.sd, self._process.scale * sd))

    def left_out(self, folds: int = _FOLDS) -> Estimate:
        """What is predicted of each measured layout without it; kernels' weights stay.

        Args:
            folds: parts of which one at a time is left out; each layout by itself where there are no more than these.
        """
        count = len(self.measured.layouts)
        mean, sd = np.empty((2, count))
        for fold in range(min(folds, count)):
            out = list(range(fold, count, folds))
            rest = self.measured.of([row for row in range(count) if row % folds != fold])
            model = HardwareModel(self._costs, rest, self.base, self.weights)
            found = model._raw([self.measured.layouts[row] for row in out])
            mean[out], sd[out] = found.mean, found.sd
        return Estimate(mean, sd)

    def _unseen(self, residual: Array) -> Array:
        """[N] residuals of costs that were fitted without the layout: those of all are too small to learn from."""
        if self.base is not None:
            return residual
        terms, logs = self._costs.terms(self.measured.layouts), self.measured.logs
        away = np.empty(len(logs))
        for row in range(len(logs)):
            rest = np.arange(len(logs)) != row
            away[row] = logs[row] - np.log(max(float(terms[row] @ _prices(terms[rest], logs[rest])), 1e-12))
        return away

    def _expected(self, layouts: Sequence[Layout]) -> Estimate:
        if self.base is not None:
            return self.base.predict(layouts)
        sums = self._costs.terms(layouts) @ self._prices
        return Estimate(np.log(np.maximum(sums, 1e-12)), np.zeros(len(layouts)))

    def _placed(self, layouts: Sequence[Layout], expected: Estimate) -> Array:
        """[L, 1 + T]: how far above the middle a layout is expected, and its amounts, centred and scaled."""
        centre, scale = self._scale
        tracks = (self._costs.tracks(layouts) - centre) / scale
        return np.column_stack([expected.mean - self._centre, tracks])


def _prices(terms: Array, logs: Array) -> Array:
    """[T] non-negative costs of each amount, which make the sum of squared relative errors least."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    size = np.maximum(terms.mean(axis=0), 1e-12)
    relative = terms / size / np.exp(logs)[:, None] * float(np.exp(logs.mean()))
    ridge = np.sqrt(_RIDGE * len(logs)) * np.eye(len(size))
    found, _ = nnls(np.vstack([relative, ridge]), np.append(np.ones(len(logs)), np.zeros(len(size))))
    return np.asarray(found / size * float(np.exp(logs.mean())))


def _learned(kernels: Array, residual: Array, noise: Array) -> Weights:
    """Variances of the kernels and of the noise, in squared log units."""
    if len(residual) < _TUNE_POINTS:
        return Weights(_ASSUMED, _ASSUMED_NOISE)
    rows = _spaced(len(residual), _TUNE_ROWS)
    found = tune(kernels[:, rows][:, :, rows], residual[rows], noise[rows] ** 2)
    variance = max(float(residual[rows].var()), _LEAST)
    return Weights(found.kernels * variance, found.noise * variance)


def _standard(tracks: Array) -> tuple[Array, Array]:
    """Centre and scale of each amount, such that the mean layout is one from the centre; infinite without spread."""
    spread = tracks.std(axis=0)
    varies = spread > 1e-9
    return tracks.mean(axis=0), np.where(varies, spread, np.inf) * np.sqrt(max(1, int(varies.sum())))


def _kernels(a: Array, b: Array) -> Array:
    """[5, A, B]: a constant, linear in what is expected, linear in the amounts, and two smooth in the amounts."""
    amounts, others = a[:, 1:], b[:, 1:]
    squared = ((amounts[:, None] - others[None]) ** 2).sum(axis=2)
    smooth = [np.exp(-squared / (2 * length**2)) for length in _LENGTHS]
    return np.array([np.ones((len(a), len(b))), np.outer(a[:, 0], b[:, 0]), amounts @ others.T, *smooth])


def _own_kernels(a: Array) -> Array:
    """[5, A] of each row with itself."""
    ones = np.ones(len(a))
    return np.array([ones, a[:, 0] ** 2, (a[:, 1:] ** 2).sum(axis=1), ones, ones])


def _spaced(count: int, most: int) -> list[int]:
    """At most `most` of `count` rows, evenly spaced."""
    return [index * count // most for index in range(most)] if count > most else list(range(count))


def better(one: HardwareModel, other: HardwareModel) -> HardwareModel:
    """The model that is off by less where each measured layout is left out; the first of equals."""
    return min(one, other, key=lambda model: float(np.square(model.left_out().mean - model.measured.logs).mean()))
