"""Predictions of what a layout would measure, with their uncertainty, from what others measured.

Each target (a coordinate, or a budget's log ratio) is a Gaussian process of its own over the kernels of `Kernels`. How
much each kernel counts is learned, so that device figures come out nearly linear in sizes, while quality may depend on
heights, on neighbours, or on neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nas.core.layout import Layout
from nas.search.api import Observation
from nas.search.gp import Array, Process, Weights, fit, tune
from nas.search.kernels import Kernels

MIN_POINTS = 4
"""Values below which a target has their mean and a wide interval instead of a model."""
_PRIOR_SD = 0.3
_RUNG_NOISE = 0.1
"""Variance that a quality figure has more per rung below the top, as a share of that of all figures."""

Tuned = dict[str, Weights]
"""Target -> hyperparameters."""


@dataclass(frozen=True)
class Forecast:
    """[N, T] means and standard deviations, one column a target."""

    mean: Array
    sd: Array


@dataclass(frozen=True)
class Target:
    """What one process learns from.

    Args:
        name: of the objective or the budget, which may be the same.
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
        """Whether there is enough to learn from."""
        return len(self.known) >= MIN_POINTS and float(self.values.std()) > 1e-9


class Surrogate:
    """Models of all targets.

    Args:
        kernels: of the space.
        observations: what has been told; values that one lacks are missing, not bad.
        worst: reference point: objective -> coordinate, which is expected of an objective without a value.
        by_rung: objectives that depend on the rung they were taken at.
        top: index of the top rung, which is what is predicted.
        tuned: hyperparameters of an earlier surrogate; targets that it lacks are tuned here.
        prior: of other studies, which share everything with this one's but an offset.
        pending: layouts that are taken to have shown what is expected of them, so that near them less is uncertain.
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
        """Forecasts of the objectives and of the constraints, at the top rung."""
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
        """Too few values to learn from: their mean, or what is assumed, and a wide interval."""
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
        """`process` after what it expects of pending layouts has come true (kriging believer)."""
        rows = target.known + self._pending
        between = covariance[np.ix_(self._pending, target.known)]
        believed = process.offset + process.scale * (between @ process.solved)
        values, noises = np.append(target.values, believed), np.append(target.noise, np.zeros(len(believed)))
        return fit(covariance[np.ix_(rows, rows)], values, noises, noise, (process.offset, process.scale))

    def _fitted(self) -> list[Process | None]:
        """A process a target; one that differs from another by offset and scale alone shares its work."""
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
