"""The fidelity ladder: who climbs from one rung to the next.

Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning") with two
changes: candidates are compared by their place on the front (quality at that rung with their measured device figures),
and while more candidates are expected a rung rounds its share down, so the first arrival does not climb unopposed. A
rung that keeps a number of candidates waits for all of them. Reference layouts climb by themselves and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nas.core.quality_config import Rung

Coordinates = Sequence[float]
Order = Callable[[Sequence[Coordinates]], list[int]]
"""Indices of candidates, best first."""
Verdict = Literal["promote", "stop"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a trial that finished `rung`."""

    trial: int
    rung: int
    verdict: Verdict


@dataclass
class Ladder:
    """Who waits at which rung. Deterministic: decisions depend on the arrivals so far alone.

    Args:
        rungs: from the space; the last one promotes nobody.
        order: ranks the candidates of one rung.
    """

    rungs: Sequence[Rung]
    order: Order
    closed: bool = False
    """Set once no more candidates will be proposed."""
    _below: dict[int, int] = field(default_factory=dict)
    """Trials on their way -> the rung they will finish next."""
    _finished: list[dict[int, Coordinates]] = field(default_factory=list)
    _decided: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._finished = [{} for _ in self.rungs]

    def enter(self, trial: int) -> None:
        """A candidate was proposed."""
        self._below[trial] = 0

    def leave(self, trial: int) -> None:
        """A candidate is out: infeasible, failed, or cancelled."""
        self._below.pop(trial, None)

    def finish(self, trial: int, rung: int, coordinates: Coordinates) -> None:
        """A candidate finished a rung; lower coordinates are better."""
        self._below.pop(trial, None)
        self._finished[rung][trial] = coordinates

    def recall(self, trial: int, rung: int, verdict: Verdict) -> None:
        """A decision that an earlier process made stands."""
        self._take(Decision(trial, rung, verdict))

    def decisions(self) -> list[Decision]:
        """What can be decided now and was not before, lowest rung first."""
        made: list[Decision] = []
        for rung in range(len(self.rungs) - 1):
            made += self._decide(rung)
        return made

    def _decide(self, rung: int) -> list[Decision]:
        finished = self._finished[rung]
        last_call = self.closed and not any(at <= rung for at in self._below.values())
        trials = list(finished)
        best = [trials[i] for i in self.order([finished[t] for t in trials])][: self._places(rung, last_call)]
        verdicts = [Decision(trial, rung, "promote") for trial in best]
        if last_call:
            verdicts += [Decision(trial, rung, "stop") for trial in trials if trial not in best]
        made = [decision for decision in verdicts if (decision.trial, rung) not in self._decided]
        for decision in made:
            self._take(decision)
        return made

    def _take(self, decision: Decision) -> None:
        self._decided.add((decision.trial, decision.rung))
        if decision.verdict == "promote":
            self._below[decision.trial] = decision.rung + 1

    def _places(self, rung: int, last_call: bool) -> int:
        count, keep = len(self._finished[rung]), self.rungs[rung].keep
        if last_call or keep is None:
            return self.rungs[rung].promoted(count)
        return 0 if isinstance(keep, int) else math.floor(keep * count)
