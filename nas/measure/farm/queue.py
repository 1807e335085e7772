"""The job queue of one process: queues rounds as jobs and waits for their results, wakes agents, expires leases."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from nas.core.clock import Clock
from nas.core.errors import CandidateFailed, InfrastructureFailed, NasError, UnknownName
from nas.core.plan import Round, RoundResult
from nas.infra.store import devices, jobs, listings, outcomes, studies
from nas.infra.store.devices import LIMITS
from nas.infra.store.engine import DatabaseUnusable
from nas.infra.store.outcomes import OFFLINE_S
from nas.infra.store.rows import Blame, DeviceRow, DeviceState, Health, JobKind, JobRow, JobState
from nas.infra.store.store import Store

log = logging.getLogger(__name__)

_CHECK_S = 1.0
_QUIET_S = 5.0
"""Wait of a queued job before its reason is told, in seconds."""

_RECOVERS_WITHIN_S = 120.0
"""A device in bad health is waited for until its first check has ended, but no longer than this."""

_POLL_S = 0.25
"""Between searches for jobs that another process queued; jobs of this process are found at once."""

_PAUSE_S = 0.02
"""Minimum between two searches."""

_EXPIRE_S = 1.0
_CLOCK_STEP_S = 5.0
"""Difference between two clocks that shows that one was set, or that the machine slept."""
_JOIN_S = 5.0

_CLOSED = {
    JobKind.MEASURE: (Health.BAD, Health.MAINTENANCE, Health.RETIRED),
    JobKind.CHECK: (Health.MAINTENANCE, Health.RETIRED),
}
"""Kind of job -> health of devices that do not take it."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A long poll of an agent for work of one device. Its methods may be called from any thread.

    Args:
        agent: that polls.
        loop: in which it waits.
        woken: set once there may be work, or the poll was cancelled.
    """

    agent: str
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Event
    _cancelled: bool = False

    def wake(self) -> None:
        """Ends the wait: there may be work."""
        self.loop.call_soon_threadsafe(self.woken.set)

    def cancel(self) -> None:
        """Ends the poll without work."""
        self._cancelled = True
        self.wake()

    def cancelled(self) -> bool:
        """Returns whether the agent does not serve the device any more."""
        return self._cancelled


class JobNotifier:
    """Notifies threads and long polls of one process that the job table changed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0
        self._waiters: dict[str, set[Waiter]] = {}
        self._closed = False

    def notify(self) -> None:
        """Wakes all threads in `wait`."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait(self, last_count: int, seconds: float) -> int:
        """Waits until `count` differs from `last_count`, or for `seconds`; returns `count`."""
        with self._condition:
            self._condition.wait_for(lambda: self._count != last_count, seconds)
            return self._count

    @property
    def count(self) -> int:
        """Number of calls of `notify`."""
        return self._count

    @property
    def closed(self) -> bool:
        """True if no poll may wait any more."""
        return self._closed

    @contextmanager
    def waiting(self, device: str, agent: str) -> Iterator[Waiter]:
        """Registers a long poll of `agent` for work of `device`. Costs no thread.

        Enter it before looking at the table, so that a job queued right after that look is not missed.
        """
        waiter = Waiter(agent, asyncio.get_running_loop(), asyncio.Event())
        with self._condition:
            self._waiters.setdefault(device, set()).add(waiter)
            if self._closed:
                waiter.woken.set()
        try:
            yield waiter
        finally:
            with self._condition:
                waiters = self._waiters[device]
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[device]

    def waited_for(self) -> frozenset[str]:
        """Returns the devices that are polled for."""
        with self._condition:
            return frozenset(self._waiters)

    def wake(self, ids: Iterable[str]) -> None:
        """Wakes the long polls for these devices."""
        with self._condition:
            for device in ids:
                for waiter in self._waiters.get(device, ()):
                    waiter.wake()

    def cancel(self, agent: str, served: Collection[str]) -> None:
        """Cancels the agent's long polls for devices that it does not serve any more."""
        with self._condition:
            for device, waiters in self._waiters.items():
                for waiter in waiters:
                    if waiter.agent == agent and device not in served:
                        waiter.cancel()

    def close(self) -> None:
        """Wakes all long polls; from now on none waits."""
        with self._condition:
            self._closed = True
        self.wake(self.waited_for())
        self.notify()


class DeviceJobs:
    """Queues rounds and waits for their results, on whichever host their agent is.

    Args:
        store: where jobs are.
        study: id of the study that the jobs belong to, if any.
        notifier: notified when a job ends in this process; others are found by polling.
        check: raises if this machine's agent cannot be kept running.
    """

    def __init__(self, store: Store, study: int | None, notifier: JobNotifier, check: Callable[[], None]) -> None:
        self._store = store
        self._study = study
        self._notifier = notifier
        self._check = check
        self._reasons: dict[str, str] = {}

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        """Queues round `number` of the stage `key` and waits for its end; returns the stored result if it ran before.

        Raises:
            CandidateFailed: the job failed for a reason that is the candidate's own.
            InfrastructureFailed: it failed for another, or the device takes no jobs.
        """
        while True:
            row = self._queue(key, number, device, round_, trial)
            self._notifier.notify()
            try:
                job = await self._wait_for_end(row)
            except (asyncio.CancelledError, InfrastructureFailed):
                jobs.cancel(self._store, [row.id])
                raise
            if job is not None and job.state is not JobState.CANCELLED:
                return _result(job)
            # Another study that shared the round cancelled it, or was deleted: queue it again.

    def _queue(self, key: str, number: int, device: str, round_: Round, trial: int | None) -> JobRow:
        of = None if self._study is None else (self._study, trial)
        # Devices in bad health may run the reference model itself.
        kind = JobKind.MEASURE if round_.compares else JobKind.CHECK
        with self._store.write():
            row = jobs.enqueue(self._store, key, round_, device=device, number=number, trial=of, kind=kind)
            if row.state is JobState.FAILED and row.blame is not Blame.CANDIDATE:
                jobs.retry(self._store, row.id)
        return row

    async def _wait_for_end(self, job: JobRow) -> JobRow | None:
        start, interruptions = self._store.now(), Interruptions(self._store.clock)
        while True:
            if interruptions.happened():
                start = self._store.now()
            count = self._notifier.count
            row = jobs.get(self._store, job.id)
            if row is None or row.state not in jobs.LIVE:
                return row
            self._check()
            if row.state is JobState.QUEUED:
                self._require_served(row, start)
                self._tell(row, start)
            else:
                self._require_watched(row, start)
            await asyncio.to_thread(self._notifier.wait, count, _CHECK_S)

    def _require_served(self, job: JobRow, start: float) -> None:
        device = devices.get(self._store, job.device)
        if device.health in _CLOSED[job.kind] and not self._may_recover(device):
            raise InfrastructureFailed(f"device {device.id} takes no jobs: {device.health}, {device.health_reason}")
        drained_s = self._store.now() - max(device.state_since, start)
        if device.state is DeviceState.DRAINING and drained_s > LIMITS[DeviceState.DRAINING]:
            raise InfrastructureFailed(f"device {device.id} is drained: 'nas device resume {device.id}' ends that")
        silence = self._store.now() - max(device.last_seen, start)
        if silence > OFFLINE_S:
            raise InfrastructureFailed(
                f"device {device.id} is offline: nothing was heard from its agent {device.agent!r} for {silence:.0f} s"
            )

    def _tell(self, job: JobRow, start: float) -> None:
        """Logs once what a job waits for, unless it waits for its own study's."""
        if self._store.now() - start < _QUIET_S:
            return
        reason = _obstacle(self._store, job)
        if reason is not None and reason != self._reasons.get(job.device):
            log.warning("waiting for %s: %s", job.device, reason)
            self._reasons[job.device] = reason

    def _require_watched(self, job: JobRow, start: float) -> None:
        now = self._store.now()
        over_s = now - max(job.lease_until or now, start)
        if over_s > OFFLINE_S:
            raise InfrastructureFailed(
                f"device {job.device} was leased until {over_s:.0f} s ago and no coordinator takes that back: "
                "the coordinator of its agent is gone; start 'nas serve'"
            )

    def _may_recover(self, device: DeviceRow) -> bool:
        """Returns whether a device in bad health may still pass its next check."""
        waited_s = self._store.now() - device.health_since
        return device.health is Health.BAD and device.checks_failed == 0 and waited_s < _RECOVERS_WITHIN_S


class Interruptions:
    """Tells when this machine slept, its clock was set, or this process stood still, so that no silence is evidence.

    Args:
        clock: of the store.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times = clock.now(), clock.monotonic()

    def happened(self) -> bool:
        """Returns whether there was an interruption since the last call."""
        now = self._clock.now(), self._clock.monotonic()
        wall, real = now[0] - self._times[0], now[1] - self._times[1]
        self._times = now
        return abs(wall - real) > _CLOCK_STEP_S or real > jobs.LEASE_S / 2


class LeaseMonitor:
    """A thread that expires leases and wakes long polls for queued jobs, while the context is open.

    Args:
        store: where jobs are.
        notifier: notified when the table changes; wakes the agents' long polls.
        agent: take back only leases of this agent. Other agents may speak to a coordinator that is down just now, which
            is not their failure. None: of all.
    """

    def __init__(self, store: Store, notifier: JobNotifier, *, agent: str | None) -> None:
        self.notifier = notifier
        self._store, self._agent = store, agent
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.notifier.notify()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        count, expire_at, interruptions = self.notifier.count, 0.0, Interruptions(self._store.clock)
        interrupted = out_of_reach = False
        while not self._stop.wait(_PAUSE_S):
            was_out_of_reach, out_of_reach = out_of_reach, False
            interrupted = interruptions.happened() or (interrupted and was_out_of_reach)
            try:
                if interrupted or was_out_of_reach:  # agents could not renew their leases meanwhile
                    jobs.extend_leases(self._store)
                if interrupted:
                    jobs.restart_phases(self._store)
                if time.monotonic() >= expire_at:
                    outcomes.expire(self._store, agent=self._agent)
                    expire_at = time.monotonic() + _EXPIRE_S
                if waited_for := self.notifier.waited_for():
                    self.notifier.wake(jobs.with_work(self._store, waited_for))
            except NasError as error:
                log.warning("the job table cannot be read: %s", error)
                out_of_reach = isinstance(error, InfrastructureFailed) and not isinstance(error, DatabaseUnusable)
            except (OSError, ValueError, TypeError, LookupError):
                # A row that another version wrote; no other thread takes leases back.
                log.exception("the job table cannot be read")
            count = self.notifier.wait(count, _POLL_S)


def _obstacle(store: Store, job: JobRow) -> str | None:
    """Returns what keeps a device from a queued job; None: nothing, or a job of the same study."""
    device = devices.get(store, job.device)
    with store.read() as connection:
        reservation = devices.reservations(connection, store.now()).get(device.id)
    try:
        study = None if job.study is None else studies.get(store, job.study).name
    except UnknownName:  # deleted just now
        return None
    if reservation is not None and (reservation.study is None or reservation.study != study):
        end = datetime.fromtimestamp(reservation.until, UTC).isoformat(sep=" ", timespec="minutes")
        return f"reserved by {reservation.by} until {end}: {reservation.reason}"
    if device.state in (DeviceState.DRAINING, DeviceState.OFFLINE):
        return f"it is {device.state}"
    if device.lease_holder is not None:
        running = listings.running(store).get(device.id)
        if running is None or running != study:
            return f"it runs a job of study {running}" if running else "it runs a health check or a bench"
    return "its health check" if device.health is Health.BAD else None


def _result(row: JobRow) -> RoundResult:
    if row.state is JobState.DONE and row.result is not None:
        return row.result
    if row.blame is Blame.CANDIDATE and row.reason is not None:
        raise CandidateFailed(row.reason, row.message or "")
    raise InfrastructureFailed(f"{row.device}: {row.message or row.state.value}")
