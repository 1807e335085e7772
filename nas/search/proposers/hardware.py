"""Hardware models: predict a device's figures of a layout from its measurements of other layouts.

A figure (a time, a size) is a sum of costs of the parts of a layout, times their interactions:

    log figure(x) = log sum_j c_j a_j(x) + residual(x),    c_j >= 0

The amounts a_j are arithmetic (`Costs`); the costs c_j are fitted by non-negative least squares on relative errors; the
residual is a Gaussian process over the amounts of each kind of block. On another device, or on the same one with other
threads, the forecast of an existing model takes the place of the sum. A few measurements then suffice to learn by how
much the device is faster, whether differences are larger there, and on which kinds of blocks (a linear multi-task
model: Bonilla, Chai and Williams 2008, with one task known through its forecast).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from nas.core.block import BLOCKS
from nas.core.layout import Layer, Layout
from nas.core.stats import Z95
from nas.core.workload import Workload
from nas.search.proposers.gp import Array, Process, Weights, fit, tune

TERMS = ("once", "layers", "table", "held", "cache", "state", "read", "prompt", "decode", "widest")
"""Of a whole layout: 1; layers; weights of the embedding; all weights of blocks; bytes of cache; bytes of state;
weights that a token passes through; work on cached tokens, without weights, while the prompt is read and while tokens
are decoded; and the greatest number of weights per input of one block, which determines buffers."""
_SUMMED = slice(3, -1)
"""Those that are sums over blocks."""
_CACHE = 1
"""Index of bytes of cache among the sums."""
_NOT_OF = {"MB": ("read", "prompt", "decode"), "ms": ("widest",)}
"""Unit of a figure -> terms that it does not depend on: memory on no work, time on no buffers."""
_KIND_TERMS = ("layers", "read", "held", "decode", "cache", "state")
"""Terms of each kind of block by itself."""
_SPILL = (1e6, 2e6, 4e6)
"""Bytes of cache of one layer above which reading it may cost more."""
MIN_POINTS = 3
"""Measurements below which there is no model."""
TRUSTED = 8
"""Measurements from which a device's model is used; `MIN_POINTS` where it starts from the model of another device."""
_MOST_KEPT = 20_000
"""Layouts whose values are cached at most."""
_TUNE_POINTS = 12
"""Measurements from which the kernels' weights are learned; with fewer, `_ASSUMED` are used."""
_TUNE_ROWS = 96
"""Measurements that weights are learned from at most."""
_MOST_ROWS = 256
"""Measurements that a model is fitted to at most."""
_ASSUMED = np.array([1.0, 0.3, 0.1, 0.03, 0.03]) ** 2
_ASSUMED_NOISE = 0.03**2
"""Prior variances of log figures: of a common factor, of a factor on differences, of single kinds of blocks, of two
smooth functions of the amounts; and of noise. So devices differ in speed by any factor, in differences by a third, and
in a kind of block by a tenth."""
_LENGTHS = (1.0, 3.0)
"""Length scales of the smooth kernels, in typical distances of a measured layout from their mean."""
_FOLDS = 30
_NNLS_STEPS = 30
"""Steps of the fit of costs at most, for each of them."""
_LEAST = 1e-9
"""Least variance of log figures, to divide by."""
_LEAST_SPREAD = 0.05
"""Least scale of an amount, as a share of its mean: layouts may be thousands of spreads away from measured ones that
differ in it by one kernel alone."""
_RIDGE = 1e-3
"""Keeps the fit of costs unique where measured layouts do not determine them."""


class Costs:
    """Layouts as amounts of work and memory under one workload.

    Args:
        workload: gives the number of tokens and the length of the cache.
        kinds: of blocks that are distinguished; others count with the whole only.
        unit: of the figure, which determines its terms.
        quantisations: that layouts choose from; a weight of each after the first may cost more than one of the first.
        vectors: whether layouts choose the width of token vectors, which an index is proportional to.
        towers: whether they choose what reads images or sound.
    """

    def __init__(
        self,
        workload: Workload,
        kinds: Sequence[str],
        unit: str = "",
        quantisations: Sequence[str] = (),
        vectors: bool = False,
        towers: bool = False,
    ) -> None:
        self._workload, self._kinds = workload, tuple(dict.fromkeys(kinds))
        self._arguments = [(kind, arg.name) for kind in self._kinds for arg in BLOCKS[kind].args]
        self._kind_columns = len(self._kinds) * len(_KIND_TERMS)
        of_kinds = range(len(TERMS[_SUMMED]), len(TERMS[_SUMMED]) + self._kind_columns, len(_KIND_TERMS))
        self._held = [0, *(first + _KIND_TERMS.index("held") for first in of_kinds)]
        self._used, self._unit, self._quantisations = _used(unit), unit, tuple(quantisations)
        self._vectors, self._towers = vectors, towers
        self._counts: dict[str, Array] = {}
        self._layer = lru_cache(maxsize=1 << 14)(self._count_layer)

    def of(self, unit: str) -> Costs:
        """Returns the amounts for a figure of another unit; what was counted serves both."""
        other = copy(self)
        other._used, other._unit = _used(unit), unit
        return other

    def terms(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, N] amounts of the terms that the figure may depend on, then of the weights by quantisation."""
        return np.hstack([self._amounts(layouts)[:, self._used], self._weights(layouts), self._widths(layouts)])

    def tracks(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, T] amounts of each kind of block, the sums of its arguments, and marks of the quantisation."""
        tracks = self._amounts(layouts)[:, len(TERMS) : len(TERMS) + self._kind_columns + len(self._arguments)]
        return np.hstack([tracks, self._marks(layouts), self._widths(layouts)])

    def sums(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, S] amounts of which a figure may be a sum: terms, those of each kind of block, and excesses."""
        amounts, after = self._amounts(layouts), len(TERMS) + self._kind_columns
        excesses = amounts[:, after + len(self._arguments) :]
        weights = self._weights(layouts)
        widths = self._widths(layouts)
        return np.hstack([amounts[:, self._used], amounts[:, len(TERMS) : after], excesses, weights, widths])

    def _widths(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, 1] widths of token vectors, or [L, 4] amounts of towers, or [L, 0] where they are all alike."""
        rows = [[layout.vectors] * self._vectors + self._tower(layout) for layout in layouts]
        return np.array(rows, float).reshape(len(layouts), -1)

    def _tower(self, layout: Layout) -> list[float]:
        """Returns work of the tower, that of the language model on its tokens, these, weights; [] where unchosen."""
        if not self._towers or layout.tower is None:
            return []
        workload, tower = self._workload, layout.tower
        tokens, work = workload.tower_tokens(tower), workload.tower_flops(tower, layout.d_model)
        return [work, 2.0 * tokens * layout.params.active, tokens, tower.weights(layout.d_model)]

    def _marks(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, Q] marks of the quantisations after the first."""
        marks = [[layout.quantisation == name for name in self._quantisations[1:]] for layout in layouts]
        return np.array(marks, float).reshape(len(layouts), -1)

    def _weights(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, Q] weights that are held, for a figure in MB, or read, where they are in each quantisation."""
        places = [TERMS.index("table"), TERMS.index("held" if self._unit == "MB" else "read")]
        weights: Array = self._amounts(layouts)[:, places].sum(axis=1, keepdims=True)
        return weights * self._marks(layouts)

    def _amounts(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, A] amounts of everything: `TERMS`, those of `tracks`, and excesses."""
        if len(self._counts) >= _MOST_KEPT:
            self._counts.clear()
        for layout in layouts:
            if layout.id not in self._counts:
                self._counts[layout.id] = self._count(layout)
        return np.array([self._counts[layout.id] for layout in layouts])

    def _count(self, layout: Layout) -> Array:
        layers = np.array([self._layer(layout.layer_at(index), layout.d_model) for index in range(layout.depth)])
        layers[np.ix_([layer.share is not None for layer in layout.layers], self._held)] = 0.0
        work, cache, widest = layers[:, :-2].sum(axis=0), layers[:, _CACHE], layers[:, -2:].max(axis=0)
        fixed = [1.0, layout.depth, layout.d_model * layout.vocab]
        summed, spilled = len(TERMS[_SUMMED]), [cache @ (cache > limit) for limit in _SPILL]
        return np.concatenate([fixed, work[:summed], [widest.max()], work[summed:], [layout.d_model], widest, spilled])

    def _count_layer(self, layer: Layer, d_model: int) -> Array:
        """Returns `TERMS[_SUMMED]`, `tracks`, and the most weights per input of a mixer and of a feed-forward."""
        workload = self._workload
        by_kind = {kind: np.zeros(len(_KIND_TERMS)) for kind in self._kinds}
        arguments = dict.fromkeys(self._arguments, 0.0)
        work, widest = np.zeros(len(TERMS[_SUMMED])), {"mixer": 0.0, "ffn": 0.0}
        for block in layer.blocks:
            spec, count = block.spec, block.spec.count(block, d_model)
            prompt, decode = (
                spec.flops(block, d_model, context) - 2.0 * count.active
                for context in (workload.prompt // 2, workload.prompt + workload.gen // 2)
            )
            cache = spec.kv_bytes(block, d_model, workload.window, 2.0)
            state = spec.state_bytes(block, d_model)
            work += np.array([count.total, cache, state, count.active, prompt, decode])
            widest[spec.role] = max(widest[spec.role], count.active / d_model)
            if block.kind in by_kind:
                by_kind[block.kind] += np.array([1.0, count.active, count.total, decode, cache, state])
                resolved = block.resolve(d_model)
                for arg in spec.args:
                    arguments[block.kind, arg.name] += float(resolved.get(arg.name) or 0)
        return np.concatenate([work, *by_kind.values(), [*arguments.values(), *widest.values()]])


def _used(unit: str) -> list[int]:
    """Returns the columns of `TERMS` that a figure of `unit` may depend on."""
    return [index for index, term in enumerate(TERMS) if term not in _NOT_OF.get(unit, ())]


@dataclass(frozen=True)
class Estimate:
    """Means and standard deviations [L] of the logarithms of figures."""

    mean: Array
    sd: Array


@dataclass(frozen=True)
class Measured:
    """Measurements that a model is fitted to.

    Args:
        layouts: each once.
        logs: [N] logarithms of their figures.
        noise: [N] standard deviations of these, as far as known.
    """

    layouts: Sequence[Layout]
    logs: Array
    noise: Array

    def of(self, rows: Sequence[int]) -> Measured:
        """Returns the given rows."""
        return Measured([self.layouts[row] for row in rows], self.logs[rows], self.noise[rows])


class HardwareModel:
    """A model of one figure under one workload on one device and runtime.

    Args:
        costs: of the workload.
        measured: at least `MIN_POINTS`; of more than a few hundred, evenly spaced ones are taken.
        base: model of the same figure on another device, which this one starts from.
        weights: of an earlier fit; learned where they are left out.
    """

    def __init__(
        self, costs: Costs, measured: Measured, base: HardwareModel | None = None, weights: Weights | None = None
    ) -> None:
        assert len(measured.layouts) >= MIN_POINTS, f"{len(measured.layouts)} measurements"
        if len(measured.layouts) > _MOST_ROWS:
            measured = measured.of(_spaced(len(measured.layouts), _MOST_ROWS))
        self._costs, self.measured, self.base = costs, measured, base
        self._prices = np.empty(0) if base else prices(costs.terms(measured.layouts), measured.logs)
        self._scale: tuple[Array, Array] = base._scale if base else _standard(costs.tracks(measured.layouts))
        expected = self._expected(measured.layouts)
        self._centre = float(expected.mean.mean())
        self._rows = self._placed(measured.layouts, expected)
        residual = measured.logs - expected.mean
        kernels = _kernels(self._rows, self._rows)
        self.weights = weights or _learned(kernels, self._unseen(residual), measured.noise)
        # `fit` takes variances as shares of that of its targets.
        share = 1 / max(float(residual.var()), _LEAST)
        noise, standard = self.weights.noise * share, (float(residual.mean()), share**-0.5)
        self._process: Process = fit(self.weights.sum(kernels) * share, residual, measured.noise**2, noise, standard)

    def moved(self, measured: Measured) -> HardwareModel:
        """Returns a model of the same figure on another device, which starts from this one."""
        return HardwareModel(self._costs, measured, self)

    def predict(self, layouts: Sequence[Layout]) -> Estimate:
        """Returns estimates of `layouts`, whose standard deviations are widened by the errors of cross-validation."""
        raw = self._raw(layouts)
        return Estimate(raw.mean, raw.sd * self._doubt)

    def checked(self) -> Estimate:
        """Returns `left_out` with the standard deviations that `predict` would give."""
        raw = self.left_out()
        return Estimate(raw.mean, raw.sd * self._doubt)

    @cached_property
    def _doubt(self) -> float:
        """Factor by which standard deviations are widened so that 95 % intervals held in cross-validation; at least 1.

        The quantile is that of conformal prediction (Vovk, Gammerman and Shafer 2005): of N errors in ascending order
        number ceil(0.95 (N + 1)), the last one where there are fewer than 20.
        """
        count = len(self.measured.layouts)
        if count <= MIN_POINTS:
            return 1.0
        raw = self.left_out()
        errors = np.sort(np.abs(raw.mean - self.measured.logs) / np.hypot(raw.sd, self.measured.noise))
        return max(1.0, float(errors[min(count, math.ceil(0.95 * (count + 1))) - 1]) / Z95)

    def _raw(self, layouts: Sequence[Layout]) -> Estimate:
        expected = self._expected(layouts)
        rows = self._placed(layouts, expected)
        between = self.weights.sum(_kernels(rows, self._rows))
        ones = np.ones(len(rows))
        kernels = np.array(
            [ones, rows[:, 0] ** 2, (rows[:, 1:] ** 2).sum(axis=1), ones, ones]
        )  # of rows with themselves
        variances = self.weights.sum(kernels)
        share = self._process.scale**2
        mean, sd = self._process.predict(between / share, variances / share)
        away = self._process.offset + self._process.scale * mean
        return Estimate(expected.mean + away, np.hypot(expected.sd, self._process.scale * sd))

    def left_out(self, folds: int = _FOLDS) -> Estimate:
        """Returns the estimate of each measured layout without its own measurement; kernels' weights are kept.

        Args:
            folds: of the cross-validation; it leaves out single layouts where there are no more than these.
        """
        count = len(self.measured.layouts)
        mean, sd = np.empty((2, count))
        for fold in range(min(folds, count)):
            out = list(range(fold, count, folds))
            rest = self.measured.of([row for row in range(count) if row % folds != fold])
            model = HardwareModel(self._costs, rest, self.base, self.weights)
            raw = model._raw([self.measured.layouts[row] for row in out])
            mean[out], sd[out] = raw.mean, raw.sd
        return Estimate(mean, sd)

    def _unseen(self, residual: Array) -> Array:
        """Returns [N] residuals of costs fitted without the layout: those of a fit with it are too small."""
        if self.base is not None:
            return residual
        terms, logs = self._costs.terms(self.measured.layouts), self.measured.logs
        away = np.empty(len(logs))
        for row in range(len(logs)):
            rest = np.arange(len(logs)) != row
            away[row] = logs[row] - np.log(max(float(terms[row] @ prices(terms[rest], logs[rest])), 1e-12))
        return away

    def _expected(self, layouts: Sequence[Layout]) -> Estimate:
        if self.base is not None:
            return self.base.predict(layouts)
        sums = self._costs.terms(layouts) @ self._prices
        return Estimate(np.log(np.maximum(sums, 1e-12)), np.zeros(len(layouts)))

    def _placed(self, layouts: Sequence[Layout], expected: Estimate) -> Array:
        """Returns [L, 1 + T]: the expected log figure and the amounts of each layout, centred and scaled."""
        centre, scale = self._scale
        tracks = (self._costs.tracks(layouts) - centre) / scale
        return np.column_stack([expected.mean - self._centre, tracks])


def prices(terms: Array, logs: Array) -> Array:
    """Returns [T] non-negative costs of each amount, which minimise the sum of squared relative errors."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    size = np.maximum(terms.mean(axis=0), 1e-12)
    relative = terms / size / np.exp(logs)[:, None] * float(np.exp(logs.mean()))
    ridge = np.sqrt(_RIDGE * len(logs)) * np.eye(len(size))
    ones = np.append(np.ones(len(logs)), np.zeros(len(size)))
    scaled, _ = nnls(np.vstack([relative, ridge]), ones, maxiter=_NNLS_STEPS * len(size))
    return np.asarray(scaled / size * float(np.exp(logs.mean())))


def _learned(kernels: Array, residual: Array, noise: Array) -> Weights:
    """Returns variances of the kernels and of the noise, in squared log units."""
    if len(residual) < _TUNE_POINTS:
        return Weights(_ASSUMED, _ASSUMED_NOISE)
    rows = _spaced(len(residual), _TUNE_ROWS)
    tuned = tune(kernels[:, rows][:, :, rows], residual[rows], noise[rows] ** 2)
    variance = max(float(residual[rows].var()), _LEAST)
    return Weights(tuned.kernels * variance, tuned.noise * variance)


def _standard(tracks: Array) -> tuple[Array, Array]:
    """Returns centre and scale of each amount, for typical distances of 1; the scale is infinite without spread."""
    spread, centre = tracks.std(axis=0), tracks.mean(axis=0)
    varies = spread > 1e-9
    scale = np.where(varies, np.maximum(spread, _LEAST_SPREAD * centre), np.inf)
    return centre, scale * np.sqrt(max(1, int(varies.sum())))


def _kernels(a: Array, b: Array) -> Array:
    """Returns [5, A, B]: constant, linear in the expected figure, linear in the amounts, two smooth in the amounts."""
    amounts, others = a[:, 1:], b[:, 1:]
    squared = ((amounts[:, None] - others[None]) ** 2).sum(axis=2)
    smooth = [np.exp(-squared / (2 * length**2)) for length in _LENGTHS]
    return np.array([np.ones((len(a), len(b))), np.outer(a[:, 0], b[:, 0]), amounts @ others.T, *smooth])


def _spaced(count: int, most: int) -> list[int]:
    """Returns at most `most` of `count` rows, evenly spaced."""
    return [index * count // most for index in range(most)] if count > most else list(range(count))


def better(one: HardwareModel, other: HardwareModel) -> HardwareModel:
    """Returns the model with the lesser error of cross-validation; the first of equals."""
    return min(one, other, key=lambda model: float(np.square(model.left_out().mean - model.measured.logs).mean()))
