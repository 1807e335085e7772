"""Exact selection: one alternative for each place, where quality and costs are sums over the places.

    minimise  sum of losses x + sum of terms y      one alternative per place, and
              base + sum of costs x <= limit        for each metric
              x <= x'                               where an alternative needs another,
              x + x' <= 1                           where it excludes it
              x + x' - 1 <= y <= min(x, x')         for the term of a pair: y = x x' is linear (McCormick 1976)

An integer program, solved by HiGHS (Huangfu and Hall 2018) through scipy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from nas.core.errors import InfrastructureFailed

P = TypeVar("P", bound=Hashable)
"""A place."""
_SECONDS = 60.0


@dataclass(frozen=True)
class Option(Generic[P]):
    """An alternative at a place.

    Args:
        name: of it, different from those of the others at the place.
        loss: what the model loses by it.
        costs: metric -> what it adds to that of the model without the block's own.
        empty: whether it leaves nothing there; one place of the model keeps something.
        needs: place and name of an option that is chosen with this one.
        excludes: place and name of an option that is not chosen with this one.
    """

    name: str
    loss: float
    costs: Mapping[str, float] = field(default_factory=dict)
    empty: bool = False
    needs: tuple[P, str] | None = None
    excludes: tuple[P, str] | None = None


@dataclass(frozen=True)
class Term(Generic[P]):
    """What the model loses by two options together, beyond the sum of their losses.

    Args:
        options: places and names of both.
        loss: may be negative.
    """

    options: tuple[tuple[P, str], tuple[P, str]]
    loss: float


def select(
    places: Mapping[P, Sequence[Option[P]]],
    base: Mapping[str, float],
    limits: Mapping[str, float],
    terms: Sequence[Term[P]] = (),
) -> dict[P, Option[P]] | None:
    """Returns the chosen option of each place; None: no choice keeps the limits.

    Args:
        places: the options of each; those of a place have the same metrics.
        base: metric -> its part that does not depend on the choice.
        limits: metric -> largest value.
        terms: of pairs; those of options that are not there count nothing.

    Raises:
        InfrastructureFailed: the solver found no answer within a minute.
    """
    column = {(place, each.name): i for i, (place, each) in enumerate(_every(places))}
    options = [each for _, each in _every(places)]
    pairs = [(column[a], column[b], term.loss) for term in terms for a, b in [term.options] if {a, b} <= column.keys()]
    width = len(options) + len(pairs)

    def constraint(entries: Mapping[int, float], least: float, most: float) -> LinearConstraint:
        row = csr_array((list(entries.values()), ([0] * len(entries), list(entries))), (1, width))
        return LinearConstraint(row, least, most)

    rows = [constraint({column[place, each.name]: 1.0 for each in own}, 1, 1) for place, own in places.items()]
    for metric, limit in limits.items():
        costs = np.array([option.costs.get(metric, 0.0) for option in options])
        scale = max(float(np.abs(costs).max()), 1e-12)
        rows.append(constraint(dict(enumerate(costs / scale)), -np.inf, (limit - base.get(metric, 0.0)) / scale))
    rows.append(constraint({i: float(each.empty) for i, each in enumerate(options)}, -np.inf, len(places) - 1))
    for index, option in enumerate(options):
        if option.needs is not None:
            rows.append(constraint({index: 1.0, column[option.needs]: -1.0}, -np.inf, 0))
        if option.excludes is not None:
            rows.append(constraint({index: 1.0, column[option.excludes]: 1.0}, -np.inf, 1))
    for product, (one, other, _) in enumerate(pairs, start=len(options)):
        rows.append(constraint({product: 1.0, one: -1.0}, -np.inf, 0))
        rows.append(constraint({product: 1.0, other: -1.0}, -np.inf, 0))
        rows.append(constraint({one: 1.0, other: 1.0, product: -1.0}, -np.inf, 1))
    losses = np.array([*(option.loss for option in options), *(loss for _, _, loss in pairs)])
    size = max(float(np.abs(losses).max()), 1e-12)
    settings = {"time_limit": _SECONDS, "mip_rel_gap": 0.0}
    solved = milp(losses / size, constraints=rows, integrality=np.ones(width), bounds=Bounds(0, 1), options=settings)
    if solved.status == 2:
        return None
    if solved.status != 0 or solved.x is None:
        raise InfrastructureFailed(f"the solver stopped: {solved.message}")
    return {place: max(own, key=lambda each: solved.x[column[place, each.name]]) for place, own in places.items()}


def total(chosen: Mapping[P, Option[P]], base: Mapping[str, float], terms: Sequence[Term[P]] = ()) -> dict[str, float]:
    """Returns loss and metrics of a choice, as sums."""
    picked = chosen.values()
    metrics = {name: value + sum(option.costs.get(name, 0.0) for option in picked) for name, value in base.items()}
    names = {(place, option.name) for place, option in chosen.items()}
    beyond = sum(term.loss for term in terms if names.issuperset(term.options))
    return {"loss": sum(option.loss for option in picked) + beyond} | metrics


def _every(places: Mapping[P, Sequence[Option[P]]]) -> Iterator[tuple[P, Option[P]]]:
    return ((place, option) for place, own in places.items() for option in own)
