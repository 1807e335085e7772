"""Rounds of measurements as rows of the job table, seen from the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.plan import Round, RoundResult
from nas.service.doorbell import Doorbell
from nas.store import devices, jobs
from nas.store.outcomes import OFFLINE_S
from nas.store.rows import Blame, DeviceRow, DeviceState, Health, JobKind, JobRow, JobState
from nas.store.store import Store
from nas.store.timeouts import LIMITS

_LOOK_S = 1.0
_RECOVERS_WITHIN_S = 120.0
"""A device that turned bad is waited for until its first check has ended, but no longer than this."""

_CLOSED = {
    JobKind.MEASURE: (Health.BAD, Health.MAINTENANCE, Health.RETIRED),
    JobKind.CHECK: (Health.MAINTENANCE, Health.RETIRED),
}
"""Health of devices that take no job of a kind."""


class DeviceJobs:
    """Queues rounds and waits for their results, whoever runs them.

    Args:
        store: where jobs are.
        study: id, to whom the jobs belong, if to one.
        doorbell: rung when a job ends in this process; others are found by looking.
        check: raises where this machine's agent will never come.
    """

    def __init__(self, store: Store, study: int | None, doorbell: Doorbell, check: Callable[[], None]) -> None:
        self._store = store
        self._study = study
        self._doorbell = doorbell
        self._check = check

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        """Queues round `number` of the stage `key` and waits for its end; a round done before is returned.

        Raises:
            CandidateFailed: the job failed for a reason that is the candidate's own.
            InfrastructureFailed: it failed for another, or the device takes no jobs.
        """
        while True:
            row = self._queue(key, number, device, round_, trial)
            self._doorbell.ring()
            try:
                ended = await self._ended(row)
            except (asyncio.CancelledError, InfrastructureFailed):
                jobs.cancel(self._store, [row.id])
                raise
            if ended is not None and ended.state is not JobState.CANCELLED:
                return _result(ended)
            # Another study that wanted the same round took it back, or was deleted: now it is ours alone.

    def _queue(self, key: str, number: int, device: str, round_: Round, trial: int | None) -> JobRow:
        of = None if self._study is None else (self._study, trial)
        # Without a reference beside it, it is the reference itself that runs: what a doubtful device is checked with.
        kind = JobKind.MEASURE if round_.reference else JobKind.CHECK
        with self._store.write():
            row = jobs.enqueue(self._store, key, round_, device=device, number=number, trial=of, kind=kind)
            if row.state is JobState.FAILED and row.blame is not Blame.CANDIDATE:
                jobs.retry(self._store, row.id)
        return row

    async def _ended(self, job: JobRow) -> JobRow | None:
        begun = self._store.now()
        while True:
            seen = self._doorbell.count
            row = jobs.get(self._store, job.id)
            if row is None or row.state not in jobs.LIVE:
                return row
            self._check()
            if row.state is JobState.QUEUED:
                self._require_served(row, begun)
            else:
                self._require_watched(row)
            await asyncio.to_thread(self._doorbell.wait, seen, _LOOK_S)

    def _require_served(self, job: JobRow, begun: float) -> None:
        device = devices.get(self._store, job.device)
        if device.health in _CLOSED[job.kind] and not self._may_recover(device):
            raise InfrastructureFailed(f"device {device.id} takes no jobs: {device.health}, {device.health_reason}")
        drained_s = self._store.now() - max(device.state_since, begun)
        if device.state is DeviceState.DRAINING and drained_s > LIMITS[DeviceState.DRAINING].seconds:
            raise InfrastructureFailed(f"device {device.id} is drained: it takes no jobs until somebody ends that")
        silence = self._store.now() - max(device.last_seen, begun)
        if silence > OFFLINE_S:
            raise InfrastructureFailed(
                f"device {device.id} is offline: nothing was heard from its agent {device.agent!r} for {silence:.0f} s"
            )

    def _require_watched(self, job: JobRow) -> None:
        over_s = self._store.now() - (job.lease_until or self._store.now())
        if over_s > OFFLINE_S:
            raise InfrastructureFailed(
                f"device {job.device} was leased until {over_s:.0f} s ago and nobody takes that back: "
                "the coordinator of its agent is gone; start 'nas serve'"
            )

    def _may_recover(self, device: DeviceRow) -> bool:
        """Whether a bad device may pass the check that comes next."""
        waited_s = self._store.now() - device.health_since
        return device.health is Health.BAD and device.checks_failed == 0 and waited_s < _RECOVERS_WITHIN_S


def _result(row: JobRow) -> RoundResult:
    if row.state is JobState.DONE and row.result is not None:
        return row.result
    if row.blame is Blame.CANDIDATE and row.reason is not None:
        raise CandidateFailed(row.reason, row.message or "")
    raise InfrastructureFailed(f"{row.device}: {row.message or row.state.value}")
