"""Promotion of one study's trials: takes their results, and wakes waiting trials with decisions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.search.proposers.promotion import Decision, Ladder, Verdict
from nas.search.study.events import QualityKnown
from nas.search.study.scales import Scales

if TYPE_CHECKING:
    from nas.search.study.trial import TrialRun

Key = tuple[int, int]
"""Number of a trial, and the index of the rung that it finished."""


class PromotionController:
    """Decides which trials of one study are promoted.

    After a restart nothing is decided before every arrival in the log has been seen again; they are then taken in the
    order of the log. So what was undecided is decided as it would have been without the restart.

    Args:
        space: the study's.
        scales: turns figures into coordinates.
    """

    def __init__(self, space: SearchSpace, scales: Scales) -> None:
        self._scales = scales
        self._ladder = Ladder(space.quality.rungs)
        self._waiting: dict[Key, tuple[TrialRun, asyncio.Future[Decision]]] = {}
        self._recalled: dict[Key, Verdict] = {}
        self._expected: dict[Key, tuple[float, ...] | None] = {}
        """Coordinates of arrivals in the log, in its order; None until this process has seen them again."""
        self._final_trials: set[int] = set()

    @property
    def closed(self) -> bool:
        """True if no more candidates will be proposed."""
        return self._ladder.closed

    @property
    def recalling(self) -> bool:
        """True if arrivals in the log are still to be seen again."""
        return bool(self._expected)

    def recall(self, candidates: set[int], log: list[Event]) -> None:
        """Reads arrivals and decisions of the candidates, the trials that are no references, from the log."""
        for event in log:
            if event.trial is None or event.trial not in candidates:
                continue
            rung: int = event.payload.get("rung", 0)
            if event.kind is EventKind.TRAINING and rung > 0:
                self._recalled[event.trial, rung - 1] = "promote"
            elif event.kind is EventKind.STOPPED:
                self._recalled[event.trial, rung] = "stop"
            elif event.payload.get("what") == QualityKnown.what and rung < self._ladder.top:
                self._expected[event.trial, rung] = None

    def enter(self, run: TrialRun) -> None:
        """Adds a trial, unless it is a reference."""
        if run.reference is None:
            self._final_trials.discard(run.number)
            self._ladder.enter(run.number)

    def close(self) -> None:
        """No more candidates will be proposed."""
        self._ladder.closed = True
        self._settle()

    def finish_rung(self, run: TrialRun) -> None:
        """Takes the result of a trial that waits for no decision: of a reference, or at the top rung."""
        assert run.rung is not None, "set before it is trained"
        reference = run.reference is not None
        if reference or run.rung == self._ladder.top:
            self._ladder.finish(run.number, run.rung, self._scales.coordinates(run), reference=reference)

    def noise(self, rung: int) -> float:
        """Returns the standard deviation of quality at a rung as an estimate of quality at the top."""
        return self._ladder.noise(rung) if self._scales.reference_point is not None else 0.0

    def leave(self, run: TrialRun) -> None:
        """Takes out a trial that reached its end."""
        for key in [key for key, point in self._expected.items() if key[0] == run.number and point is None]:
            del self._expected[key]
        self._final_trials.add(run.number)
        self._ladder.leave(run.number)
        self._take_expected()
        self._settle()

    async def decide(self, run: TrialRun, rung: int) -> Decision:
        """Returns whether a trial that finished a rung is promoted or stopped; waits until that is decided."""
        key = run.number, rung
        if run.reference is not None:
            return Decision(*key, "promote")
        if verdict := self._recalled.get(key):
            self._arrive(key, self._scales.coordinates(run))
            return Decision(*key, verdict)
        decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[key] = run, decision
        self._arrive(key, self._scales.coordinates(run))
        return await decision

    def _settle(self) -> None:
        """Decides what can be decided now, and wakes those trials."""
        if self._expected:
            return
        for decision in self._ladder.decisions():
            run, waiting = self._waiting.pop((decision.trial, decision.rung), (None, None))
            if run is not None and waiting is not None and not waiting.done():
                waiting.set_result(decision)
                run.waiting = False

    def _arrive(self, key: Key, coordinates: tuple[float, ...]) -> None:
        if self._expected:
            self._expected[key] = coordinates
            self._take_expected()
        else:
            self._finish(key, coordinates)
        self._settle()

    def _take_expected(self) -> None:
        arrivals = {key: coordinates for key, coordinates in self._expected.items() if coordinates is not None}
        if len(arrivals) < len(self._expected):
            return
        self._expected = {}
        for key, coordinates in arrivals.items():
            self._finish(key, coordinates)
        for trial in self._final_trials:
            self._ladder.leave(trial)

    def _finish(self, key: Key, coordinates: tuple[float, ...]) -> None:
        self._ladder.finish(*key, coordinates)
        if verdict := self._recalled.get(key):
            self._ladder.recall(*key, verdict)
