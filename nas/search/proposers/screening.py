"""Screening: layouts that would break a budget by the hardware model are not proposed. Forecasts enter no log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.space import Budget, Objective, SearchSpace
from nas.search.proposers.api import Observation
from nas.search.proposers.gp import Array
from nas.search.proposers.hardware import MIN_POINTS, Costs, HardwareModel, Measured, better

TRUSTED = 8
"""Measurements of a budget's figure on a device from which its model is used; 3 where another device has a model."""
_ON = " on "
"""Separates budget and device in a constraint's name, as in 'ttft@chat on laptop/llama.cpp'."""


class Screen:
    """Forecasts of the figures of all budgets but those on quality, from observations.

    Each model learns log(figure / limit), which differs from log(figure) by a constant. A constraint with few
    measurements starts from the model of the same budget on another device, of this study or an earlier one.

    Args:
        space: its budgets, and the workloads that they name.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._budgets: Mapping[str, Budget] = {_budget(budget.name): budget for budget in space.budgets}
        self._costs: dict[str, Costs] = {}
        self.models: dict[str, HardwareModel] = {}
        """Constraint -> model of log(figure / limit), of those with enough measurements."""

    def chances(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L] the least chance over all budgets that a layout keeps it; 1 without a model."""
        from scipy.special import ndtr  # type: ignore[import-untyped]

        least = np.ones(len(layouts))
        for model in self.models.values():
            found = model.predict(layouts)
            least = np.minimum(least, ndtr(-found.mean / found.sd))
        return least

    def learn(self, told: Sequence[Observation], earlier: Sequence[Observation]) -> None:
        """Fits all models.

        Args:
            told: observations of this study, in an order that does not depend on time.
            earlier: of other studies.
        """
        own = self._by_constraint(told)
        known = self._by_constraint(earlier) | own
        alone = {
            name: HardwareModel(self._costs_of(name), measured)
            for name, measured in known.items()
            if len(measured.layouts) >= TRUSTED
        }
        self.models = {}
        for name, measured in own.items():
            base = _nearest(name, alone)
            if base is not None and len(measured.layouts) >= MIN_POINTS:
                moved = base.moved(measured)
                self.models[name] = better(alone[name], moved) if name in alone else moved
            elif name in alone:
                self.models[name] = alone[name]

    def _by_constraint(self, observations: Sequence[Observation]) -> dict[str, Measured]:
        names = sorted({name for seen in observations for name in seen.constraints})
        found = {}
        for name in names:
            if of_proxy(self._space, name):
                continue
            seen = [each for each in observations if name in each.constraints]
            logs = np.array([each.constraints[name] for each in seen])
            found[name] = Measured(
                [each.layout for each in seen], logs, np.array([each.noise.get(name, 0.0) for each in seen])
            )
        return found

    def _costs_of(self, constraint: str) -> Costs:
        name = _budget(constraint)
        if name not in self._costs:
            self._costs[name] = costs_of(self._space, self._budgets.get(name))
        return self._costs[name]


def costs_of(space: SearchSpace, figure: Budget | Objective | None) -> Costs:
    """Returns the amounts that a figure depends on; of an unknown one, all amounts under the first workload."""
    kinds = [block.kind for block in space.mixers + space.ffn]
    return Costs(space.workloads[_workload(space, figure)], kinds, METRICS[figure.metric].unit if figure else "")


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
    for each in space.objectives:
        if METRICS[each.metric].source != "proxy" and METRICS[each.metric].transform == "log":
            figures[each.name] = each
    shared: dict[str, Costs] = {}
    found = {}
    for name, figure in figures.items():
        counted = shared.setdefault(_workload(space, figure), costs_of(space, figure))
        found[name] = counted.of(METRICS[figure.metric].unit if figure else "")
    return found


def _workload(space: SearchSpace, figure: Budget | Objective | None) -> str:
    return (figure.workload if figure else None) or space.measured[0]


def _nearest(constraint: str, models: Mapping[str, HardwareModel]) -> HardwareModel | None:
    """Returns the model of the same budget on another device: of the same runtime if any, with most measurements."""
    others = [other for other in models if other != constraint and _budget(other) == _budget(constraint)]
    runtime = constraint.rpartition("/")[2]
    others.sort(key=lambda other: (other.rpartition("/")[2] != runtime, -len(models[other].measured.layouts), other))
    return models[others[0]] if others else None


def _budget(constraint: str) -> str:
    """Returns the name of a constraint's budget, without the device."""
    return constraint.partition(_ON)[0].partition("/")[0]
