"""Which knobs of a space move an objective: main effects of a linear model of the trials.

The model is least squares on features of layouts, with t intervals. It is no part of the search. Layouts that a search
proposes are not drawn at random, so knobs that it changed together have wide intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.block import Block
from nas.core.block_space import EXPANSION
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.core.stats import t_critical

Floats = NDArray[np.float64]
FEWEST = 10
"""Trials more than features, at or below which no effects are given."""
_ROUNDING = 1e-9
"""Share of its size that a feature differs by at least; means of equal numbers differ by less."""
_DEPENDENT = 1e-8
"""Share of a feature's variance that others leave, below which it is theirs."""


@dataclass(frozen=True)
class Effects:
    """How an objective changes from the least to the greatest value of each feature, all others equal.

    Args:
        change: [F] in the objective's coordinate; NaN for a feature that features before it determine.
        low: [F] lower end of the 95 % interval.
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
                means = np.array(
                    [
                        _mean([_value(block, name, layout.d_model) for block in of_layout])
                        for layout, of_layout in zip(layouts, blocks, strict=True)
                    ]
                )
                if np.isfinite(means).any():
                    columns[f"{kind.kind} {name}"] = np.where(np.isfinite(means), means, np.nanmean(means))
    return {name: column for name, column in columns.items() if _varies(column)}


def effects(table: Floats, target: Floats) -> Effects | None:
    """Fits the model; None unless more than F + `FEWEST` trials have a value, which differ.

    Args:
        table: [N, F] features.
        target: [N] coordinates of an objective; NaN: not known.
    """
    finite = np.isfinite(target)
    table, target = table[finite], target[finite]
    if len(target) <= table.shape[1] + FEWEST or np.ptp(target) == 0:
        return None
    spread, x, y = np.ptp(table, axis=0), table - table.mean(axis=0), target - target.mean()
    columns = [place for place in _independent(x) if _varies(table[:, place])]
    x, dof = x[:, columns], len(y) - 1 - len(columns)
    inverse = np.linalg.inv(x.T @ x)
    slopes = inverse @ x.T @ y
    residuals = y - x @ slopes
    errors = np.sqrt(np.diag(inverse) * float(residuals @ residuals) / dof)
    ends = np.full((3, table.shape[1]), np.nan)
    ends[:, columns] = [slopes + side * t_critical(0.95, dof) * errors for side in (0, -1, 1)]
    leverage = np.einsum("nf,fg,ng->n", x, inverse, x) + 1 / len(y)  # the diagonal of the hat matrix
    left_out = float(np.mean((residuals / np.maximum(1 - leverage, 1e-9)) ** 2))
    change, low, high = ends * spread
    return Effects(change, low, high, explained=1 - left_out / float(np.var(target)))


def _independent(x: Floats) -> list[int]:
    """Returns the columns that those before them do not determine, such as counts that add up to a fixed depth."""
    columns = list[int]()
    basis = np.empty((len(x), 0))
    for place, column in enumerate(x.T):
        rest = column - basis @ (basis.T @ column)
        if (square := float(rest @ rest)) > _DEPENDENT * float(column @ column):
            columns.append(place)
            basis = np.column_stack([basis, rest / np.sqrt(square)])
    return columns


def _varies(column: Floats) -> bool:
    """Returns whether values differ by more than rounding."""
    return len(column) > 0 and bool(np.ptp(column) > _ROUNDING * np.abs(column).max())


def _value(block: Block, name: str, d_model: int) -> object:
    """Returns the value of a knob in a block: of an expansion, the width as a multiple of the model's."""
    return block.int("width") / d_model if name == EXPANSION else block.get(name)


def _mean(values: Sequence[object]) -> float:
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return float(np.mean(numbers)) if numbers else np.nan
