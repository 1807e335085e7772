"""Exact selection: one alternative for each place, where quality and costs are sums over the places.

    minimise  sum of losses x   subject to   base + sum of costs x <= limit for each metric, one alternative per place,
                                             x <= y where an alternative needs another, x + y <= 1 where it excludes it

An integer program, solved by HiGHS (Huangfu and Hall 2018) through scipy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from nas.core.errors import InfrastructureFailed

_SECONDS = 60.0


@dataclass(frozen=True)
class Option:
    """An alternative at a place.

    Args:
        name: of it, for messages and records.
        loss: what the model loses by it.
        costs: metric -> what it adds to that of the model without the block's own.
        empty: whether it leaves nothing there; one place of the model keeps something.
        needs: place and index of an option that is chosen with this one.
        excludes: place and index of an option that is not chosen with this one.
    """

    name: str
    loss: float
    costs: Mapping[str, float] = field(default_factory=dict)
    empty: bool = False
    needs: tuple[int, int] | None = None
    excludes: tuple[int, int] | None = None


def select(
    places: Sequence[Sequence[Option]], base: Mapping[str, float], limits: Mapping[str, float]
) -> tuple[int, ...] | None:
    """Returns the index of the chosen option of each place; None: no choice keeps the limits.

    Args:
        places: the options of each; those of a place have the same metrics.
        base: metric -> its part that does not depend on the choice.
        limits: metric -> largest value.

    Raises:
        InfrastructureFailed: the solver found no answer within a minute.
    """
    options = [option for place in places for option in place]
    starts = np.cumsum([0, *map(len, places)])
    owner = np.repeat(np.arange(len(places)), np.diff(starts))
    one_each = csr_array((np.ones(len(options)), (owner, np.arange(len(options)))), (len(places), len(options)))
    rows = [LinearConstraint(one_each, 1, 1)]
    for metric, limit in limits.items():
        costs = np.array([[option.costs.get(metric, 0.0) for option in options]])
        scale = max(float(np.abs(costs).max()), 1e-12)
        rows.append(LinearConstraint(costs / scale, -np.inf, (limit - base.get(metric, 0.0)) / scale))
    empty = np.array([[float(option.empty) for option in options]])
    rows.append(LinearConstraint(empty, -np.inf, len(places) - 1))
    for index, option in enumerate(options):
        for other, sign, most in ((option.needs, -1.0, 0), (option.excludes, 1.0, 1)):
            if other is not None:
                row = csr_array(([1.0, sign], ([0, 0], [index, starts[other[0]] + other[1]])), (1, len(options)))
                rows.append(LinearConstraint(row, -np.inf, most))
    losses = np.array([option.loss for option in options])
    size = max(float(np.abs(losses).max()), 1e-12)
    settings = {"time_limit": _SECONDS, "mip_rel_gap": 0.0}
    whole = np.ones(len(options))
    solved = milp(losses / size, constraints=rows, integrality=whole, bounds=Bounds(0, 1), options=settings)
    if solved.status == 2:
        return None
    if solved.status != 0 or solved.x is None:
        raise InfrastructureFailed(f"the solver stopped: {solved.message}")
    return tuple(int(np.argmax(solved.x[a:b])) for a, b in pairwise(starts))


def total(places: Sequence[Sequence[Option]], chosen: Sequence[int], base: Mapping[str, float]) -> dict[str, float]:
    """Returns loss and metrics of a choice, as sums."""
    picked = [place[index] for place, index in zip(places, chosen, strict=True)]
    metrics = {name: value + sum(option.costs.get(name, 0.0) for option in picked) for name, value in base.items()}
    return {"loss": sum(option.loss for option in picked)} | metrics
