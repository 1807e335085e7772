"""Simulates a study on a problem with rungs, with several asynchronous workers."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.search.rungs import CONFIRM_S, ENTER_S, RUNGS, RungProblem
from nas.core.layout import Layout
from nas.core.pareto import hypervolume
from nas.core.quality_config import Rung
from nas.core.space import SearchSettings
from nas.search.proposers import Observation, Sampler, make_proposer
from nas.search.proposers.promotion import Ladder

POLICIES: Mapping[str, tuple[Rung, ...]] = {
    "single": tuple(rung.model_copy(update={"keep": None}) for rung in RUNGS),
    "halving": RUNGS,
}
"""Name in results -> ladder. 'single': all that pass the gate are trained to the top."""
_ENTER, _CONFIRM = -1, len(RUNGS)


@dataclass
class Study:
    """A study with a budget of worker seconds.

    Args:
        rungs: the problem.
        policy: in `POLICIES`.
        engine: proposer.
        pool: candidates scored per proposal.
        workers: stages under way at a time.
    """

    rungs: RungProblem
    policy: str
    engine: str
    pool: int
    workers: int
    spent: float = 0.0
    points: list[tuple[float, list[float] | None]] = field(default_factory=list)
    """Seconds spent and noise-free coordinates, of each complete trial."""
    reached: Counter[str] = field(default_factory=Counter)
    """Stage -> trials that went through it."""

    def __post_init__(self) -> None:
        problem = self.rungs.problem
        space = problem.space.model_copy(update={"search": SearchSettings(pool=self.pool)})
        self._proposer = make_proposer(Sampler(space), self.engine, problem.seed)
        self._proposer.fix_reference_point(problem.reference_point)
        self._ladder = Ladder(POLICIES[self.policy])
        self._layouts: list[Layout] = []
        self._observations: list[Observation] = []
        self._ready: deque[tuple[int, int]] = deque()
        self._running: list[tuple[float, int, int, float]] = []
        for name, layout in enumerate(problem.space.references.layouts().values()):
            for rung in range(len(RUNGS)):
                self._ladder.finish(-1 - name, rung, self._arrival(layout, rung), reference=True)

    def run(self, seconds: float) -> Study:
        """Runs until `seconds` of work are done."""
        now = 0.0
        while True:
            while len(self._running) < self.workers and (job := self._next()):
                trial, stage = job
                took = self.rungs.seconds(self._layouts[trial], self._seconds(stage))
                heapq.heappush(self._running, (now + took, trial, stage, took))
            if not self._running:
                return self
            now, trial, stage, took = heapq.heappop(self._running)
            self.spent += took
            if self.spent > seconds:
                return self
            self._finish(trial, stage)
            for decision in self._ladder.decisions():
                if decision.verdict == "promote":
                    self._ready.append((decision.trial, decision.rung + 1))
                else:
                    self._tell(decision.trial, "stopped")

    def _next(self) -> tuple[int, int] | None:
        """Returns a promoted trial if there is one, else a new one."""
        if self._ready:
            return self._ready.popleft()
        proposals = self._proposer.ask(1)
        if not proposals:
            return None
        self._layouts.append(proposals[0].layout)
        self._observations.append(Observation(proposals[0].layout, "running"))
        self._ladder.enter(len(self._layouts) - 1)
        return len(self._layouts) - 1, _ENTER

    def _finish(self, trial: int, stage: int) -> None:
        layout = self._layouts[trial]
        self.reached[_name(stage)] += 1
        if stage == _ENTER:
            observation = self.rungs.problem.observe(layout)
            device_figures = {name: value for name, value in observation.objectives.items() if name != "quality"}
            broken = observation.status == "infeasible"
            self._observations[trial] = Observation(layout, "running", device_figures, observation.constraints)
            self._tell(trial, "infeasible" if broken else "running")
            if broken:
                self._ladder.leave(trial)
            else:
                self._ready.append((trial, 0))
        elif stage == _CONFIRM:
            self._ladder.leave(trial)
            self._tell(trial, "complete")
            self.points.append((self.spent, self.rungs.problem.point(layout)))
        else:
            observation = self._observations[trial]
            values = {**observation.objectives, "quality": self.rungs.quality(layout, stage)}
            self._ladder.finish(trial, stage, self._arrival(layout, stage))
            noise = {"quality": math.hypot(self.rungs.sd(stage), self._ladder.noise(stage))}
            self._observations[trial] = Observation(layout, "running", values, observation.constraints, stage, noise)
            self._tell(trial, "running")
            if stage == self._ladder.top:
                self._ready.append((trial, _CONFIRM))

    def _seconds(self, stage: int) -> float:
        return (*self.rungs.rung_s, CONFIRM_S, ENTER_S)[stage]

    def _tell(self, trial: int, status: Any) -> None:
        observation = self._observations[trial]
        self._proposer.tell(
            Observation(
                observation.layout,
                status,
                observation.objectives,
                observation.constraints,
                observation.rung,
                observation.noise,
            )
        )

    def _arrival(self, layout: Layout, rung: int) -> tuple[float, ...]:
        problem = self.rungs.problem
        others = problem.observe(layout, gated=False).objectives
        rest = tuple(others[name] for name in problem.axes[1:])
        return (self.rungs.quality(layout, rung), *rest)

    def volume(self, seconds: float) -> float:
        """Returns the noise-free hypervolume of trials complete after so many seconds."""
        problem = self.rungs.problem
        inside = [point for spent, point in self.points if point is not None and spent <= seconds]
        return hypervolume(inside, [problem.reference_point[name] for name in problem.axes]) if inside else 0.0


def _name(stage: int) -> str:
    return (*(rung.name for rung in RUNGS), "complete", "entered")[stage]
