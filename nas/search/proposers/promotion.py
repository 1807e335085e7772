"""Decides which trials are promoted from one rung of the quality ladder to the next.

A `Ladder` holds the results of a study's trials by rung and promotes the best share of each rung (asynchronous
successive halving; Li et al. 2020, "A system for massively parallel hyperparameter tuning"). Needs neither a database
nor Ray; `nas.search.study.promotion` drives it in a running study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from nas.core.pareto import ranks
from nas.core.quality_config import Rung

_SLOPE_ROWS = 2.0
"""Observations that the prior slope between two rungs is worth."""
_MEAN_ROWS = 0.01
"""Observations that 'no shift between rungs' is worth: rungs evaluate different things."""
_PRIOR_DOF = 4.0
"""Degrees of freedom of the prior of a step's variance."""
_PRIOR_SHARE = 0.5
"""Prior deviation of a step, as a share of the spread of candidates at its lower rung."""

Verdict = Literal["promote", "stop"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict on a trial that finished `rung`, and its reason."""

    trial: int
    rung: int
    verdict: Verdict
    why: str = field(default="", compare=False)


@dataclass
class Ladder:
    """The trials of a study, by rung.

    Example:
        >>> ladder = Ladder((Rung(name="short", lm_steps=50, keep=0.5), Rung(name="long", lm_steps=200)))
        >>> for trial, quality in enumerate((-1.02, -0.98)):
        ...     ladder.enter(trial)
        ...     ladder.finish(trial, 0, (quality,))
        >>> ladder.decisions()
        [Decision(trial=0, rung=0, verdict='promote', why='')]

    Args:
        rungs: from the space; the last one promotes nothing.
    """

    rungs: Sequence[Rung]
    closed: bool = False
    """Set once no more candidates will be proposed."""
    on_way: dict[int, int] = field(default_factory=dict)
    """Unfinished trials -> the rung they will finish next."""
    arrived: list[dict[int, tuple[float, ...]]] = field(init=False)
    """For every rung, trial -> its minimised coordinates, quality first, in the order of arrival."""
    references: list[dict[int, tuple[float, ...]]] = field(init=False)
    """The same of the reference layouts, which are always promoted and compete with no trial."""
    decided: dict[tuple[int, int], Verdict] = field(default_factory=dict)
    """(trial, rung) -> verdict."""

    def __post_init__(self) -> None:
        self.arrived = [{} for _ in self.rungs]
        self.references = [{} for _ in self.rungs]

    @property
    def top(self) -> int:
        """Index of the top rung."""
        return len(self.rungs) - 1

    def enter(self, trial: int) -> None:
        """Adds a candidate."""
        self.on_way[trial] = 0

    def leave(self, trial: int) -> None:
        """Removes a candidate that ended, complete or not."""
        self.on_way.pop(trial, None)

    def finish(self, trial: int, rung: int, coordinates: tuple[float, ...], *, reference: bool = False) -> None:
        """Records that a candidate, or a reference layout, finished a rung."""
        if reference:
            self.references[rung][trial] = coordinates
        else:
            self.arrived[rung][trial] = coordinates
            if rung < self.top:
                self.on_way.pop(trial, None)

    def recall(self, trial: int, rung: int, verdict: Verdict) -> None:
        """Takes over a decision of an earlier process."""
        self._record(Decision(trial, rung, verdict))

    def waiting(self, rung: int) -> list[int]:
        """Returns the trials that finished `rung` and have no verdict, in the order of arrival."""
        return [trial for trial in self.arrived[rung] if (trial, rung) not in self.decided]

    def noise(self, rung: int) -> float:
        """Returns the standard deviation of quality at `rung` as a prediction of quality at the top.

        A shift that all trials share does not count. It is more than the spread over seeds: a cheap rung errs by
        layout, and more seeds would not remove that.
        """
        both = zip(self.arrived[rung:], self.references[rung:], strict=True)
        qualities = [{trial: point[0] for trial, point in {**new, **old}.items()} for new, old in both]
        if not all(qualities[:-1]):
            return 0.0
        return math.sqrt(math.fsum(step_variance(below, above) for below, above in pairwise(qualities)))

    def decisions(self) -> list[Decision]:
        """Makes and returns all decisions that are possible now, lowest rung first.

        Where no further trial will reach a rung, every trial that waits there gets a verdict.
        """
        decisions: list[Decision] = []
        for rung in range(self.top):
            last_call = self.closed and not any(at <= rung for at in self.on_way.values())
            for trial in self._promoted(rung, last_call):
                if (trial, rung) not in self.decided:
                    decisions.append(self._record(Decision(trial, rung, "promote")))
            for trial in self.waiting(rung) if last_call else ():
                decisions.append(self._record(Decision(trial, rung, "stop", "others of the rung were better")))
        return decisions

    def _promoted(self, rung: int, last_call: bool) -> list[int]:
        """Returns the trials of a rung that its quota admits now, the best first."""
        arrived, keep = self.arrived[rung], self.rungs[rung].keep
        trials = list(arrived)
        if last_call or keep is None:
            quota = self.rungs[rung].promoted(len(trials))
        else:
            quota = 0 if isinstance(keep, int) else math.floor(keep * len(trials))
        return [trials[index] for index in promotion_order([*arrived.values()])[:quota]]

    def _record(self, decision: Decision) -> Decision:
        self.decided[decision.trial, decision.rung] = decision.verdict
        if decision.verdict == "promote":
            self.on_way[decision.trial] = decision.rung + 1
        return decision


def promotion_order(points: Sequence[Sequence[float]]) -> list[int]:
    """Returns indices in order of promotion: by non-dominated rank, then by the first coordinate (minus quality)."""
    if not points:
        return []
    rank = ranks(np.asarray(points, dtype=float))
    return sorted(range(len(points)), key=lambda i: (int(rank[i]), points[i][0], i))


def step_variance(below: Mapping[int, float], above: Mapping[int, float]) -> float:
    """Returns the variance of quality at a rung around a linear prediction from quality at the rung below.

    A Bayesian regression on the trials that finished both: with few of them, the prior is that a step changes no
    quality, with a deviation of `_PRIOR_SHARE` of the spread at the lower rung.

    Args:
        below: trial -> quality at the lower rung; at least one.
        above: the same at the upper rung.
    """
    centre = math.fsum(below.values()) / len(below)
    width = max(math.sqrt(math.fsum((value - centre) ** 2 for value in below.values()) / len(below)), 1e-6)
    both = sorted(below.keys() & above.keys())
    x, y = np.array([below[trial] for trial in both]), np.array([above[trial] for trial in both])
    rows = np.stack([np.ones_like(x), x - centre], axis=1)
    prior = np.diag([_MEAN_ROWS if both else 1.0, _SLOPE_ROWS * width**2])
    start = np.array([centre, 1.0])
    mean = np.linalg.solve(prior + rows.T @ rows, prior @ start + rows.T @ y)
    residual, moved = y - rows @ mean, mean - start
    dof = _PRIOR_DOF + len(both)
    squares = _PRIOR_DOF * (_PRIOR_SHARE * width) ** 2 + float(residual @ residual) + float(moved @ prior @ moved)
    return squares / (dof - 2.0)
