"""Promotion of one study's trials: takes their results, and wakes waiting trials with decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.search.proposers.promotion import Arrival, ByValue, Decision, Ladder, Policy, Shares, Verdict
from nas.search.study.events import QUALITY
from nas.search.study.running import TrialRun
from nas.search.study.scales import Scales

POLICIES: dict[str, type[Policy]] = {"value": ByValue, "share": Shares}
"""`quality.promote` of a space -> its policy."""


class PromotionController:
    """Decides which trials of one study are promoted.

    After a restart nothing is decided before every arrival in the log has been seen again; they are then taken in the
    order of the log. So what was undecided is decided as it would have been without the restart.

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
        """Arrivals in the log, in its order; None until this process has seen them again."""
        self._ended: set[int] = set()
        self._counted: dict[int, float] = {}

    @property
    def closed(self) -> bool:
        """True if no more candidates will be proposed."""
        return self._ladder.closed

    @property
    def recalling(self) -> bool:
        """True if arrivals in the log are still to be seen again."""
        return bool(self._expected)

    def recall(self, own: set[int], log: list[Event]) -> None:
        """Reads arrivals and decisions from the log; `own` are the trials that are no references."""
        for event in log:
            if event.trial is None or event.trial not in own:
                continue
            rung: int = event.payload.get("rung", 0)
            if event.kind is EventKind.TRAINING and rung > 0:
                self._recalled[event.trial, rung - 1] = "promote"
            elif event.kind is EventKind.STOPPED:
                self._recalled[event.trial, rung] = "stop"
            elif event.payload.get("what") == QUALITY and rung < self._ladder.top:
                self._expected[event.trial, rung] = None

    def enter(self, run: TrialRun, forecast: float | None) -> None:
        """Adds a candidate with the (minimised) quality that was forecast of it."""
        if run.reference is None:
            self._ended.discard(run.number)
            self._ladder.enter(run.number, forecast)

    def close(self) -> None:
        """No more candidates will be proposed."""
        self._ladder.closed = True
        self._settle()

    def learn(self, run: TrialRun, status: str) -> None:
        """Takes what is new of a trial, and what its stages took."""
        costs, reference = self._ladder.costs, run.reference is not None
        if status == "rung":
            assert run.rung is not None
            costs.train(run.number, run.rung, self._new_seconds(run))
            if reference or run.rung == self._ladder.top:  # with nothing to wait for
                self._ladder.finish(run.number, run.rung, self._arrival(run), reference=reference)
        elif reference:
            self._new_seconds(run)
            self._settle()  # the reference point may be fixed by now
        elif status == "complete":
            costs.confirm(run.number, self._new_seconds(run))
            if run.number in self._scales.complete:
                self._ladder.complete[run.number] = tuple(self._scales.coordinates(run))
        elif run.rung is None and status in ("gated", "infeasible"):
            costs.enter(run.number, self._new_seconds(run))

    def noise(self, rung: int) -> float:
        """Returns the standard deviation of quality at a rung as an estimate of quality at the top."""
        return self._ladder.noise(rung) if self._scales.reference_point is not None else 0.0

    def ended(self, run: TrialRun) -> None:
        """Takes out a trial that reached its end."""
        for key in [key for key, seen in self._expected.items() if key[0] == run.number and seen is None]:
            del self._expected[key]
        self._ended.add(run.number)
        self._ladder.leave(run.number)
        self._take_expected()
        self._settle()

    async def decide(self, run: TrialRun, rung: int) -> Decision:
        """Returns whether a trial that finished a rung is promoted or stopped; waits until that is decided."""
        key = run.number, rung
        if run.reference is not None:
            return Decision(*key, "promote")
        if verdict := self._recalled.get(key):
            self._arrive(key, self._arrival(run))
            return Decision(*key, verdict)
        decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[key] = run, decision
        self._arrive(key, self._arrival(run))
        return await decision

    def _settle(self) -> None:
        """Decides what can be decided now, and wakes those trials."""
        if self._expected:
            return
        self._ladder.reference_point = self._scales.reference_coordinates()
        for decision in self._ladder.decisions():
            run, waiting = self._waiting.pop((decision.trial, decision.rung), (None, None))
            if run is not None and waiting is not None and not waiting.done():
                waiting.set_result(decision)
                run.waiting = False

    def _arrive(self, key: tuple[int, int], arrival: Arrival) -> None:
        if self._expected:
            self._expected[key] = arrival
            self._take_expected()
        else:
            self._finish(key, arrival)
        self._settle()

    def _take_expected(self) -> None:
        seen = {key: arrival for key, arrival in self._expected.items() if arrival is not None}
        if len(seen) < len(self._expected):
            return
        self._expected = {}
        for key, arrival in seen.items():
            self._finish(key, arrival)
        for trial in self._ended:
            self._ladder.leave(trial)

    def _finish(self, key: tuple[int, int], arrival: Arrival) -> None:
        self._ladder.finish(*key, arrival)
        if verdict := self._recalled.get(key):
            self._ladder.recall(*key, verdict)

    def _arrival(self, run: TrialRun) -> Arrival:
        return Arrival(tuple(self._scales.coordinates(run)), run.quality.sd if run.quality else 0.0)

    def _new_seconds(self, run: TrialRun) -> float:
        """Returns the seconds that the trial's stages took since the last call."""
        total = self._spent(run.number)
        counted, self._counted[run.number] = self._counted.get(run.number, 0.0), total
        return total - counted
