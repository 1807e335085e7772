"""The proposer of a study: asked beside the measurements, told in the order of the event log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.devices.hostlock import HostLock
from nas.search import PROPOSERS, Observation, Proposal, Proposer, Sampler, SearchState
from nas.search.forecast import forecast
from nas.service.ledger import Ledger
from nas.store.rows import Trial

TOLD, POINT, WARM = "told", "reference point told", "warm start"
"""Events that carry an observation, the reference point, or earlier studies, in the order the proposer got them."""


class Asker:
    """Asks and tells one proposer, and keeps both in the log.

    Args:
        space: the study's.
        supported: whether its runtimes carry a layout.
        lock: folder of the host lock: a surrogate's fit is compute like any other.
    """

    def __init__(self, space: SearchSpace, supported: Callable[[Layout], bool], lock: Path) -> None:
        self._space = space
        self._proposer = make_proposer(space, supported)
        self._lock = HostLock(lock)
        self._asking = self._pointed = False
        self._later: list[Callable[[], None]] = []
        self._told: set[str] = set()
        self.expected_gain: float | None = None
        """In hypervolume, of the layout proposed last; None where no model chose it, or the proposer tells none."""
        self.forecast: float | None = None
        """The (minimised) quality that was forecast of it, likewise."""

    def resume(self, trials: list[Trial], events: list[Event]) -> None:
        """Takes up where the log ends."""
        state = SearchState(tuple(objective.name for objective in self._space.objectives), self._space.search.seed)
        state.proposals = [Proposal.from_json(trial.record) for trial in trials if trial.record is not None]
        for event in events:
            if event.payload.get("what") == TOLD:
                observation = Observation.from_json(event.payload["observation"])
                if event.trial is not None:
                    self._is_new(event.trial, observation)
                state.tell(observation)
            elif event.payload.get("what") == POINT:
                state.fix_reference_point(event.payload["point"])
            elif event.payload.get("what") == WARM:
                for seen in event.payload["observations"]:
                    state.tell_earlier(Observation.from_json(seen))
        self._pointed = state.reference_point is not None
        self._proposer.restore(state.to_json())

    async def next(self, ledger: Ledger) -> Trial | None:
        """A new trial; None where the proposer has no more layouts. Waits for its turn on the machine."""
        self._asking = True
        try:
            begun = time.perf_counter()
            proposals = await asyncio.to_thread(self._ask)
            if not proposals:
                return None
            ledger.spent("propose", time.perf_counter() - begun)
            return _record(ledger, proposals[0])
        finally:
            self._asking = False
            while self._later:
                self._later.pop(0)()

    def tell(self, ledger: Ledger, trial: int, observation: Observation) -> None:
        """Tells the proposer and logs that; what comes while it is being asked is told afterwards."""

        def tell() -> None:
            if self._is_new(trial, observation):
                ledger.note(trial, TOLD, observation=observation.to_json())
                self._proposer.tell(observation)

        self._now_or_later(tell)

    def fix_reference_point(self, ledger: Ledger, point: Mapping[str, float]) -> None:
        """Tells the proposer the reference point, once, and logs when."""

        def fix() -> None:
            if not self._pointed:
                self._pointed = True
                ledger.note(None, POINT, point=dict(point))
                self._proposer.fix_reference_point(point)

        self._now_or_later(fix)

    def _is_new(self, trial: int, observation: Observation) -> bool:
        """How noisy a figure is, is learned; that alone is no news, so a resumed study tells what it told before."""
        name = content_hash([trial, replace(observation, noise={}).to_json()])
        new = name not in self._told
        self._told.add(name)
        return new

    def _now_or_later(self, action: Callable[[], None]) -> None:
        if self._asking:
            self._later.append(action)
        else:
            action()

    def _ask(self) -> list[Proposal]:
        with self._lock.shared():
            proposals = self._proposer.ask(1)
            self.expected_gain = getattr(self._proposer, "expected_gain", None)
            self.forecast = forecast(self._proposer, proposals[0].layout) if proposals else None
            return proposals


def make_proposer(space: SearchSpace, supported: Callable[[Layout], bool]) -> Proposer:
    """The proposer that the space names.

    Raises:
        UnknownName: no such proposer.
        InvalidInput: the space holds no layout that its runtimes carry.
    """
    return PROPOSERS[space.search.proposer](Sampler(space, supported), space.search.seed)


def replay(
    space: SearchSpace, supported: Callable[[Layout], bool], trials: list[Trial], events: list[Event]
) -> list[str]:
    """Asks a fresh proposer again along a study's log.

    Returns:
        Where it proposed something else than was recorded; empty where all proposals are equal.

    Raises:
        InvalidInput: another engine, or another version of it, made the recorded proposals.
    """
    proposer = make_proposer(space, supported)
    by_number = {trial.number: trial for trial in trials}
    differences = []
    for event in events:
        if event.kind is EventKind.PROPOSED and event.trial is not None:
            recorded = by_number[event.trial]
            if recorded.origin == "reference":
                continue
            proposals = proposer.ask(1)
            _check_engine(recorded, proposals)
            if [proposal.layout.id for proposal in proposals] != [recorded.layout_id]:
                shown = proposals[0].layout.format() if proposals else "nothing"
                differences.append(f"trial {event.trial}: {Layout.from_json(recorded.layout)} became {shown}")
        elif event.payload.get("what") == TOLD:
            proposer.tell(Observation.from_json(event.payload["observation"]))
        elif event.payload.get("what") == POINT:
            proposer.fix_reference_point(event.payload["point"])
        elif event.payload.get("what") == WARM:
            proposer.warm_start(map(Observation.from_json, event.payload["observations"]))
    return differences


def _check_engine(recorded: Trial, proposals: list[Proposal]) -> None:
    made = (recorded.record or {}).get("engine", "")
    if proposals and proposals[0].engine != made:
        was, now = made or "an engine of an older hilnas", proposals[0].engine or "one without a name"
        raise InvalidInput(
            f"trial {recorded.number} was proposed by {was}; here is {now}, so the log cannot be replayed"
        )


def _record(ledger: Ledger, proposal: Proposal) -> Trial:
    numbers = {trial.layout_id: trial.number for trial in ledger.trials()}
    record: dict[str, Any] = proposal.to_json()
    return ledger.propose(
        proposal.layout,
        "seed" if proposal.operator == "seed" else "proposal",
        parents=tuple(numbers[parent] for parent in proposal.parents if parent in numbers),
        operator=proposal.operator,
        record=record,
    )
