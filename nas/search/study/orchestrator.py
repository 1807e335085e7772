"""One study's loop: references first, then proposals, each trial a coroutine, until all have ended.

Resuming is running again: results are found by key, so the trials of an earlier process pass the stages that they
finished in moments and continue from there. Promotions and observations are restored from the event log.
"""

from __future__ import annotations

import asyncio
import math

from nas.core.errors import InfrastructureFailed, NasError
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.core.scoring import PUBLISHED
from nas.core.trial import Event, TrialState
from nas.core.units import show_number
from nas.infra.store.rows import StudyState, Trial
from nas.search.proposers import Observation, Status
from nas.search.study.events import Expected
from nas.search.study.ledger import Ledger
from nas.search.study.promotion import PromotionController
from nas.search.study.proposals import ProposalDriver
from nas.search.study.remeasuring import Remeasuring
from nas.search.study.rescoring import Rescoring
from nas.search.study.scales import Scales, train_anchors
from nas.search.study.stages import StageWork
from nas.search.study.stopping import StoppingRules
from nas.search.study.trial import StudyContext, TrialRun, run_trial

_LOOK_S = 1.0
"""Seconds after which the loop looks at the lease and at what users want, if no task ends before."""
_STATUSES: dict[str, Status] = {
    "complete": "complete",
    "rescored": "complete",
    "infeasible": "infeasible",
    "stopped": "stopped",
    "failed": "failed",
    "withdrawn": "withdrawn",
}
"""What is reported of a trial -> status of its observation; "running" for all else."""
_LOG_METRICS = ("ttft", "decode_p50", "peak_rss")
"""Figures of a measured reference that the log shows."""
_FAILURES_IN_A_ROW = 3
"""Consecutive infrastructure failures after which the study aborts."""


class Orchestrator:
    """Runs a study to its end, or until it is stopped.

    Args:
        work: runs the stages.
        ledger: of the study.
        proposals: proposes layouts.
        trials: how many to propose, references not counted.
        log: called with a line for each reference as soon as it is measured, and when trainings of no trial begin.
    """

    def __init__(
        self,
        work: StageWork,
        ledger: Ledger,
        proposals: ProposalDriver,
        trials: int,
        log: Log = lambda line: None,
    ) -> None:
        self._work, self._ledger, self._proposals, self._log = work, ledger, proposals, log
        self.scales = Scales(work.space, ledger)
        self._promotion = PromotionController(work.space, self.scales)
        self._stopping = StoppingRules(work.space.search.stop, ledger, trials)
        self._context = StudyContext(work, ledger, self.scales, self._promotion, self._report)
        self.runs: dict[int, TrialRun] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._anchoring: asyncio.Task[None] | None = None
        self._remeasuring: asyncio.Task[None] | None = None
        self._rescoring: asyncio.Task[None] | None = None
        self._failed_in_a_row: list[TrialRun] = []
        self._retried = False
        self._stop = asyncio.Event()
        self._state = StudyState.RUNNING

    def stop(self) -> None:
        """Ends `run` soon; what is not finished can be resumed."""
        self._stop.set()

    async def run(self) -> StudyState:
        """Runs the study.

        Returns:
            COMPLETE or STOPPED.

        Raises:
            NasError: a reference layout failed, nothing works any more, or the study was taken over.
        """
        self._ledger.set_state(self._state)
        try:
            self._begin()
            state = await self._loop()
        finally:
            self._stop.set()
            for task in self._all_tasks():
                task.cancel()
            await asyncio.gather(*self._all_tasks(), return_exceptions=True)
        if state is StudyState.COMPLETE:
            # Only models of references and of the front stay pinned: `nas gc` may remove the others.
            front = self.scales.front
            pinned = [run for number, run in self.runs.items() if run.reference is not None or number in front]
            artifacts = (artifact for run in pinned for artifact in run.artifacts.values())
            self._ledger.pin_only(file.sha256 for artifact in artifacts for file in artifact.written)
        self._ledger.set_state(state)
        return state

    def _begin(self) -> None:
        trials = self._ledger.trials()
        log = self._ledger.recall()
        for line in self._proposals.resume(trials, log):
            self._log(line)
        self._recall(trials, log)
        self._stopping.recall(log)
        for name, layout in self._work.space.references.layouts().items():
            trial = self._ledger.propose(layout, "reference")
            # The proposer knows references from the start, so that it does not propose them again.
            self._proposals.tell(self._ledger, trial.number, Observation(layout, "running"))
            self._start(self._ledger.retry(trial), reference=name)
        if self._work.space.quality.anchors is not None:
            self._log("training the anchors")
            self._anchoring = asyncio.create_task(self._train_anchors(), name="anchors")
        for trial in trials:
            if trial.status.state is TrialState.CANCELLED:
                withdrawn = Observation(Layout.from_json(trial.layout), "withdrawn")
                self._proposals.tell(self._ledger, trial.number, withdrawn)
            elif trial.number not in self.runs:
                self._start(self._ledger.retry(trial))

    def _start(self, trial: Trial, reference: str | None = None) -> None:
        assert trial.number not in self.runs, f"trial {trial.number} runs already"
        layout = Layout.from_json(trial.layout)
        run = TrialRun(trial.number, layout, reference)
        self.runs[trial.number] = run
        self._promotion.enter(run)
        self._tasks[trial.number] = asyncio.create_task(self._run_trial(run), name=f"trial {trial.number}")

    async def _run_trial(self, run: TrialRun) -> None:
        await run_trial(run, self._context)
        self._promotion.leave(run)  # before the task is done: else trials that wait for this end would seem stuck
        self._failed_in_a_row = [*self._failed_in_a_row, run] if run.retryable else []

    async def _train_anchors(self) -> None:
        layouts = [*self._work.space.references.layouts().values(), *self._proposals.anchors(self._ledger)]
        (published,) = (number for number, run in self.runs.items() if run.reference == PUBLISHED)
        await train_anchors(self._work, self.scales, layouts, published)

    async def _loop(self) -> StudyState:
        while True:
            self._check()
            desired = self._ledger.desired_state()
            if self._stop.is_set() or desired == "stop":
                return StudyState.STOPPED
            if (state := StudyState.PAUSED if desired == "pause" else StudyState.RUNNING) is not self._state:
                self._ledger.set_state(state)
                self._state = state
            if desired == "run" and self._may_ask():
                self._asking = asyncio.create_task(self._propose(), name="proposer")
            pending = [task for task in self._all_tasks() if not task.done()]
            if self._promotion.closed and not pending and desired == "run":
                if self._retry_failed():
                    continue
                if self._work.space.protocol.remeasure is not None and self._remeasuring is None:
                    # Before any value of the front changes, and before trainings keep this machine busy.
                    self._log("measuring the front again")
                    remeasuring = Remeasuring(self._context, self.runs, self._log)
                    self._remeasuring = asyncio.create_task(remeasuring.run(), name="re-measured front")
                    continue
                if self._work.space.quality.rescore is not None and self._rescoring is None:
                    self._log("re-scoring the front on fresh seeds")
                    rescoring = Rescoring(self._context, self.runs, self._log)
                    self._rescoring = asyncio.create_task(rescoring.run(), name="re-scored front")
                    continue
                return StudyState.COMPLETE
            stop = asyncio.ensure_future(self._stop.wait())
            done, _ = await asyncio.wait([*pending, stop], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not done:  # what waits for a task that is done may not have gone on yet
                self._require_progress(pending)

    def _retry_failed(self) -> bool:
        """Restarts, once, the trials that an infrastructure failure ended; returns whether there are any."""
        failed = [number for number, run in self.runs.items() if run.retryable]
        if self._retried or not failed:
            return False
        self._retried = True
        rows = [self._ledger.retry(trial) for trial in self._ledger.trials() if trial.number in failed]
        self._recall(rows, self._ledger.events())
        self._failed_in_a_row = []
        for trial in rows:
            del self.runs[trial.number]
            self._start(trial)
        return True

    def _check(self) -> None:
        """Raises errors of trials and applies the stopping rules."""
        self._ledger.require_lease()
        for task in self._all_tasks():
            if task.done():
                task.result()
        for run in self.runs.values():
            self._require_reference(run)
        self._require_success()
        proposed = sum(run.reference is None for run in self.runs.values())
        if not self._promotion.closed and self._stopping.is_due(proposed):
            self._promotion.close()

    def _all_tasks(self) -> list[asyncio.Task[None]]:
        return [*self._tasks.values(), *([self._asking] if self._asking else []), *self._common()]

    def _common(self) -> list[asyncio.Task[None]]:
        """Returns the work that belongs to no trial: of anchors, and what is done again with the front."""
        return [task for task in (self._anchoring, self._remeasuring, self._rescoring) if task is not None]

    def _may_ask(self) -> bool:
        asking = self._asking is not None and not self._asking.done()
        if asking or self._promotion.closed or self._promotion.recalling or not self.scales.figures_ready:
            return False
        busy = sum(not self._tasks[n].done() and not run.waiting for n, run in self.runs.items())
        return busy < self._batch

    @property
    def _batch(self) -> int:
        """Trials that run at once: just enough to keep each worker and device busy, as later proposals know more."""
        return self._work.compute.workers + len(self._work.space.devices)

    async def _propose(self) -> None:
        trial = await self._proposals.next(self._ledger)
        if trial is None:
            self._stopping.space_is_empty()
            self._promotion.close()
        else:
            gain, hypervolume = self._proposals.expected_gain, self.scales.hypervolume or 0.0
            self._stopping.expect(trial.number, Expected(gain, hypervolume, self._batch))
            self._start(trial)

    def _recall(self, trials: list[Trial], log: list[Event]) -> None:
        candidates = [trial for trial in trials if trial.origin != "reference"]
        running = {trial.number for trial in candidates if trial.status.state is not TrialState.CANCELLED}
        self._promotion.recall(running, log)

    def _require_reference(self, run: TrialRun) -> None:
        if run.reference is None or run.failed is None:
            return
        message = f"the {run.reference} reference failed, so nothing can be compared with it: {run.failed}"
        raise (InfrastructureFailed if run.retryable else NasError)(message) from run.failed

    def _require_success(self) -> None:
        """Aborts the study, to be resumed later, if trials keep failing through no fault of their own."""
        failed = self._failed_in_a_row
        if len(failed) >= _FAILURES_IN_A_ROW:
            raise InfrastructureFailed(
                f"{len(failed)} trials in a row failed for no reason of their own; the last, trial "
                f"{failed[-1].number}: {failed[-1].failed}"
            ) from failed[-1].failed

    def _require_progress(self, pending: list[asyncio.Task[None]]) -> None:
        running = [run for number, run in self.runs.items() if not self._tasks[number].done()]
        stuck = self._promotion.closed and not self._promotion.recalling and all(run.waiting for run in running)
        waited_for = any(task in pending for task in self._common())
        assert not (stuck and pending and not waited_for), "trials wait for each other"

    def _report(self, run: TrialRun, status: str) -> None:
        """Passes what is new of a trial to the scales, the promotion and the proposer."""
        if run.reference and status == "gated":
            for line in _measured(run):
                self._log(line)
        before = self.scales.reference_point
        self.scales.learn(run, status)
        if status == "rung":
            self._promotion.finish_rung(run)
        if before is None and (point := self.scales.named_reference_point()):
            self._proposals.fix_reference_point(self._ledger, point)
        # A failure of the infrastructure says nothing of the layout: unless it is tried again, it is not pending.
        outcome = "withdrawn" if run.retryable else status
        self._proposals.tell(self._ledger, run.number, self._observation(run, outcome))

    def _observation(self, run: TrialRun, status: str) -> Observation:
        rung = run.rung if run.quality is not None else None
        excess: dict[str, float] = {}
        for check in (*run.checks, *self.scales.quality_checks(run)):
            if check.log_excess is not None:  # several budgets may limit one figure
                excess[check.name] = max(excess.get(check.name, -math.inf), check.log_excess)
        return Observation(
            run.layout,
            _STATUSES.get(status, "running"),
            self.scales.known_coordinates(run),
            excess,
            rung,
            self.scales.known_noise(run, 0.0 if rung is None else self._promotion.noise(rung)),
            self.scales.known_parts(run),
        )


def _measured(run: TrialRun) -> list[str]:
    """Returns a line of figures for each device, runtime and workload that a trial was measured on."""
    lines = []
    for key, figures in run.figures.items():
        measured = {name: figures[name] for name in _LOG_METRICS if name in figures}
        text = ", ".join(
            f"{name} {show_number(figure.value)} {figure.unit}"
            for name, figure in measured.items()
            if figure.value is not None
        )
        if text:
            lines.append(f"{run.reference} reference, {key.workload} on {key.device} ({key.runtime}): {text}")
    return lines
