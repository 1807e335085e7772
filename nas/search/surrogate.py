"""Predictions of what a layout would measure, with their uncertainty, from what others measured.

Each target (a coordinate, or a budget's log ratio) has a model of its own: ridge regression and extremely randomised
trees (Geurts, Ernst and Wehenkel 2006), weighed by their out-of-sample errors. Device figures are near linear in
logarithms of sizes, where ridge is best; quality has interactions between layers, where trees help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.search.api import Observation
from nas.search.features import Features
from nas.search.ridge import Array, Ridge, fit_ridge

MIN_POINTS = 4
"""Values below which a target has its mean and a wide interval instead of a model."""
_PRIOR_SD = 0.3
_TREES = 64
_RUNG_WEIGHT = 0.5
"""Weight of a quality figure per rung below the top; a constant offset of each rung is learned besides."""

Tree = Callable[[NDArray[np.float32]], Array]
"""[N, F] rows -> [N, 1] values."""


@dataclass(frozen=True)
class Forecast:
    """[N, T] means and standard deviations, one column a target."""

    mean: Array
    sd: Array


class Surrogate:
    """Models of all targets, fitted once.

    Args:
        features: of the space.
        observations: what has been told; values that one lacks are missing, not bad.
        objectives: names of coordinates; those in `by_rung` depend on the rung they were taken at.
        by_rung: see above.
        top: index of the top rung, which is what is predicted.
        seed: of the trees.
    """

    def __init__(
        self,
        features: Features,
        observations: Sequence[Observation],
        objectives: Sequence[str],
        by_rung: frozenset[str],
        top: int,
        seed: int,
    ) -> None:
        self._features = features
        self.objectives = tuple(objectives)
        self.constraints = tuple(sorted({name for seen in observations for name in seen.constraints}))
        rows = features.matrix([seen.layout for seen in observations])
        self._models = []
        for name in self.objectives:
            values = [seen.objectives.get(name) for seen in observations]
            rungs = [top if seen.rung is None else seen.rung for seen in observations] if name in by_rung else None
            self._models.append(_fit(rows, values, rungs, top, seed))
        for name in self.constraints:
            self._models.append(_fit(rows, [seen.constraints.get(name) for seen in observations], None, top, seed))

    def predict(self, layouts: Sequence[Layout]) -> tuple[Forecast, Forecast]:
        """Forecasts of the objectives and of the constraints, at the top rung."""
        rows = self._features.matrix(layouts)
        predicted = [model.predict(rows) for model in self._models]
        mean = np.array([mean for mean, _ in predicted]).T.reshape(len(rows), -1)
        sd = np.array([sd for _, sd in predicted]).T.reshape(len(rows), -1)
        count = len(self.objectives)
        return Forecast(mean[:, :count], sd[:, :count]), Forecast(mean[:, count:], sd[:, count:])


@dataclass(frozen=True)
class _Prior:
    """Too few values to learn from."""

    mean: float
    sd: float

    def predict(self, rows: Array) -> tuple[Array, Array]:
        return np.full(len(rows), self.mean), np.full(len(rows), self.sd)


@dataclass(frozen=True)
class _Blend:
    """Ridge and trees. Columns behind the features say how far below the top rung a row was taken: 0 to predict.

    The variance is that of the mixture of both: their own, and how far apart they are.
    """

    ridge: Ridge
    trees: Sequence[Tree]
    ridge_share: float
    rung_columns: int
    widest: float

    def predict(self, rows: Array) -> tuple[Array, Array]:
        whole = np.hstack([rows, np.zeros((len(rows), self.rung_columns))])
        linear, linear_variance = self.ridge.predict(whole)
        narrow = whole.astype(np.float32)
        votes = np.array([tree(narrow)[:, 0] for tree in self.trees])
        grown, grown_variance = votes.mean(axis=0), votes.var(axis=0)
        a, b = self.ridge_share, 1 - self.ridge_share
        mean = a * linear + b * grown
        variance = a * (linear_variance + (linear - mean) ** 2) + b * (grown_variance + (grown - mean) ** 2)
        return mean, np.clip(np.sqrt(variance), 1e-3 * self.widest, self.widest)


def _fit(
    rows: Array, values: Sequence[float | None], rungs: Sequence[int] | None, top: int, seed: int
) -> _Prior | _Blend:
    known = [index for index, value in enumerate(values) if value is not None]
    targets = np.array([value for value in values if value is not None], dtype=np.float64)
    spread = float(targets.std()) if len(targets) else 0.0
    if len(known) < MIN_POINTS or spread < 1e-9:
        return _Prior(float(targets.mean()) if len(targets) else 0.0, max(_PRIOR_SD, spread))
    below = np.array([0 if rungs is None else top - rungs[index] for index in known])
    columns = [(below == level).astype(np.float64) for level in range(1, top + 1) if rungs is not None]
    whole = np.hstack([rows[known], np.array(columns).T.reshape(len(known), -1)])
    weights = _RUNG_WEIGHT ** below.astype(np.float64)
    ridge = fit_ridge(whole, targets, weights)
    trees, error = _grow(whole, targets, weights, seed)
    ridge_share = error / (error + ridge.error) if error + ridge.error > 0 else 1.0
    return _Blend(ridge, trees, ridge_share, len(columns), max(2 * spread, 1e-3))


def _grow(rows: Array, targets: Array, weights: Array, seed: int) -> tuple[Sequence[Tree], float]:
    """The trees, and their out-of-bag mean squared error."""
    from sklearn import config_context  # type: ignore[import-untyped]
    from sklearn.ensemble import ExtraTreesRegressor  # type: ignore[import-untyped]

    forest = ExtraTreesRegressor(
        _TREES, bootstrap=True, oob_score=True, max_features=0.5, n_jobs=1, random_state=seed % (1 << 32)
    )
    # Checking each tree's parameters would take longer than growing it from the few rows there are.
    with config_context(skip_parameter_validation=True, assume_finite=True):
        forest.fit(rows, targets, sample_weight=weights)
    error = float(weights @ (forest.oob_prediction_ - targets) ** 2 / weights.sum())
    return [tree.tree_.predict for tree in forest.estimators_], error
