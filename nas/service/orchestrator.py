"""One study's loop: references first, then proposals, each trial a coroutine, until all have ended.

Resuming is running again: stages are found by key, so the trials of an earlier process walk through what they did in
moments and go on from there. Who climbed the ladder and what the proposer was told is read from the event log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from nas.core.errors import InfrastructureFailed, NasError
from nas.core.layout import Layout
from nas.core.trial import Event, TrialState
from nas.proxy.quality import Quality
from nas.search import Observation, Status
from nas.search.ladder import Decision
from nas.service.asking import Asker
from nas.service.ending import Ending, Expected
from nas.service.ladder import Climb
from nas.service.ledger import Ledger
from nas.service.progress import Snapshot, snapshot
from nas.service.refining import Refiner
from nas.service.scales import Scales
from nas.service.stage_work import SeedScores, StageWork
from nas.service.trial_run import TakenFigures, TrialRun
from nas.store.rows import StudyState, Trial

_LOOK_S = 1.0
_FAILURES_IN_A_ROW = 3
"""Trials that fail one after the other for no reason of their own before the study is given up."""


class Orchestrator:
    """Runs a study to its end, or until it is told to stop.

    Args:
        work: does the stages.
        ledger: the study's record.
        asker: proposes layouts.
        trials: how many to propose, references not counted.
        on_update: told about twice a second how things stand.
    """

    def __init__(
        self, work: StageWork, ledger: Ledger, asker: Asker, trials: int, on_update: Callable[[Snapshot], None]
    ) -> None:
        self._work, self._ledger, self._asker, self._wanted = work, ledger, asker, trials
        self._on_update = on_update
        self.scales = Scales(work.space, ledger)
        self._climb = Climb(work.space, self.scales, work.stages.seconds)
        self._refiner = Refiner(work, ledger, self.scales, self._climb)
        self._ending = Ending(work.space.search.stop, ledger, trials)
        self.runs: dict[int, TrialRun] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._failed_in_a_row: list[TrialRun] = []
        self._retried = False
        self._stop = asyncio.Event()
        self._state = StudyState.RUNNING
        self._begun = time.monotonic()

    def stop(self) -> None:
        """Ends `run` soon; what is not finished can be resumed."""
        self._stop.set()

    async def run(self) -> StudyState:
        """Runs the study.

        Returns:
            COMPLETE, or STOPPED where it was told to stop.

        Raises:
            NasError: a reference layout failed, nothing works any more, or the study was taken over.
        """
        self._ledger.set_state(self._state)
        try:
            self._begin()
            state = await self._loop()
        finally:
            self._stop.set()
            await self._cancel()
        if state is StudyState.COMPLETE:
            self._keep_what_counts()
        self._ledger.set_state(state)
        self._on_update(self._snapshot())
        return state

    def _begin(self) -> None:
        known = self._ledger.trials()
        log = self._ledger.recall()
        self._asker.resume(known, log)
        self._recall(known, log)
        self._refiner.recall(log)
        self._ending.recall(log)
        for name, layout in self._work.space.references.layouts().items():
            trial = self._ledger.propose(layout, "reference")
            # Known from the start, so that no seed proposes it again.
            self._asker.tell(self._ledger, trial.number, Observation(layout, "running"))
            self._start(self._ledger.retry(trial), reference=name)
        for trial in known:
            if trial.number not in self.runs and trial.status.state is not TrialState.CANCELLED:
                self._start(self._ledger.retry(trial))

    def _start(self, trial: Trial, reference: str | None = None) -> None:
        assert trial.number not in self.runs, f"trial {trial.number} runs already"
        layout = Layout.from_json(trial.layout)
        run = TrialRun(trial.number, layout, reference, self._work, self._ledger, self)
        self.runs[trial.number] = run
        self._climb.enter(run, self._ending.forecast(trial.number))
        task = asyncio.create_task(run.live(), name=f"trial {trial.number}")
        self._tasks[trial.number] = task
        task.add_done_callback(lambda _: self._ended(run))

    def _ended(self, run: TrialRun) -> None:
        if run.ended:  # not where the process ends, which decides nothing about others
            self._climb.ended(run)
        self._failed_in_a_row = [*self._failed_in_a_row, run] if run.retryable else []

    async def _loop(self) -> StudyState:
        while True:
            self._look_after()
            desired = self._ledger.desired_state()
            if self._stop.is_set() or desired == "stop":
                return StudyState.STOPPED
            self._show_state(StudyState.PAUSED if desired == "pause" else StudyState.RUNNING)
            if desired == "run" and self._may_ask():
                self._asking = asyncio.create_task(self._propose(), name="proposer")
            pending = [task for task in self._all_tasks() if not task.done()]
            if self._climb.closed and not pending:
                if self._retry_failed():
                    continue
                return StudyState.COMPLETE
            self._refuse_deadlock(pending)
            stop = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([*pending, stop], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()

    def _retry_failed(self) -> bool:
        """Once, at the end, starts the trials again that failed for no reason of their own; whether there are any."""
        again = [number for number, run in self.runs.items() if run.retryable]
        if self._retried or not again:
            return False
        self._retried = True
        rows = [self._ledger.retry(trial) for trial in self._ledger.trials() if trial.number in again]
        self._recall(rows, self._ledger.events())
        self._failed_in_a_row = []
        for trial in rows:
            del self.runs[trial.number]
            self._start(trial)
        return True

    def _look_after(self) -> None:
        """What every turn of the loop does: pass errors on, close the ladder, show how things stand."""
        self._ledger.require_ours()
        for task in self._all_tasks():
            if task.done():
                task.result()
        for run in self.runs.values():
            self._require_reference(run)
        self._require_sense()
        if not self._climb.closed and self._ending.is_due(self._proposed()):
            self._climb.close()
        self._on_update(self._snapshot())

    def _show_state(self, state: StudyState) -> None:
        if state is not self._state:
            self._ledger.set_state(state)
            self._state = state

    def _all_tasks(self) -> list[asyncio.Task[None]]:
        return [*self._tasks.values(), *([self._asking] if self._asking else [])]

    def _proposed(self) -> int:
        return sum(run.reference is None for run in self.runs.values())

    def _may_ask(self) -> bool:
        asking = self._asking is not None and not self._asking.done()
        if asking or self._climb.closed or self._climb.recalling or not self.scales.figures_ready:
            return False
        busy = sum(not self._tasks[n].done() and not run.waiting for n, run in self.runs.items())
        return busy < self._batch

    @property
    def _batch(self) -> int:
        """Enough to keep each worker and each device at work, and no more: later proposals know more."""
        return self._work.compute.workers + len(self._work.space.devices)

    async def _propose(self) -> None:
        trial = await self._asker.next(self._ledger)
        if trial is None:
            self._ending.space_is_empty()
            self._climb.close()
        else:
            gain, quality = self._asker.expected_gain, self._asker.forecast
            self._ending.expect(trial.number, Expected(gain, self.scales.hypervolume or 0.0, self._batch, quality))
            self._start(trial)

    def _recall(self, known: list[Trial], log: list[Event]) -> None:
        cancelled = TrialState.CANCELLED
        own = {trial.number for trial in known if trial.origin != "reference" and trial.status.state is not cancelled}
        self._climb.recall(own, log)

    def _require_reference(self, run: TrialRun) -> None:
        if run.reference is None or run.failed is None:
            return
        message = f"the {run.reference} reference failed, so nothing can be compared with it: {run.failed}"
        raise (InfrastructureFailed if run.retryable else NasError)(message) from run.failed

    def _require_sense(self) -> None:
        """Ends the study, to be resumed, where trial after trial would fail of the same."""
        failed = self._failed_in_a_row
        if len(failed) >= _FAILURES_IN_A_ROW:
            raise InfrastructureFailed(
                f"{len(failed)} trials in a row failed for no reason of their own; the last, trial "
                f"{failed[-1].number}: {failed[-1].failed}"
            ) from failed[-1].failed

    def _refuse_deadlock(self, pending: list[asyncio.Task[None]]) -> None:
        running = [run for number, run in self.runs.items() if not self._tasks[number].done()]
        stuck = self._climb.closed and not self._climb.recalling and all(run.waiting for run in running)
        assert not (stuck and pending), "trials wait for each other"

    def _keep_what_counts(self) -> None:
        """From now on `nas gc` may take the models of all but the references and the front."""
        front = {row.trial for row in self._snapshot().front}
        kept = [run for number, run in self.runs.items() if run.reference is not None or number in front]
        self._ledger.pin_only(artifact.stored.sha256 for run in kept for artifact in run.artifacts.values())

    async def _cancel(self) -> None:
        for task in self._all_tasks():
            task.cancel()
        await asyncio.gather(*self._all_tasks(), return_exceptions=True)

    def _snapshot(self) -> Snapshot:
        return snapshot(self._ledger, self._work.space, self.scales, self.runs, self._wanted, self._begun)

    # What trials ask of their company.

    async def published_figures(self) -> TakenFigures:
        """The published reference's figures, once they are taken."""
        return await self.scales.published_figures()

    async def quality(self, run: TrialRun, rung: int, scores: SeedScores) -> Quality:
        """Relative to the published reference at the same rung; waits for both references to get there."""
        quality = (await self.scales.at_rung(rung, run.reference, scores)).quality(scores)
        self._ledger.note_once(run.number, "quality", rung=rung, quality=quality.model_dump(mode="json"))
        return quality

    async def climbs(self, run: TrialRun, rung: int) -> Decision:
        """What becomes of the trial; references are always promoted."""
        return Decision(run.number, rung, "promote") if run.reference else await self._climb.climbs(run, rung)

    async def refine(self, run: TrialRun) -> None:
        """Makes surer what is known of a trial at the top, where that is worth it."""
        await self._refiner.refine(run)

    def learned(self, run: TrialRun, status: str) -> None:
        """Keeps what is known of a trial, and tells the proposer."""
        before = self.scales.reference_point
        self.scales.learn(run, status)
        self._climb.learn(run, status)
        if before is None and (point := self.scales.named_reference_point()):
            self._asker.fix_reference_point(self._ledger, point)
        if status != "failed" or not run.retryable:
            self._asker.tell(self._ledger, run.number, self._observation(run, status))

    def _observation(self, run: TrialRun, status: str) -> Observation:
        final: dict[str, Status] = {
            "infeasible": "infeasible",
            "complete": "complete",
            "stopped": "stopped",
            "failed": "failed",
        }
        rung = run.rung if run.quality is not None else None
        return Observation(
            run.layout,
            final.get(status, "running"),
            self.scales.known_coordinates(run),
            {check.name: check.log_excess for check in run.checks if check.log_excess is not None},
            rung,
            self.scales.known_noise(run, 0.0 if rung is None else self._climb.noise(rung)),
        )
