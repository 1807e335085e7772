"""Which knobs of a space move an objective: main effects of a linear model of the trials.

The model is ridge regression on standardised features of layouts, with the penalty that predicts left-out trials best.
It is no part of the search. Layouts that a search proposes are not drawn at random, so knobs that it changed together
share their effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.core.space import SearchSpace

Floats = NDArray[np.float64]
FEWEST = 12
"""Trials with an objective's value, with fewer of which no effects are given."""
_PENALTIES = np.geomspace(0.01, 1000, 26)
_RESAMPLES = 200


@dataclass(frozen=True)
class Effects:
    """How an objective changes from the least to the greatest value of each feature, all others equal.

    Args:
        change: [F] in the objective's coordinate; 0 for a feature that is the same in all trials.
        low: [F] lower end of the 95 % interval over resampled trials.
        high: [F] its upper end.
        explained: share of the variance of left-out trials that the model predicts; below 0: none.
    """

    change: Floats
    low: Floats
    high: Floats
    explained: float


def features(space: SearchSpace, layouts: Sequence[Layout]) -> dict[str, Floats]:
    """Returns feature -> [N], of the knobs that differ between the layouts.

    They are the layers of each kind of mixer, the share of layers with each kind of feed-forward but the first, and the
    mean of each knob over the layers that have it; a layout without any has the mean of the others.
    """
    columns: dict[str, Floats] = {}
    for role, kinds in (("mixer", space.mixers), ("ffn", space.ffn)):
        for place, kind in enumerate(kinds):
            blocks = [
                [
                    block.resolve(layout.d_model)
                    for layer in layout.layers
                    for block in layer.blocks
                    if block.kind == kind.kind
                ]
                for layout in layouts
            ]
            counts = np.array([len(of_layout) for of_layout in blocks], float)
            if role == "mixer":
                columns[f"{kind.kind} layers"] = counts
            elif place:
                columns[f"share of {kind.kind}"] = counts / np.array([layout.depth for layout in layouts])
            for name in kind.knobs:
                means = np.array([_mean([block.get(name) for block in of_layout]) for of_layout in blocks])
                if np.isfinite(means).any():
                    columns[f"{kind.kind} {name}"] = np.where(np.isfinite(means), means, np.nanmean(means))
    return {name: column for name, column in columns.items() if len(set(column.tolist())) > 1}


def effects(table: Floats, target: Floats) -> Effects | None:
    """Fits the model; None where fewer than `FEWEST` trials have a value.

    Args:
        table: [N, F] features.
        target: [N] coordinates of an objective; NaN: not known.
    """
    finite = np.isfinite(target)
    table, target = table[finite], target[finite]
    if len(target) < FEWEST or np.ptp(target) == 0:
        return None
    scale = table.std(axis=0)
    x, y = (table - table.mean(axis=0)) / np.where(scale > 0, scale, 1.0), target - target.mean()
    errors = [_left_out_error(x, y, penalty) for penalty in _PENALTIES]
    penalty = float(_PENALTIES[int(np.argmin(errors))])
    spread = np.ptp(table, axis=0) / np.where(scale > 0, scale, 1.0)
    rng, drawn = np.random.default_rng(0), np.empty((_RESAMPLES, table.shape[1]))
    for row in drawn:
        rows = rng.integers(len(y), size=len(y))
        row[:] = _ridge(x[rows], y[rows], penalty)
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0) * spread
    return Effects(_ridge(x, y, penalty) * spread, low, high, 1 - min(errors) / float(np.var(target)))


def _mean(values: Sequence[object]) -> float:
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return float(np.mean(numbers)) if numbers else np.nan


def _ridge(x: Floats, y: Floats, penalty: float) -> Floats:
    return np.asarray(np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y), np.float64)


def _left_out_error(x: Floats, y: Floats, penalty: float) -> float:
    """Returns the mean square error of leaving one out, in closed form; the intercept is left out with it."""
    solved = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T)
    leverage = np.einsum("nf,fn->n", x, solved) + 1 / len(y)  # the diagonal of the hat matrix
    return float(np.mean(((y - y.mean() - x @ (solved @ y)) / (1 - leverage)) ** 2))
