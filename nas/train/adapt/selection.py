"""Exact selection: one alternative for each slot, where quality and costs are sums over the slots.

    minimise  sum of losses x + sum of terms y      one alternative per slot, and
              base + sum of costs x <= limit        for each metric
              x <= sum of x'                        where an alternative needs one of others,
              x + x' <= 1                           where it excludes it
              x + x' - 1 <= y <= min(x, x')         for the term of a pair: y = x x' is linear (McCormick 1976)

An integer program, solved by HiGHS (Huangfu and Hall 2018) through scipy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from nas.core.errors import InfrastructureFailed

S = TypeVar("S", bound=Hashable)
"""A slot: `nas.core.replacement.Slot`, or anything hashable."""
_SECONDS = 60.0
"""Longest time of the solver."""


@dataclass(frozen=True)
class Option(Generic[S]):
    """An alternative in a slot.

    Args:
        name: different from those of the slot's other options.
        loss: what the model loses by it.
        costs: metric -> what it adds.
        empty: whether it leaves nothing there; at least one slot of the model is not empty.
        needs: slot and names of options, one of which is chosen with this one.
        excludes: slot and name of an option that is not chosen with this one.
    """

    name: str
    loss: float
    costs: Mapping[str, float] = field(default_factory=dict)
    empty: bool = False
    needs: tuple[S, Sequence[str]] | None = None
    excludes: tuple[S, str] | None = None


@dataclass(frozen=True)
class Term(Generic[S]):
    """What the model loses by two options together, beyond the sum of their losses.

    Args:
        options: slots and names of both.
        loss: may be negative.
    """

    options: tuple[tuple[S, str], tuple[S, str]]
    loss: float


def select(
    options: Mapping[S, Sequence[Option[S]]],
    base: Mapping[str, float],
    limits: Mapping[str, float],
    terms: Sequence[Term[S]] = (),
) -> dict[S, Option[S]] | None:
    """Returns the chosen option of each slot; None: no choice keeps the limits.

    Args:
        options: slot -> its options, which have the same metrics.
        base: metric -> its part that does not depend on the choice.
        limits: metric -> largest value.
        terms: of pairs; those of options that are missing count nothing, and neither is a missing one excluded.

    Raises:
        InfrastructureFailed: the solver found no answer within a minute.
    """
    columns = [(slot, option) for slot, choices in options.items() for option in choices]
    column = {(slot, option.name): i for i, (slot, option) in enumerate(columns)}
    pairs = [(column[a], column[b], term.loss) for term in terms for a, b in [term.options] if {a, b} <= column.keys()]
    width = len(columns) + len(pairs)

    def constraint(entries: Mapping[int, float], least: float, most: float) -> LinearConstraint:
        row = csr_array((list(entries.values()), ([0] * len(entries), list(entries))), (1, width))
        return LinearConstraint(row, least, most)

    rows = [
        constraint({column[slot, option.name]: 1.0 for option in choices}, 1, 1) for slot, choices in options.items()
    ]
    for metric, limit in limits.items():
        costs = np.array([option.costs.get(metric, 0.0) for _, option in columns])
        scale = max(float(np.abs(costs).max()), 1e-12)
        rows.append(constraint(dict(enumerate(costs / scale)), -np.inf, (limit - base.get(metric, 0.0)) / scale))
    rows.append(
        constraint({i: float(option.empty) for i, (_, option) in enumerate(columns)}, -np.inf, len(options) - 1)
    )
    for index, (_, option) in enumerate(columns):
        if option.needs is not None:
            slot, names = option.needs
            lenders = {column[slot, name]: -1.0 for name in names if (slot, name) in column}
            rows.append(constraint({index: 1.0, **lenders}, -np.inf, 0))
        if option.excludes is not None and option.excludes in column:
            rows.append(constraint({index: 1.0, column[option.excludes]: 1.0}, -np.inf, 1))
    for product, (one, other, _) in enumerate(pairs, start=len(columns)):
        rows.append(constraint({product: 1.0, one: -1.0}, -np.inf, 0))
        rows.append(constraint({product: 1.0, other: -1.0}, -np.inf, 0))
        rows.append(constraint({one: 1.0, other: 1.0, product: -1.0}, -np.inf, 1))
    losses = np.array([*(option.loss for _, option in columns), *(loss for _, _, loss in pairs)])
    size = max(float(np.abs(losses).max()), 1e-12)
    settings = {"time_limit": _SECONDS, "mip_rel_gap": 0.0}
    solved = milp(losses / size, constraints=rows, integrality=np.ones(width), bounds=Bounds(0, 1), options=settings)
    if solved.status == 2:
        return None
    if solved.status != 0 or solved.x is None:
        raise InfrastructureFailed(f"the solver stopped: {solved.message}")
    return {
        slot: max(choices, key=lambda option: solved.x[column[slot, option.name]]) for slot, choices in options.items()
    }


def total(chosen: Mapping[S, Option[S]], base: Mapping[str, float], terms: Sequence[Term[S]] = ()) -> dict[str, float]:
    """Returns loss and metrics of a choice, as sums."""
    picked = chosen.values()
    metrics = {name: value + sum(option.costs.get(name, 0.0) for option in picked) for name, value in base.items()}
    names = {(slot, option.name) for slot, option in chosen.items()}
    beyond = sum(term.loss for term in terms if names.issuperset(term.options))
    return {"loss": sum(option.loss for option in picked) + beyond} | metrics
