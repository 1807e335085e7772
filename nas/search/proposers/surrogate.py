"""Predicts the figures of a layout, with their uncertainty, from those of other layouts.

Each target (a coordinate, or a budget's log ratio) has its own Gaussian process over the kernels of `Kernels`. The
kernels' weights are learned, so that device figures come out nearly linear in sizes, while quality may depend on
heights, on neighbours, or on neither.

- Figures of devices start from sums of the costs of their layers, where these predict most of them.
- Quality is averaged over three processes: the one above, one that is linear in all features, and one with further
  kernels of a layout as a string. Their shares maximise the leave-one-out density ("stacking"; Yao et al. 2018,
  eq. 4).
- An objective is modelled part by part where observations tell its parts, such as the units of quality: each has a
  process and a noise of its own, and means and variances add up.
- Standard deviations are widened where errors on left-out observations are larger than they say.

An observation is left out together with its nearest neighbours, since candidates are further from what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.search.proposers.api import Observation
from nas.search.proposers.features import GROUPS, STRING_GROUPS, Features
from nas.search.proposers.gp import Array, Process, Weights, fit, left_out, tune
from nas.search.proposers.hardware import Costs, prices
from nas.search.proposers.sampling import Sampler

_CROWD = 64
"""Random layouts whose spread columns are scaled by."""
_LEAST_SPREAD = 0.25
"""Least scale of a column, as a share of the median in its group: others may be millions of spreads away where random
layouts hardly vary, such as in a rare pair of mixers far from the height at which it was drawn."""
MIN_POINTS = 4
"""Values below which a target is predicted by their mean and a wide interval, without a model."""
_PRIOR_SD = 0.3
"""Least standard deviation of a forecast without a model."""
_PRICED_FROM = 12
"""Values from which a target may start from sums of costs."""
_PRICED_SHARE = 0.5
"""Share of its standard deviation that these sums may leave at most, where they are fitted without the value."""
_FOLDS = 8
"""Into which observations are split to fit sums of costs without each."""
_FEWEST_PARTS = 2
"""Parts below which a coordinate is modelled as a whole."""
_ROUNDED = 1e-6
"""Spread of the difference from the sum of its parts below which a coordinate has no further part."""
_NEIGHBOURS = 4
"""Observations that are left out with each one: candidates are further from what is known than that is from itself."""
_LEAST_SHARE = 0.05
"""Share below which a process is left out of an average."""
_STACKING_STEPS = 50
"""Steps of the fit of shares."""
_MOST_DOUBT = 1.2
"""Greatest logarithm of the factor on standard deviations."""
_DOUBT_SD = 0.5
"""Prior standard deviation of this logarithm."""
_RUNG_NOISE = 0.1
"""Additional variance of quality per rung below the top, as a share of that of all figures."""


class Kernels:
    """The kernels of one space.

    Columns are scaled by the spread of random layouts of the space, so that kernels do not depend on observations.
    After the features there is a column per distance of a figure's rung from the top: all 0 to predict.

    Args:
        features: of the space, with `STRING_GROUPS`.
        sampler: of the space.
        rungs: number of these columns.

    Attributes:
        members: [3, G] which kernels each of the processes has that quality is averaged over; figures of devices have
            the first alone.
    """

    def __init__(self, features: Features, sampler: Sampler, rungs: int) -> None:
        rng = np.random.default_rng(0)
        crowd = features.matrix([sampler.draw(rng) for _ in range(_CROWD)])
        spread = crowd.std(axis=0)
        self._features, self._rungs = features, rungs
        self._centre = crowd.mean(axis=0)
        self._scale = np.where(spread > 1e-9, spread, 1.0)
        groups = [(name, np.flatnonzero(features.groups == index)) for index, name in enumerate(GROUPS + STRING_GROUPS)]
        self._columns = {name: slice(indices[0], indices[-1] + 1) for name, indices in groups if len(indices)}
        for columns in self._columns.values():
            if (varying := spread[columns][spread[columns] > 1e-9]).size:
                self._scale[columns] = np.maximum(self._scale[columns], _LEAST_SPREAD * np.median(varying))
        self._plain = [group for group in GROUPS if group in self._columns]
        self._strings = [group for group in STRING_GROUPS if group in self._columns]
        first = 2 + len(self._plain) + len(_NONLINEAR)
        self.members = np.ones((3, first + 2 + len(self._strings)), dtype=bool)
        self.members[0, first:] = False
        self.members[1] = False
        self.members[1, [0, 1, first]] = True
        self.members[2, first] = False

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
        kernels = np.empty((self.members.shape[1], len(a), len(b)))
        for index, kernel in enumerate(self._between(a, b)):
            kernels[index] = kernel
        return kernels

    def _between(self, a: Array, b: Array) -> Iterator[Array | float]:
        size = len(self._centre)
        yield 1.0
        yield a[:, size:] @ b[:, size:].T
        dots, squared = {}, {}
        for group, columns in self._columns.items():
            rows_a, rows_b = a[:, columns], b[:, columns]
            dots[group] = rows_a @ rows_b.T
            squared[group] = (rows_a**2).sum(axis=1)[:, None] + (rows_b**2).sum(axis=1) - 2 * dots[group]
        for group in self._plain:
            yield dots[group] / self._width(group)
        for groups, length, form in _NONLINEAR:
            mean = sum(squared[group] for group in groups) / sum(map(self._width, groups))
            yield form(np.sqrt(np.maximum(mean, 0.0)) / length)
        yield sum(dots[group] for group in self._plain) / sum(map(self._width, self._plain))
        for group in self._strings:
            yield dots[group] / self._width(group)
        mean = sum(squared[group] / self._width(group) for group in self._strings) / len(self._strings)
        yield _exponential(np.sqrt(np.maximum(mean, 0.0)))

    def diagonal(self, a: Array) -> Array:
        """Returns [G, A] kernels of each row with itself."""
        size, ones = len(self._centre), np.ones(len(a))
        squares = {group: (a[:, columns] ** 2).sum(axis=1) for group, columns in self._columns.items()}
        parts = [ones, (a[:, size:] ** 2).sum(axis=1)]
        parts += [squares[group] / self._width(group) for group in self._plain]
        parts += [ones] * len(_NONLINEAR)
        parts.append(np.sum([squares[group] for group in self._plain], axis=0) / sum(map(self._width, self._plain)))
        parts += [squares[group] / self._width(group) for group in self._strings]
        return np.array([*parts, ones])

    def _width(self, group: str) -> int:
        """Returns the number of columns."""
        columns = self._columns[group]
        return int(columns.stop - columns.start)


def _matern(distance: Array) -> Array:
    """Returns the Matern 5/2 covariance of distances in length scales (Rasmussen and Williams 2006, eq. 4.17)."""
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


@dataclass(frozen=True)
class Tuning:
    """Hyperparameters of one target.

    Args:
        members: of each process.
        shares: of the processes in the average.
        doubt: factor on standard deviations.
        prices: [S] of the amounts that the target is a sum of, to start from; None: it starts from a constant.
        costs: these amounts.
        scale: standard deviation that variances are shares of; None: that of what is fitted.
    """

    members: tuple[Weights, ...]
    shares: tuple[float, ...]
    doubt: float
    prices: Array | None = None
    costs: Costs | None = None
    scale: float | None = None

    @property
    def weights(self) -> Array:
        """Returns [M, G] weights of the kernels of each process."""
        return np.array([member.kernels for member in self.members])

    def expected(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L] logarithms of sums of costs; 0 where the target starts from a constant."""
        if self.prices is None or self.costs is None:
            return np.zeros(len(layouts))
        return np.asarray(np.log(np.maximum(self.costs.sums(layouts) @ self.prices, 1e-12)))


Tuned = dict[str, Tuning]
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
        name: of the target: 'objective NAME' or 'constraint NAME'.
        rows: indices of the observations that have it.
        values: [K] of these.
        noise: [K] known variances.
        by_rung: whether it depends on the rung it was taken at.
        column: of the objective or constraint.
        is_part: whether it is one of several parts of that.
    """

    name: str
    rows: list[int]
    values: Array
    noise: Array
    by_rung: bool
    column: int
    is_part: bool = False

    @property
    def figure(self) -> str:
        """Name of the objective or constraint."""
        return self.name.partition(" ")[2]

    @property
    def learnable(self) -> bool:
        """Whether there are enough values for a model."""
        return len(self.rows) >= MIN_POINTS and float(self.values.std()) > 1e-9


@dataclass(frozen=True)
class Fitted:
    """The processes of one target.

    Args:
        processes: one a member; their offsets and scales are those of residuals where the target has `prices`.
        tuning: their hyperparameters.
        offset: mean of the target.
        scale: its standard deviation.
    """

    processes: tuple[Process, ...]
    tuning: Tuning
    offset: float
    scale: float

    def predict(
        self, layouts: Sequence[Layout], cross: Array, rows: list[int], variances: Array
    ) -> tuple[Array, Array]:
        """Returns [L] means and standard deviations, without offset and scale.

        Args:
            layouts: new ones.
            cross: [G, L, N] kernels between them and all known ones.
            rows: of the known ones, those that the target was fitted to.
            variances: [G, L] kernels of each with itself.
        """
        weights = self.tuning.weights
        between, alone = np.tensordot(weights, cross, axes=1)[:, :, rows], weights @ variances
        predictions = [
            process.predict(*kernels) for process, *kernels in zip(self.processes, between, alone, strict=True)
        ]
        centre, spread = _mixed(np.array(predictions), self.tuning.shares)
        spread = spread * self.tuning.doubt
        if self.tuning.prices is None:
            return centre, spread
        process = self.processes[0]
        centre = (self.tuning.expected(layouts) + process.offset + process.scale * centre - self.offset) / self.scale
        return centre, spread * process.scale / self.scale


class Surrogate:
    """Models of all targets.

    Args:
        kernels: of the space.
        observations: of this study; missing values are ignored.
        worst: reference point: objective -> coordinate, predicted of an objective without any value.
        by_rung: objectives and constraints that depend on the rung they were taken at.
        top: index of the top rung, for which quality is predicted.
        costs: amounts that figures of devices are sums of, by name of the objective or constraint.
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
        costs: Mapping[str, Costs],
        tuned: Tuned | None = None,
        prior: Sequence[Observation] = (),
        pending: Sequence[Layout] = (),
    ) -> None:
        self._costs = costs
        self.objectives = tuple(worst)
        self._worst = tuple(worst.values())
        self.constraints = tuple(
            sorted({name for observation in (*observations, *prior) for name in observation.constraints})
        )
        self._kernels = kernels
        own_below = [0 if observation.rung is None else top - observation.rung for observation in observations]
        below, elsewhere = (
            np.array([*own_below, *(top + 1 for _ in prior)]),
            np.arange(len(own_below) + len(prior)) >= len(own_below),
        )
        seen_rows = [*observations, *prior]
        layouts = [observation.layout for observation in seen_rows]
        self._layouts = [*layouts, *pending]
        believed = kernels.rows(list(pending))
        self._plain = np.vstack([kernels.rows(layouts, below * elsewhere), believed])
        self._staged = np.vstack([kernels.rows(layouts, below), believed])
        self._has_rungs = bool((below > 0).any())
        self._pending = [*range(len(seen_rows), len(self._plain))]
        far = np.where(elsewhere, 1, below)
        self._targets = _targets(seen_rows, self.objectives, self.constraints, by_rung, far)
        self._grams: dict[bool, Array] = {}
        self.tuned: Tuned = dict(tuned or {})
        self._models = self._fitted()

    def predict(self, layouts: Sequence[Layout]) -> tuple[Forecast, Forecast]:
        """Returns forecasts of the objectives and of the constraints, at the top rung."""
        rows = self._kernels.rows(list(layouts))
        variances = self._kernels.diagonal(rows)
        cross = self._kernels.between(rows, self._plain)  # at the top rung, the rungs of others make no difference
        mean, sd = np.zeros((2, len(rows), len(self.objectives) + len(self.constraints)))
        done: dict[int, tuple[Array, Array]] = {}
        for target, model in zip(self._targets, self._models, strict=True):
            column = target.column
            if model is None:
                forecast: tuple[Array | float, Array | float] = self._prior(column, target.values)
            else:
                key = id(model.processes[0].solved)
                if key not in done:  # twins share it
                    done[key] = model.predict(layouts, cross, target.rows + self._pending, variances)
                centre, spread = done[key]
                forecast = model.offset + model.scale * centre, model.scale * spread
            if target.is_part:
                mean[:, column] += forecast[0]
                sd[:, column] = np.hypot(sd[:, column], forecast[1])
            else:
                mean[:, column], sd[:, column] = forecast
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

    def _fit(self, target: Target) -> Fitted:
        gram, rows = self._gram(target.by_rung and self._has_rungs), np.array(target.rows)
        if target.name not in self.tuned:
            self.tuned[target.name] = self._tune(target, gram[:, rows[:, None], rows])
        tuning = self.tuned[target.name]
        values = target.values - tuning.expected([self._layouts[row] for row in target.rows])
        standard = None if tuning.scale is None else (float(values.mean()), tuning.scale)
        fitted = replace(target, values=values)
        covariances = np.tensordot(tuning.weights, gram, axes=1)
        processes = tuple(
            self._process(fitted, covariance, weights.noise, standard)
            for weights, covariance in zip(tuning.members, covariances, strict=True)
        )
        return Fitted(processes, tuning, float(target.values.mean()), float(target.values.std()))

    def _process(
        self, target: Target, covariance: Array, noise: float, standard: tuple[float, float] | None
    ) -> Process:
        rows = target.rows
        process = fit(covariance[np.ix_(rows, rows)], target.values, target.noise, noise, standard)
        return self._believing(process, target, covariance, noise) if self._pending else process

    def _believing(self, process: Process, target: Target, covariance: Array, noise: float) -> Process:
        """Returns `process` fitted to its own predictions of pending layouts as well (kriging believer)."""
        rows = target.rows + self._pending
        between = covariance[np.ix_(self._pending, target.rows)]
        believed = process.offset + process.scale * (between @ process.solved)
        values, noises = np.append(target.values, believed), np.append(target.noise, np.zeros(len(believed)))
        return fit(covariance[np.ix_(rows, rows)], values, noises, noise, (process.offset, process.scale))

    def _tune(self, target: Target, gram: Array) -> Tuning:
        """Returns hyperparameters of an average of processes, as the module's docstring says."""
        members, costs = self._kernels.members, self._costs.get(target.figure)
        if costs is not None and len(target.rows) >= _PRICED_FROM:
            sums = costs.sums([self._layouts[row] for row in target.rows])
            unseen = replace(target, values=target.values - _left_out_sums(sums, target.values))
            scale = max(float(unseen.values.std()), 1e-9)
            if scale < _PRICED_SHARE * float(target.values.std()):
                tuning = _averaged(gram, unseen, members[:1])
                return replace(tuning, prices=prices(sums, target.values), costs=costs, scale=scale)
        return _averaged(gram, target, members if target.by_rung else members[:1])

    def _fitted(self) -> list[Fitted | None]:
        """Returns the model of each target; targets that differ by offset and scale alone share a fit."""
        done: dict[tuple[object, ...], tuple[Fitted, str]] = {}
        models: list[Fitted | None] = []
        for target in self._targets:
            if not target.learnable:
                models.append(None)
                continue
            offset, scale = float(target.values.mean()), float(target.values.std())
            shape = np.round((target.values - offset) / scale, 9).tobytes(), (target.noise / scale**2).tobytes()
            key = (target.by_rung, tuple(target.rows), *shape)
            if key not in done:
                done[key] = self._fit(target), target.name
            fitted, twin = done[key]
            self.tuned[target.name] = self.tuned[twin]
            models.append(fitted if twin == target.name else replace(fitted, offset=offset, scale=scale))
        return models


def _averaged(gram: Array, target: Target, members: NDArray[np.bool_]) -> Tuning:
    """Returns hyperparameters of an average of processes.

    Args:
        gram: [G, N, N] kernels between observations.
        target: of N observations.
        members: [M, G] which kernels each process has.
    """
    values, scale = target.values, float(target.values.std())
    predictions, weights, noises = [], [], []
    for which in members:
        tuned, kernels = tune(gram[which], values, target.noise), np.zeros(len(gram))
        kernels[which] = tuned.kernels
        member_weights = Weights(kernels, tuned.noise)
        predictions.append(left_out(member_weights.sum(gram), values, target.noise, member_weights.noise, _NEIGHBOURS))
        weights.append(member_weights)
        noises.append(member_weights.noise * scale**2)
    means, variances = np.array([mean for mean, _ in predictions]), np.array([variance for _, variance in predictions])
    shares = _stacked(_log_density(values - means, variances))
    members_kept = [index for index, share in enumerate(shares) if share >= _LEAST_SHARE]
    shares = shares[members_kept] / shares[members_kept].sum()
    mean, spread = _mixed(np.stack([means[members_kept], np.sqrt(variances[members_kept])], axis=1), shares)
    noise = target.noise + float(shares @ np.array(noises)[members_kept])
    doubt = _doubt(values - mean, np.maximum(spread**2 - noise, 1e-3 * spread**2), noise)
    return Tuning(tuple(weights[index] for index in members_kept), tuple(shares.tolist()), doubt)


def _stacked(densities: Array) -> Array:
    """Returns [M] shares that maximise the sum of the logarithms of the average of [M, N] densities, given as logs.

    One count is added to each, so that few observations decide little.
    """
    scaled = np.exp(densities - densities.max(axis=0))
    shares = np.full(len(densities), 1 / len(densities))
    for _ in range(_STACKING_STEPS):
        parts = shares[:, None] * scaled
        counts = (parts / parts.sum(axis=0)).sum(axis=1) + 1.0
        shares = counts / counts.sum()
    return np.asarray(shares)


def _doubt(errors: Array, latent: Array, noise: Array) -> float:
    """Returns the likeliest factor, at least 1, on the deviations of [N] leave-one-out predictions."""
    logs = np.linspace(0.0, _MOST_DOUBT, 25)
    scores = np.array([_log_density(errors, np.exp(2 * log) * latent + noise).sum() for log in logs])
    return float(np.exp(logs[np.argmax(scores - 0.5 * (logs / _DOUBT_SD) ** 2)]))


def _log_density(errors: Array, variances: Array) -> Array:
    return np.asarray(-0.5 * (errors**2 / variances + np.log(2 * np.pi * variances)))


def _mixed(predictions: Array, shares: Sequence[float] | Array) -> tuple[Array, Array]:
    """Returns mean and standard deviation [L] of the mixture of [M, 2, L] means and standard deviations."""
    means, spreads = predictions[:, 0], predictions[:, 1]
    part = np.asarray(shares)[:, None]
    mean = (part * means).sum(axis=0)
    return mean, np.sqrt((part * (spreads**2 + (means - mean) ** 2)).sum(axis=0))


def _left_out_sums(sums: Array, logs: Array) -> Array:
    """Returns [N] logarithms of sums of costs whose prices were fitted without the observation (in folds)."""
    sums_left_out = np.empty(len(logs))
    for fold in range(_FOLDS):
        out = np.arange(len(logs)) % _FOLDS == fold
        sums_left_out[out] = np.log(np.maximum(sums[out] @ prices(sums[~out], logs[~out]), 1e-12))
    return sums_left_out


def _targets(
    observations: Sequence[Observation],
    objectives: Sequence[str],
    constraints: Sequence[str],
    by_rung: frozenset[str],
    below: Array,
) -> list[Target]:
    """Returns the targets of objectives, each part of one by itself, then those of constraints."""
    targets = []
    for column, name in enumerate(objectives):
        values = [observation.objectives.get(name) for observation in observations]
        whole = _target(f"objective {name}", values, _noise(observations, name), below, name in by_rung, column)
        targets += _parts(whole, name, observations, below) or [whole]
    for column, name in enumerate(constraints, len(objectives)):
        values = [observation.constraints.get(name) for observation in observations]
        noise = _noise(observations, name)
        targets.append(_target(f"constraint {name}", values, noise, below, name in by_rung, column))
    return targets


def _noise(observations: Sequence[Observation], name: str) -> list[float]:
    return [observation.noise.get(name, 0.0) ** 2 for observation in observations]


def _target(
    name: str, values: Sequence[float | None], noise: list[float], below: Array, by_rung: bool, column: int
) -> Target:
    rows = [index for index, value in enumerate(values) if value is not None]
    figures = np.array([value for value in values if value is not None], dtype=np.float64)
    variances = np.array(noise, dtype=np.float64)[rows]
    if by_rung and len(figures):
        variances = variances + _RUNG_NOISE * float(figures.var()) * below[rows]
    return Target(name, rows, figures, variances, by_rung, column)


def _parts(whole: Target, name: str, observations: Sequence[Observation], below: Array) -> list[Target]:
    """Returns the parts that all observations of an objective tell, and the rest; none where there are not two."""
    subset = [observations[row] for row in whole.rows]
    parts = [observation.parts.get(name, {}) for observation in subset]
    shared = sorted(set.intersection(*map(set, parts))) if parts else []
    targets, rows = [], set(whole.rows)
    rest = whole.values.copy()
    for part in shared:
        values = [
            observation.parts.get(name, {}).get(part) if row in rows else None
            for row, observation in enumerate(observations)
        ]
        noise = _noise(observations, f"{name}/{part}")
        target = _target(f"{whole.name}/{part}", values, noise, below, whole.by_rung, whole.column)
        if target.learnable:
            rest -= target.values
            targets.append(replace(target, is_part=True))
    if len(targets) < _FEWEST_PARTS:
        return []
    if np.ptp(rest) > _ROUNDED:
        targets.append(replace(whole, name=f"{whole.name}/rest", values=rest, is_part=True))
    else:
        targets[0] = replace(targets[0], values=targets[0].values + rest)
    return targets
