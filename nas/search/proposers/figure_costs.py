"""The amounts of work and memory that each figure of a device depends on, by name of the objective or constraint."""

from __future__ import annotations

from collections.abc import Iterable

from nas.core.metrics import METRICS
from nas.core.space import Budget, Objective, SearchSpace
from nas.search.proposers.hardware import Costs

_ON = " on "
"""Separates budget and device in a constraint's name, as in 'ttft@chat on laptop/llama.cpp'."""


def costs_of(space: SearchSpace, figure: Budget | Objective | None) -> Costs:
    """Returns the amounts that a figure depends on; of an unknown one, all amounts under the first workload."""
    kinds = [block.kind for block in space.mixers + space.ffn]
    unit = METRICS[figure.metric].unit if figure else ""
    vectors, towers = len(space.model.vectors.choices) > 1, len(space.model.tower.choices) > 1
    return Costs(space.workloads[_workload(space, figure)], kinds, unit, space.quantisations, vectors, towers)


def of_proxy(space: SearchSpace, constraint: str) -> bool:
    """Returns whether a constraint is a budget on quality, which no hardware model forecasts."""
    named = (budget for budget in space.budgets if _budget(budget.name) == _budget(constraint))
    return any(METRICS[budget.metric].source == "proxy" for budget in named)


def costs_by_name(space: SearchSpace, constraints: Iterable[str]) -> dict[str, Costs]:
    """Returns the amounts of each objective that is no quality and of each constraint, by name.

    Figures of one workload share what they count.
    """
    budgets = {_budget(budget.name): budget for budget in space.budgets}
    figures: dict[str, Budget | Objective | None] = {name: budgets.get(_budget(name)) for name in sorted(constraints)}
    for objective in space.objectives:
        if METRICS[objective.metric].source != "proxy" and METRICS[objective.metric].transform == "log":
            figures[objective.name] = objective
    shared: dict[str, Costs] = {}
    costs = {}
    for name, figure in figures.items():
        counted = shared.setdefault(_workload(space, figure), costs_of(space, figure))
        costs[name] = counted.of(METRICS[figure.metric].unit if figure else "")
    return costs


def _workload(space: SearchSpace, figure: Budget | Objective | None) -> str:
    return (figure.workload if figure else None) or space.measured[0]


def _budget(constraint: str) -> str:
    """Returns the name of a constraint's budget, without the device."""
    return constraint.partition(_ON)[0].partition("/")[0]
