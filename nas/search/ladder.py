"""The fidelity ladder: who is on which rung, and what a policy decides about them.

Nobody waits for a whole rung: each arrival is an occasion to decide. What is decided follows from what the ladder was
told, and from nothing else, so a log that is told again leads to the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nas.core.quality_config import Rung
from nas.search.rung_model import learn_steps
from nas.search.stage_costs import StageCosts

Verdict = Literal["promote", "stop"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A trial that finished a rung.

    Args:
        coordinates: all minimised coordinates; where quality is one, it comes first.
        sd: standard deviation of the quality over seeds.
    """

    coordinates: tuple[float, ...]
    sd: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a trial that finished `rung`, and why."""

    trial: int
    rung: int
    verdict: Verdict
    why: str = field(default="", compare=False)


class Policy(Protocol):
    """Decides who climbs. It may keep nothing of its own: all it knows is the ladder."""

    def decide(self, ladder: Ladder, rung: int, last_call: bool) -> Decision | None:
        """The next decision about a trial that waits at `rung`; None where all that do shall wait on.

        With `last_call`, nobody else will arrive there, so everyone gets a verdict.
        """


@dataclass
class Ladder:
    """Who waits at which rung.

    Args:
        rungs: from the space; the last one promotes nobody.
        policy: decides.
    """

    rungs: Sequence[Rung]
    policy: Policy
    closed: bool = False
    """Set once no more candidates will be proposed."""
    reference_point: tuple[float, ...] | None = None
    """The worst corner, in the order of `Arrival.coordinates`; None until it is fixed."""
    costs: StageCosts = field(init=False)
    on_way: dict[int, int] = field(default_factory=dict)
    """Trials on their way -> the rung they will finish next."""
    arrived: list[dict[int, Arrival]] = field(init=False)
    """For every rung, trial -> how it arrived, in that order."""
    references: list[dict[int, Arrival]] = field(init=False)
    """The same of the reference layouts, which climb by themselves and compete with nobody."""
    complete: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Trial -> coordinates as confirmed."""
    forecasts: dict[int, float] = field(default_factory=dict)
    """Trial -> the quality that was forecast of it when it was proposed."""
    decided: dict[tuple[int, int], Verdict] = field(default_factory=dict)
    """(trial, rung) -> what was decided."""

    revision: int = 0
    """Grows with all that is told and promoted, so that a policy knows what it worked out before."""

    def __post_init__(self) -> None:
        self.costs = StageCosts(self.rungs)
        self.arrived = [{} for _ in self.rungs]
        self.references = [{} for _ in self.rungs]

    @property
    def top(self) -> int:
        """Index of the top rung."""
        return len(self.rungs) - 1

    def enter(self, trial: int, forecast: float | None = None) -> None:
        """A candidate was proposed, of which its proposer forecast a (minimised) quality, or nothing."""
        self.revision += 1
        self.on_way[trial] = 0
        if forecast is not None:
            self.forecasts[trial] = forecast

    def leave(self, trial: int) -> None:
        """A candidate is out or complete; whoever ends leaves."""
        self.revision += 1
        self.on_way.pop(trial, None)

    def finish(self, trial: int, rung: int, arrival: Arrival, *, reference: bool = False) -> None:
        """A candidate, or a reference layout, finished a rung."""
        self.revision += 1
        if reference:
            self.references[rung][trial] = arrival
        else:
            self.arrived[rung][trial] = arrival
            if rung < self.top:
                self.on_way.pop(trial, None)

    def recall(self, trial: int, rung: int, verdict: Verdict) -> None:
        """A decision that an earlier process made stands."""
        self._take(Decision(trial, rung, verdict))

    def waiting(self, rung: int) -> list[int]:
        """Those that finished `rung` and have no verdict, in the order they came."""
        return [trial for trial in self.arrived[rung] if (trial, rung) not in self.decided]

    def qualities(self) -> list[dict[int, float]]:
        """For every rung, trial -> quality; references are among them."""
        both = zip(self.arrived, self.references, strict=True)
        return [{trial: seen.coordinates[0] for trial, seen in {**own, **ref}.items()} for own, ref in both]

    def noise(self, rung: int) -> float:
        """Standard deviation of what quality at `rung` says of quality at the top, besides a shift that all share.

        That is more than its spread over seeds: a cheap rung errs by layout, and more seeds would not cure it.
        """
        seen = self.qualities()[rung:]
        return math.sqrt(math.fsum(step.variance for step in learn_steps(seen, {}))) if all(seen[:-1]) else 0.0

    def decisions(self) -> list[Decision]:
        """What can be decided now and was not before, lowest rung first."""
        made: list[Decision] = []
        for rung in range(self.top):
            last_call = self.closed and not any(at <= rung for at in self.on_way.values())
            while self.waiting(rung) and (decision := self.policy.decide(self, rung, last_call)):
                self._take(decision)
                made.append(decision)
        return made

    def _take(self, decision: Decision) -> None:
        self.decided[decision.trial, decision.rung] = decision.verdict
        if decision.verdict == "promote":
            self.revision += 1
            self.on_way[decision.trial] = decision.rung + 1
