"""Runs a proposer on a problem, with one worker or several that finish in any order."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.search.problems import BUDGETS, Problem
from nas.core.layout import Layout
from nas.search.proposers import Observation, Proposal, Sampler, make_proposer
from nas.search.proposers.ehvi import EhviSearch
from nas.search.proposers.surrogate import Forecast

ENGINES = {
    "random": ("random", "gated"),
    "random-gated": ("random", "cheap"),
    "evolution": ("evolution", "gated"),
    "star": ("cache-evolution", "ungated"),
    "nsga2": ("optuna-nsga2", "gated"),
    "tpe": ("optuna-tpe", "gated"),
    "gp": ("optuna-gp", "gated"),
    "ehvi": ("ehvi", "gated"),
    "oracle": ("oracle", "gated"),
}
"""Name in results -> proposer, and how it is judged: 'gated' learns no quality of what breaks a budget, 'ungated' does;
'cheap' as gated, and such a layout counts as a tenth of an evaluation, since it is measured but not trained."""
ORACLE = "oracle"
"""`ehvi` with the truth in place of its surrogate: what its pool and acquisition reach without a model's errors."""
_CHEAP = 0.1
_SURE = 1e-6
"""Standard deviation of the oracle's forecasts."""


@dataclass(frozen=True)
class Run:
    """The stored result of a run.

    Args:
        points: noise-free coordinates in the order of completion; None for what truly breaks a budget.
        costs: evaluations spent after each.
        cpu: seconds per proposal.
    """

    points: list[list[float] | None]
    costs: list[float]
    cpu: float

    def to_json(self) -> dict[str, Any]:
        return {"points": self.points, "costs": self.costs, "cpu": self.cpu}


class OracleSearch(EhviSearch):
    """`EhviSearch` that knows the noise-free figures of every layout, once a few are observed."""

    engine = ORACLE

    def __init__(self, problem: Problem) -> None:
        super().__init__(Sampler(problem.space), problem.seed)
        self._problem = problem

    def seeds(self) -> list[Layout]:
        return []

    def surrogate(self) -> Oracle:  # type: ignore[override] # all that the search uses of it is `predict`
        return Oracle(self._problem)


class Oracle:
    """Forecasts the truth."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def predict(self, layouts: Sequence[Layout]) -> tuple[Forecast, Forecast]:
        """Returns forecasts of objectives and constraints, nearly without deviations."""
        truth = [self._problem.truth(layout) for layout in layouts]
        objectives = np.array([[figures[name] for name in self._problem.axes] for figures in truth])
        excess = np.array([[figures[name] - self._problem.limits[name] for name in BUDGETS] for figures in truth])
        return Forecast(objectives, np.full(objectives.shape, _SURE)), Forecast(excess, np.full(excess.shape, _SURE))


def run(problem: Problem, engine: str, evaluations: int, workers: int = 1) -> Run:
    """Runs until `evaluations` are complete."""
    proposer_name, mode = ENGINES[engine]
    sampler = Sampler(problem.space)
    proposer = OracleSearch(problem) if engine == ORACLE else make_proposer(sampler, proposer_name, problem.seed)
    proposer.fix_reference_point(problem.reference_point)
    clock = np.random.default_rng([89, problem.seed])
    points: list[list[float] | None] = []
    costs = [0.0]
    start, measuring = time.process_time(), 0.0
    waiting: list[tuple[float, int, Proposal]] = []
    now, proposed = 0.0, 0
    while costs[-1] < evaluations:
        while len(waiting) < workers and (proposals := proposer.ask(1)):
            heapq.heappush(waiting, (now + float(clock.lognormal(0.0, 0.5)), proposed, proposals[0]))
            proposed += 1
        if not waiting:
            break  # the space has no more layouts
        now, _, proposal = heapq.heappop(waiting)
        at = time.process_time()
        observation = problem.observe(proposal.layout, gated=mode != "ungated")
        points.append(problem.point(proposal.layout))
        measuring += time.process_time() - at
        proposer.tell(observation)
        costs.append(costs[-1] + _cost(observation, mode))
    return Run(points, costs[1:], (time.process_time() - start - measuring) / max(1, proposed))


def _cost(observation: Observation, mode: str) -> float:
    return _CHEAP if mode == "cheap" and observation.status == "infeasible" else 1.0
