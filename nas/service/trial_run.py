"""The life of one trial: export, device gate, rungs of training, confirmation.

Written as if nothing could fail: every stage goes through `Stages`, which finds what was done before, so running this
again after a kill continues where it stopped. The store, not this coroutine, knows the trial's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.scoring import BudgetCheck, Place, check_budgets
from nas.core.trial import EventKind
from nas.proxy.quality import Quality
from nas.runtimes.base import Artifact
from nas.search.ladder import Decision
from nas.service.ledger import Ledger
from nas.service.stage_work import SeedScores, StageWork

TakenFigures = dict[Place, dict[str, Figure]]


class Company(Protocol):
    """What a trial needs of the study around it."""

    async def published_figures(self) -> TakenFigures:
        """The published reference's screen figures, once they are there."""

    async def quality(self, run: TrialRun, rung: int, scores: SeedScores) -> Quality:
        """A rung's quality, relative to the published reference's at that rung."""

    async def climbs(self, run: TrialRun, rung: int) -> Decision:
        """What becomes of the trial after `rung`; may wait for other trials."""

    async def refine(self, run: TrialRun) -> None:
        """Makes surer what is known of a trial at the top, where that is worth it."""

    def learned(self, run: TrialRun, status: str) -> None:
        """Something new is known of the trial."""


@dataclass
class TrialRun:
    """One trial under way.

    Args:
        number: of the trial.
        layout: its layout.
        reference: its name among the references, or None; references are exempt from budgets and always climb.
        work: does stages.
        ledger: keeps events.
        company: the study around it.
    """

    number: int
    layout: Layout
    reference: str | None
    work: StageWork
    ledger: Ledger
    company: Company
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    figures: TakenFigures = field(default_factory=dict)
    checks: list[BudgetCheck] = field(default_factory=list)
    quality: Quality | None = None
    rung: int | None = None
    waiting: bool = False
    """For other trials, with nothing to do itself."""
    noisy_places: set[Place] = field(default_factory=set)
    stage: str = "proposed"
    """What it does now, or how it ended."""
    ended: bool = False
    failed: CandidateFailed | InfrastructureFailed | None = None

    @property
    def noisy(self) -> bool:
        """Whether a figure that counts rests on refused repetitions."""
        return bool(self.noisy_places)

    @property
    def retryable(self) -> bool:
        """Whether it failed through no fault of its own."""
        return isinstance(self.failed, InfrastructureFailed)

    async def live(self) -> None:
        """Runs to a terminal state; what goes wrong becomes one."""
        try:
            await self._life()
        except CandidateFailed as error:
            self.failed = error
            self._end(EventKind.FAILED, reason=f"{error.reason}: {error}")
        except InfrastructureFailed as error:
            self.failed = error
            self._end(EventKind.FAILED, reason=str(error), retryable=True)

    async def _life(self) -> None:
        self.artifacts = artifacts = await self.work.export_all(self.number, self.layout)
        self._mark(EventKind.EXPORTED)
        if not await self._passes_gate(artifacts):
            return
        if not await self._trains():
            return
        await self._confirms(artifacts)

    async def _passes_gate(self, artifacts: dict[str, Artifact]) -> bool:
        self._mark(EventKind.MEASURING)
        protocol = self.work.space.protocol
        # What references measure is what budgets are multiples of, so they are measured in full at once.
        repetitions = protocol.confirm_repetitions if self.reference else protocol.screen_repetitions
        # Cheapest workload first: what breaks a budget there need not run the others.
        for workload in self.work.workloads_by_cost():
            await self._measure(artifacts, [workload], repetitions)
            await self._check()
            if self._broken():
                return self._infeasible()
        borderline = {check.place.workload for check in self.checks if check.verdict == "borderline"}
        if borderline and not self.reference:
            self._mark(EventKind.BORDERLINE)
            await self._measure(artifacts, borderline, protocol.confirm_repetitions)
            await self._check(final=True)
            if self._broken():
                return self._infeasible()
        self._mark(EventKind.GATED_IN)
        self.company.learned(self, "gated")
        return True

    async def _trains(self) -> bool:
        rungs = self.work.space.quality.rungs
        for rung in range(len(rungs)):
            self._mark(EventKind.TRAINING, rung=rung)
            self.rung = rung
            scores = await self.work.train_rung(self.number, self.layout, rung)
            with self._waiting():
                self.quality = await self.company.quality(self, rung, scores)
            self.company.learned(self, "rung")
            if rung < len(rungs) - 1 and not await self._climbs(rung):
                return False
        return True

    async def _climbs(self, rung: int) -> bool:
        with self._waiting():
            decision = await self.company.climbs(self, rung)
        if decision.verdict == "stop":
            reason = f"not promoted from rung {self.work.space.quality.rungs[rung].name}"
            self._end(EventKind.STOPPED, reason=f"{reason}: {decision.why}" if decision.why else reason, rung=rung)
        return decision.verdict == "promote"

    async def _confirms(self, artifacts: dict[str, Artifact]) -> None:
        await self.work.gate(self.number, self.layout)
        self._mark(EventKind.CONFIRMING)
        protocol = self.work.space.protocol
        await self._measure(artifacts, self.work.space.measured, protocol.confirm_repetitions)
        await self._check(final=True)
        if not self._broken():
            await self.company.refine(self)
        if self._broken():
            self._infeasible()
        else:
            self._end(EventKind.COMPLETE)

    async def measure_again(self, repetitions: int) -> None:
        """Measures all workloads with other repetitions, and checks the budgets on what comes of it."""
        await self._measure(self.artifacts, self.work.space.measured, repetitions)
        await self._check(final=True)

    async def _measure(self, artifacts: dict[str, Artifact], workloads: Iterable[str], repetitions: int) -> None:
        wanted = self.work.places(workloads)
        tasks = [
            asyncio.ensure_future(self._measure_one(artifacts[place.runtime], place, repetitions)) for place in wanted
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            # What fails in one place has failed: nobody waits for the others, and no device shall be busy with them.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure_one(self, artifact: Artifact, place: Place, repetitions: int) -> None:
        measurement = await self.work.measure(self.number, artifact, place, repetitions)
        self.figures[place] = measurement.figures
        # What does not depend on a workload is found under none, too.
        self.figures[place._replace(workload="")] = {"file_size": measurement.figures["file_size"]}
        (self.noisy_places.add if measurement.noisy else self.noisy_places.discard)(place)

    async def _check(self, *, final: bool = False) -> None:
        if self.reference:
            return
        with self._waiting():
            published = await self.company.published_figures()
        self.checks = check_budgets(self.work.space, self.figures, published, final=final)

    def _broken(self) -> list[BudgetCheck]:
        return [check for check in self.checks if check.verdict == "infeasible"]

    def _infeasible(self) -> bool:
        self._end(EventKind.INFEASIBLE, reason="; ".join(map(str, self._broken())))
        return False

    def _mark(self, kind: EventKind, **payload: Any) -> None:
        self.stage = kind.value
        self.ledger.mark(self.number, kind, **payload)

    def _end(self, kind: EventKind, **payload: Any) -> None:
        self._mark(kind, **payload)
        self.ended = True
        self.company.learned(self, kind.value)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
