"""One study's ladder: told what trials learn, read back from the log, and waking the trials that wait for a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.search.halving import Shares
from nas.search.ladder import Arrival, Decision, Ladder, Policy, Verdict
from nas.search.promotion import ByValue, earned
from nas.search.stage_costs import StageCosts
from nas.service.scales import Scales
from nas.service.trial_run import TrialRun

POLICIES: dict[str, type[Policy]] = {"value": ByValue, "share": Shares}
"""`quality.promote` of a space -> who decides."""


class Climb:
    """Who climbs in one study.

    After a restart nothing is decided before every arrival that the log tells of has been seen again; they are then
    taken in the order of the log. So what was not decided yet is decided as if there had been no restart.

    Args:
        space: the study's.
        scales: turns figures into coordinates.
        spent: trial -> seconds that its stages took so far.
    """

    def __init__(self, space: SearchSpace, scales: Scales, spent: Callable[[int], float]) -> None:
        self._scales, self._spent = scales, spent
        self._ladder = Ladder(space.quality.rungs, POLICIES[space.quality.promote]())
        self._waiting: dict[tuple[int, int], tuple[TrialRun, asyncio.Future[Decision]]] = {}
        self._recalled: dict[tuple[int, int], Verdict] = {}
        self._expected: dict[tuple[int, int], Arrival | None] = {}
        """Arrivals that the log tells of, in its order; None until this process has seen them again."""
        self._left: set[int] = set()
        self._paid: dict[int, float] = {}

    @property
    def closed(self) -> bool:
        """Whether no more candidates will be proposed."""
        return self._ladder.closed

    @property
    def recalling(self) -> bool:
        """Whether arrivals that the log tells of are still to be seen again."""
        return bool(self._expected)

    def recall(self, own: set[int], log: list[Event]) -> None:
        """Reads from the log who arrived where, and what was decided; `own` are trials that are no references."""
        for event in log:
            if event.trial is None or event.trial not in own:
                continue
            rung: int = event.payload.get("rung", 0)
            if event.kind is EventKind.TRAINING and rung > 0:
                self._recalled[event.trial, rung - 1] = "promote"
            elif event.kind is EventKind.STOPPED:
                self._recalled[event.trial, rung] = "stop"
            elif event.payload.get("what") == "quality" and rung < self._ladder.top:
                self._expected[event.trial, rung] = None

    def enter(self, run: TrialRun, forecast: float | None) -> None:
        """A candidate was proposed, of which such a (minimised) quality was forecast."""
        if run.reference is None:
            self._left.discard(run.number)
            self._ladder.enter(run.number, forecast)

    def close(self) -> None:
        """No more candidates will be proposed."""
        self._ladder.closed = True
        self.decide()

    def learn(self, run: TrialRun, status: str) -> None:
        """Takes what a trial has come to know, and what its stages took."""
        costs, reference = self._ladder.costs, run.reference is not None
        if status == "rung":
            assert run.rung is not None
            costs.train(run.number, run.rung, self._pay(run))
            if reference or run.rung == self._ladder.top:  # with nothing to wait for
                self._ladder.finish(run.number, run.rung, self._arrival(run), reference=reference)
        elif reference:
            self._pay(run)
            self.decide()  # the reference point may be fixed by now
        elif status == "complete":
            costs.confirm(run.number, self._pay(run))
            if run.number in self._scales.complete:
                self._ladder.complete[run.number] = tuple(self._scales.coordinates(run))
        elif run.rung is None and status in ("gated", "infeasible"):
            costs.enter(run.number, self._pay(run))

    @property
    def costs(self) -> StageCosts:
        """What stages take."""
        return self._ladder.costs

    def rate(self) -> float:
        """Hypervolume that a second earns, by what is known now."""
        return earned(self._ladder)

    def noise(self, rung: int) -> float:
        """What quality at a rung is worth less, as a standard deviation, than quality at the top."""
        return self._ladder.noise(rung) if self._scales.reference_point is not None else 0.0

    def ended(self, run: TrialRun) -> None:
        """A trial is out or complete."""
        for here in [here for here, seen in self._expected.items() if here[0] == run.number and seen is None]:
            del self._expected[here]
        self._left.add(run.number)
        self._ladder.leave(run.number)
        self._take_expected()
        self.decide()

    async def climbs(self, run: TrialRun, rung: int) -> Decision:
        """What becomes of a trial that finished a rung; waits until that is decided."""
        here = run.number, rung
        if verdict := self._recalled.get(here):
            self._arrive(here, self._arrival(run))
            return Decision(*here, verdict)
        decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[here] = run, decision
        self._arrive(here, self._arrival(run))
        return await decision

    def decide(self) -> None:
        """Passes on what can be decided."""
        if self._expected:
            return
        self._ladder.reference_point = self._scales.corner()
        for decision in self._ladder.decisions():
            run, waiting = self._waiting.pop((decision.trial, decision.rung), (None, None))
            if run is not None and waiting is not None and not waiting.done():
                waiting.set_result(decision)
                run.waiting = False

    def _arrive(self, here: tuple[int, int], arrival: Arrival) -> None:
        if self._expected:
            self._expected[here] = arrival
            self._take_expected()
        else:
            self._finish(here, arrival)
        self.decide()

    def _take_expected(self) -> None:
        seen = {here: arrival for here, arrival in self._expected.items() if arrival is not None}
        if len(seen) < len(self._expected):
            return
        self._expected = {}
        for here, arrival in seen.items():
            self._finish(here, arrival)
        for trial in self._left:
            self._ladder.leave(trial)

    def _finish(self, here: tuple[int, int], arrival: Arrival) -> None:
        self._ladder.finish(*here, arrival)
        if verdict := self._recalled.get(here):
            self._ladder.recall(*here, verdict)

    def _arrival(self, run: TrialRun) -> Arrival:
        return Arrival(tuple(self._scales.coordinates(run)), run.quality.sd if run.quality else 0.0)

    def _pay(self, run: TrialRun) -> float:
        """Seconds since the last time."""
        total = self._spent(run.number)
        paid, self._paid[run.number] = self._paid.get(run.number, 0.0), total
        return total - paid
