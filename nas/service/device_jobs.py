"""Rounds of measurements as rows of the job table, seen from the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.plan import Round, RoundResult
from nas.service.jobs_api import Doorbell
from nas.store import jobs
from nas.store.rows import Blame, JobRow, JobState
from nas.store.store import Store

_LOOK_S = 1.0


class DeviceJobs:
    """Queues rounds and waits for their results, whoever runs them.

    Args:
        store: where jobs are.
        study: id, to whom the jobs belong, if to one.
        doorbell: rung when a job ends in this process; others are found by looking.
        check: raises where no agent will ever come.
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
            InfrastructureFailed: it failed for another.
        """
        of = (self._study, trial) if self._study is not None and trial is not None else None
        row = jobs.enqueue(self._store, key, round_, device=device, number=number, trial=of)
        if row.state is JobState.FAILED and row.blame is not Blame.CANDIDATE:
            jobs.retry(self._store, row.id)
        self._doorbell.ring()
        try:
            return _result(await self._ended(row.id))
        except asyncio.CancelledError:
            jobs.cancel(self._store, [row.id])
            raise

    async def _ended(self, id: str) -> JobRow:
        while True:
            seen = self._doorbell.count
            row = jobs.get(self._store, id)
            if row is None or row.state not in jobs.LIVE:
                break
            self._check()
            await asyncio.to_thread(self._doorbell.wait, seen, _LOOK_S)
        if row is None:
            raise InfrastructureFailed(f"job {id} is gone: its study was deleted")
        return row


def _result(row: JobRow) -> RoundResult:
    if row.state is JobState.DONE and row.result is not None:
        return row.result
    if row.blame is Blame.CANDIDATE and row.reason is not None:
        raise CandidateFailed(row.reason, row.message or "")
    raise InfrastructureFailed(f"{row.device}: {row.message or row.state.value}")
