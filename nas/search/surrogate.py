"""Predicts the figures of a layout, with their uncertainty, from those of other layouts.

Each target (a coordinate, or a budget's log ratio) has its own Gaussian process over the kernels of `Kernels`. The
kernels' weights are learned, so that device figures come out nearly linear in sizes, while quality may depend on
heights, on neighbours, or on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nas.core.layout import Layout
from nas.search.api import Observation
from nas.search.features import GROUPS, Features
from nas.search.gp import Array, Process, Weights, fit, tune
from nas.search.sampling import Sampler

_CROWD = 64
MIN_POINTS = 4
"""Values below which a target is predicted by their mean and a wide interval, without a model."""
_PRIOR_SD = 0.3
_RUNG_NOISE = 0.1
"""Additional variance of quality per rung below the top, as a share of that of all figures."""


class Kernels:
    """The kernels of one space.

    Columns are scaled by the spread of random layouts of the space, so that kernels do not depend on observations.
    After the features there is a column per distance of a figure's rung from the top: all 0 to predict.

    Args:
        features: of the space.
        sampler: of the space.
        rungs: number of these columns.
    """

    def __init__(self, features: Features, sampler: Sampler, rungs: int) -> None:
        rng = np.random.default_rng(0)
        crowd = features.matrix([sampler.draw(rng) for _ in range(_CROWD)])
        spread = crowd.std(axis=0)
        self._features, self._rungs = features, rungs
        self._centre = crowd.mean(axis=0)
        self._scale = np.where(spread > 1e-9, spread, 1.0)
        columns = {group: features.groups == index for index, group in enumerate(GROUPS)}
        self._columns = {group: mask for group, mask in columns.items() if mask.any()}

    def rows(self, layouts: list[Layout], below: Array | None = None) -> Array:
        """Returns [L, F + rungs] scaled features; `below` [L] is the number of rungs below the top of each figure."""
        scaled = (self._features.matrix(layouts) - self._centre) / self._scale
        levels = np.zeros((len(layouts), self._rungs))
        if below is not None:
            for level in range(1, self._rungs + 1):
                levels[below == level, level - 1] = 1.0
        return np.hstack([scaled, levels])

    def between(self, a: Array, b: Array) -> Array:
        """Returns [G, A, B] kernels of [A, F] and [B, F] rows."""
        size = len(self._centre)
        parts = [np.ones((len(a), len(b))), a[:, size:] @ b[:, size:].T]
        squared = {}
        for group, columns in self._columns.items():
            left, right = a[:, :size][:, columns], b[:, :size][:, columns]
            dots = left @ right.T
            parts.append(dots / columns.sum())
            squared[group] = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * dots
        for groups, length, form in _NONLINEAR:
            columns_in = sum(self._columns[group].sum() for group in groups)
            mean = sum((squared[group] for group in groups), np.zeros(parts[0].shape)) / columns_in
            parts.append(form(np.sqrt(np.maximum(mean, 0.0)) / length))
        return np.array(parts)

    def own(self, a: Array) -> Array:
        """Returns [G, A] kernels of each row with itself."""
        size = len(self._centre)
        parts = [np.ones(len(a)), (a[:, size:] ** 2).sum(axis=1)]
        parts += [(a[:, :size][:, columns] ** 2).mean(axis=1) for columns in self._columns.values()]
        return np.array(parts + [np.ones(len(a))] * len(_NONLINEAR))


def _matern(distance: Array) -> Array:
    """Returns the Matern covariance with smoothness 5/2 (Rasmussen and Williams 2006, eq. 4.17).

    Args:
        distance: in length scales.
    """
    scaled = np.sqrt(5) * distance
    return np.asarray((1 + scaled + scaled**2 / 3) * np.exp(-scaled))


def _exponential(distance: Array) -> Array:
    """Returns the Matern covariance with smoothness 1/2 (ibid., eq. 4.18)."""
    return np.asarray(np.exp(-distance))


_STRUCTURE = ("sizes", "heights", "neighbours")
_NONLINEAR: tuple[tuple[tuple[str, ...], float, Callable[[Array], Array]], ...] = (
    (("sizes",), 2.0, _matern),
    (_STRUCTURE, 1.0, _exponential),
    (_STRUCTURE, 2.0, _matern),
)
"""Groups, length scale in root mean square standard deviations of a random layout, and form: most effects are smooth,
and yet layouts that are nearly alike may differ abruptly."""


Tuned = dict[str, Weights]
"""Target -> hyperparameters."""


@dataclass(frozen=True)
class Forecast:
    """[N, T] means and standard deviations, one column a target."""

    mean: Array
    sd: Array


@dataclass(frozen=True)
class Target:
    """The data of one process.

    Args:
        name: of the objective or the constraint.
        known: rows of the observations that have it.
        values: [K] of these.
        noise: [K] known variances.
        by_rung: whether it depends on the rung it was taken at.
    """

    name: str
    known: list[int]
    values: Array
    noise: Array
    by_rung: bool

    @property
    def learnable(self) -> bool:
        """Whether there are enough values for a model."""
        return len(self.known) >= MIN_POINTS and float(self.values.std()) > 1e-9


class Surrogate:
    """Models of all targets.

    Args:
        kernels: of the space.
        observations: of this study; missing values are ignored.
        worst: reference point: objective -> coordinate, predicted of an objective without any value.
        by_rung: objectives that depend on the rung they were taken at.
        top: index of the top rung, for which quality is predicted.
        tuned: hyperparameters of an earlier surrogate; targets that it lacks are tuned here.
        prior: observations of other studies, which differ from this one's by an offset.
        pending: layouts that count as if they had reached their prediction, so that near them less is uncertain.
    """

    def __init__(
        self,
        kernels: Kernels,
        observations: Sequence[Observation],
        worst: Mapping[str, float],
        by_rung: frozenset[str],
        top: int,
        tuned: Tuned | None = None,
        prior: Sequence[Observation] = (),
        pending: Sequence[Layout] = (),
    ) -> None:
        self.objectives = tuple(worst)
        self._worst = tuple(worst.values())
        self.constraints = tuple(sorted({name for seen in observations for name in seen.constraints}))
        self._kernels = kernels
        own = [0 if seen.rung is None else top - seen.rung for seen in observations]
        below, elsewhere = np.array([*own, *(top + 1 for _ in prior)]), np.arange(len(own) + len(prior)) >= len(own)
        known = [*observations, *prior]
        layouts = [seen.layout for seen in known]
        believed = kernels.rows(list(pending))
        self._plain = np.vstack([kernels.rows(layouts, below * elsewhere), believed])
        self._staged = np.vstack([kernels.rows(layouts, below), believed])
        self._has_rungs = bool((below > 0).any())
        self._pending = [*range(len(known), len(self._plain))]
        self._targets = _targets(known, self.objectives, self.constraints, by_rung, np.where(elsewhere, 1, below))
        self._grams: dict[bool, Array] = {}
        self.tuned: Tuned = dict(tuned or {})
        self._models = self._fitted()

    def predict(self, layouts: Sequence[Layout]) -> tuple[Forecast, Forecast]:
        """Returns forecasts of the objectives and of the constraints, at the top rung."""
        rows = self._kernels.rows(list(layouts))
        own = self._kernels.own(rows)
        cross = self._kernels.between(rows, self._plain)  # at the top rung, the rungs of others make no difference
        mean, sd = np.empty((2, len(rows), len(self._targets)))
        done: dict[int, tuple[Array, Array]] = {}
        for column, (target, model) in enumerate(zip(self._targets, self._models, strict=True)):
            if model is None:
                mean[:, column], sd[:, column] = self._prior(column, target.values)
            else:
                if id(model.solved) not in done:  # twins share it
                    weights = self.tuned[target.name]
                    between = weights.sum(cross)[:, target.known + self._pending]
                    done[id(model.solved)] = model.predict(between, weights.sum(own))
                centre, spread = done[id(model.solved)]
                mean[:, column], sd[:, column] = model.offset + model.scale * centre, model.scale * spread
        count = len(self.objectives)
        return Forecast(mean[:, :count], sd[:, :count]), Forecast(mean[:, count:], sd[:, count:])

    def _prior(self, column: int, values: Array) -> tuple[float, float]:
        """Returns the mean of too few values, or the assumed one, with a wide standard deviation."""
        if len(values):
            return float(values.mean()), max(_PRIOR_SD, float(values.std()))
        return (self._worst[column] if column < len(self._worst) else 0.0), _PRIOR_SD

    def _gram(self, staged: bool) -> Array:
        if staged not in self._grams:
            rows = self._staged if staged else self._plain
            self._grams[staged] = self._kernels.between(rows, rows)
        return self._grams[staged]

    def _fit(self, target: Target) -> Process:
        gram, known = self._gram(target.by_rung and self._has_rungs), np.array(target.known)
        if target.name not in self.tuned:
            own = gram[:, known[:, None], known]
            self.tuned[target.name] = tune(own, target.values, target.noise)
        weights = self.tuned[target.name]
        covariance = weights.sum(gram)
        process = fit(covariance[np.ix_(known, known)], target.values, target.noise, weights.noise)
        return self._believing(process, target, covariance, weights.noise) if self._pending else process

    def _believing(self, process: Process, target: Target, covariance: Array, noise: float) -> Process:
        """Returns `process` fitted to its own predictions of pending layouts as well (kriging believer)."""
        rows = target.known + self._pending
        between = covariance[np.ix_(self._pending, target.known)]
        believed = process.offset + process.scale * (between @ process.solved)
        values, noises = np.append(target.values, believed), np.append(target.noise, np.zeros(len(believed)))
        return fit(covariance[np.ix_(rows, rows)], values, noises, noise, (process.offset, process.scale))

    def _fitted(self) -> list[Process | None]:
        """Returns one process per target; targets that differ by offset and scale alone share a fit."""
        done: dict[tuple[object, ...], tuple[Process, str]] = {}
        models: list[Process | None] = []
        for target in self._targets:
            if not target.learnable:
                models.append(None)
                continue
            offset, scale = float(target.values.mean()), float(target.values.std())
            shape = np.round((target.values - offset) / scale, 9).tobytes(), (target.noise / scale**2).tobytes()
            key = (target.by_rung, tuple(target.known), *shape)
            if key not in done:
                done[key] = self._fit(target), target.name
            process, twin = done[key]
            self.tuned[target.name] = self.tuned[twin]
            models.append(replace(process, offset=offset, scale=scale))
        return models


def _targets(
    observations: Sequence[Observation],
    objectives: Sequence[str],
    constraints: Sequence[str],
    by_rung: frozenset[str],
    below: Array,
) -> list[Target]:
    found = []
    for name in objectives:
        values = [seen.objectives.get(name) for seen in observations]
        found.append(_target(f"objective {name}", values, _noise(observations, name), below, name in by_rung))
    for name in constraints:
        values = [seen.constraints.get(name) for seen in observations]
        found.append(_target(f"constraint {name}", values, _noise(observations, name), below, False))
    return found


def _noise(observations: Sequence[Observation], name: str) -> list[float]:
    return [seen.noise.get(name, 0.0) ** 2 for seen in observations]


def _target(name: str, values: Sequence[float | None], noise: list[float], below: Array, by_rung: bool) -> Target:
    known = [index for index, value in enumerate(values) if value is not None]
    figures = np.array([value for value in values if value is not None], dtype=np.float64)
    variances = np.array(noise, dtype=np.float64)[known]
    if by_rung and len(figures):
        variances = variances + _RUNG_NOISE * float(figures.var()) * below[known]
    return Target(name, known, figures, variances, by_rung)
