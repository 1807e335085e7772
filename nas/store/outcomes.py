"""How jobs end: with a result, with a failure, or with a lease that nobody renewed; and whose failure it is.

A failure counts against the device first. It becomes the candidate's where the trial failed before, while it ran, on a
device that passed a health check since: on the same device, or on another. Until a check has passed, a failure says as
much of the device. What failed before the candidate ran, jobs that were done in the end, and silence of an agent on
another machine than the device say nothing of the candidate. A device turns bad once three different jobs failed on it
since its last passed check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, exists, func, or_, select, update

from nas.core.errors import FailureReason
from nas.core.plan import RoundResult
from nas.core.protocol import Failure, Phase
from nas.store import device_log, devices, job_rows, jobs
from nas.store.attempts import insert_attempt
from nas.store.models import agent as agent_table
from nas.store.models import attempt
from nas.store.models import device as device_table
from nas.store.models import job as job_table
from nas.store.rows import Blame, DeviceEventKind, DeviceRow, DeviceState, Health, JobKind, JobRow, JobState
from nas.store.store import Store, retried
from nas.store.timeouts import LIMITS

BAD_AFTER_JOBS = 3
"""Different jobs that fail on a device before it turns bad."""

OFFLINE_S = LIMITS[DeviceState.IDLE].seconds
"""Seconds without a word from its agent after which a device is offline."""

_BACKOFF_S = 5.0
_LOCAL = "local"
"""Transport of a device that its agent runs on."""

_TELLING, _OTHER = "infrastructure", "interrupted"
"""Kinds of attempts: failures that may be the candidate's, and those that cannot."""
_STAY = (DeviceState.DRAINING, DeviceState.OFFLINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether what an agent sent counts; `reason` says why not."""

    accepted: bool
    reason: str | None = None


@retried
def submit(store: Store, id: str, device: str, agent: str, epoch: int, result: RoundResult) -> Verdict:
    """Ends a job with its result. Accepted under the device's current epoch, however late; again is accepted again.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        # When it was heard from is written down with whatever else changes.
        row = devices.heard_from(connection, devices.read(connection, device, agent=agent), now, note=False)
        job = job_rows.find(connection, id)
        finished = job is not None and _finished_under(job, row, epoch)
        refusal = None if finished else _refusal(job, row, epoch)
        if finished or refusal is not None:
            devices.change(connection, device, last_seen=now)
            return Verdict(finished, refusal)
        end: dict[str, Any] = {"state": JobState.DONE, "result": result.model_dump(mode="json"), "lease_until": None}
        end |= {"blame": None, "reason": None, "message": None}
        job_rows.change(connection, id, updated=now, **end)
        _free(connection, row, now, last_seen=now)
        return Verdict(True)


@retried
def fail(store: Store, id: str, device: str, agent: str, epoch: int, failure: Failure) -> Verdict:
    """Ends a job's attempt without a result: queued again later, failed for good, or cancelled.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        row = devices.heard_from(connection, devices.read(connection, device, agent=agent), now)
        job = job_rows.find(connection, id)
        refusal = _refusal(job, row, epoch)
        if job is None or refusal is not None:
            return Verdict(False, refusal)
        if job.state not in jobs.LIVE:
            return Verdict(False, f"the job is {job.state.value} already")
        _free(connection, row, now)
        if failure.kind == "infrastructure":
            reason: FailureReason = "timeout" if failure.overdue else "crash"
            ran = failure.phase == "running"
            failed = _Failed(job, row, failure.message, failure.phase, ran, reason)
            _count(connection, failed, now, of_device=failure.reached_device)
        else:
            _end(connection, job, row, failure, now)
        # Nothing more is expected under this epoch, unlike after a lease that ran out.
        job_rows.change(connection, id, epoch=None)
        return Verdict(True)


def expire(store: Store, *, local_only: bool = False) -> list[str]:
    """Takes back leases that ran out and notes devices that fell silent; gives the ids of the jobs concerned.

    With `local_only`, leases of agents that enrolled stay as they are: their coordinator may be another process.
    """
    now = store.now()
    over = or_(job_table.c.lease_until <= now, job_table.c.phase_until <= now)
    lost = (job_table.c.state == JobState.LEASED) & over
    if local_only:
        lost &= job_table.c.device.in_(_local_devices())
    silent = devices.silent(now)
    with store.read() as connection:
        gone = list(connection.execute(select(job_table.c.id, job_table.c.device).where(lost).order_by(job_table.c.id)))
        quiet = connection.scalar(select(exists().where(silent)))
    # In this order: a device whose lease ends is idle, if somebody is there.
    taken = [id for id, device in gone if _take_back(store, id, device)]
    if quiet:
        _put_offline(store, silent)
    return taken


@retried
def _put_offline(store: Store, silent: ColumnElement[bool]) -> None:
    with store.write() as connection:
        # A device that somebody holds is not silent.
        for id in devices.hold_all(connection, silent, skip_held=True):
            row = devices.read(connection, id)
            devices.go_offline(connection, row, store.now(), f"nothing was heard from its agent {row.agent!r}")


@retried
def _take_back(store: Store, id: str, device: str) -> bool:
    """Ends a lease that ran out, unless it was renewed or the job ended meanwhile."""
    with store.write() as connection:
        now, row = store.now(), devices.read(connection, device)
        job = job_rows.find(connection, id)
        if job is None or job.state is not JobState.LEASED:
            return False
        if all(until is None or until > now for until in (job.lease_until, job.phase_until)):
            return False
        _free(connection, row, now)
        _count(connection, _lost(job, row, now), now)
        return True


@retried
def extend_leases(store: Store, lease_s: float = jobs.LEASE_S) -> None:
    """Gives every lease its full time again: a coordinator that was down calls it before it first calls `expire`."""
    until = store.now() + lease_s
    with store.write() as connection:
        ids = devices.hold_all(connection, device_table.c.lease_until.is_not(None))
        connection.execute(update(device_table).where(device_table.c.id.in_(ids)).values(lease_until=until))
        leased = (job_table.c.state == JobState.LEASED) & job_table.c.device.in_(ids)
        connection.execute(update(job_table).where(leased).values(lease_until=until))
        # Whatever phase they have come to, they could not tell.
        connection.execute(update(job_table).where(leased, job_table.c.phase_until < until).values(phase_until=until))


def _local_devices() -> Select[str]:
    return select(device_table.c.id).join(agent_table).where(agent_table.c.secret_hash.is_(None))


def _finished_under(job: JobRow, device: DeviceRow, epoch: int) -> bool:
    return job.state is JobState.DONE and (job.device, job.epoch) == (device.id, epoch)


def _refusal(job: JobRow | None, device: DeviceRow, epoch: int) -> str | None:
    if job is None:
        return "there is no such job; its study was deleted"
    if job.device != device.id:
        return f"the job is not for device {device.id!r}"
    if epoch != device.epoch:
        return f"epoch {epoch} of device {device.id!r} is over; it is at {device.epoch}"
    if job.epoch != epoch:
        return f"the job is {job.state.value}; nothing is expected under epoch {epoch}"
    return None


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failed attempt: `ran` says whether it may have been the candidate that did it, and then of what it failed."""

    job: JobRow
    device: DeviceRow
    message: str
    phase: Phase | None
    ran: bool
    reason: FailureReason


def _lost(job: JobRow, device: DeviceRow, now: float) -> _Failed:
    """What a job failed of whose lease was taken back."""
    if job.phase_until is not None and job.phase_until <= now:
        phase = "not begun" if job.phase is None else job.phase
        message = f"it was {phase} for longer than {device.id!r} may take for that"
        return _Failed(job, device, message, job.phase, job.phase == "running", "timeout")
    message = f"agent {device.agent!r} did not renew its lease of {device.id!r}, or its host restarted"
    # An agent elsewhere would have lived to tell what became of the device.
    ran = job.phase == "running" and device.device.transport == _LOCAL
    return _Failed(job, device, message, job.phase, ran, "crash")


def _free(connection: Connection, device: DeviceRow, now: float, **more: Any) -> None:
    state = device.state if device.state in _STAY else DeviceState.IDLE
    devices.move(connection, device, state, now, lease_holder=None, lease_until=None, **more)


def _count(connection: Connection, failed: _Failed, now: float, *, of_device: bool = True) -> None:
    """Records a failure of the infrastructure and decides what becomes of its job, and of its device if it was its."""
    job, device, message = failed.job, failed.device, failed.message
    _record(connection, job, _TELLING if failed.ran else _OTHER, message, now)
    if of_device:
        told = failed.phase or "not begun"
        device_log.record(connection, device.id, now, DeviceEventKind.FAILURE, told, message, job.id)
        _doubt(connection, device, message, now)
    values = {"updated": now, "lease_until": None, "message": message} | _verdict(connection, failed, now)
    job_rows.change(connection, job.id, **values)


def _end(connection: Connection, job: JobRow, device: DeviceRow, failure: Failure, now: float) -> None:
    """A job that was refused or cancelled: nobody's failure."""
    _record(connection, job, failure.kind, failure.message, now)
    refused = {"state": JobState.FAILED, "blame": Blame.REFUSED}
    values: dict[str, Any] = refused if failure.kind == "refused" else {"state": JobState.CANCELLED}
    values |= {"updated": now, "lease_until": None, "message": failure.message}
    job_rows.change(connection, job.id, **values)


def _record(connection: Connection, job: JobRow, kind: str, message: str, now: float) -> None:
    note = {"kind": kind, "message": message, "at": now, "job": job.id, "device": job.device}
    insert_attempt(connection, result_key=job.result_key, stage="measure", study=job.study, trial=job.trial, **note)


def _verdict(connection: Connection, failed: _Failed, now: float) -> dict[str, Any]:
    job = failed.job
    if job.kind is JobKind.MEASURE and failed.ran and _failed_on_a_good_device(connection, job):
        return {"state": JobState.FAILED, "blame": Blame.CANDIDATE, "reason": failed.reason}
    own = connection.scalar(select(func.count()).where(attempt.c.job == job.id, attempt.c.kind.in_((_TELLING, _OTHER))))
    assert own is not None
    if own >= jobs.MAX_FAILURES:
        return {"state": JobState.FAILED, "blame": Blame.INFRASTRUCTURE}
    return {"state": JobState.QUEUED, "not_before": now + _BACKOFF_S * 2 ** (own - 1)}


def _failed_on_a_good_device(connection: Connection, job: JobRow) -> bool:
    """Whether this job, or another of its trial that is not done, failed on a device that passed a check since."""
    of_trial = (attempt.c.study == job.study) & (attempt.c.trial == job.trial)
    undone = job_table.c.state != JobState.DONE
    query = (
        select(attempt.c.id)
        .join(device_table, device_table.c.id == attempt.c.device)
        .join(job_table, job_table.c.id == attempt.c.job)
        .where(attempt.c.kind == _TELLING, attempt.c.at < device_table.c.checked_at, undone)
        .where(attempt.c.job == job.id if job.trial is None else or_(attempt.c.job == job.id, of_trial))
    )
    return connection.scalar(query.limit(1)) is not None


def _doubt(connection: Connection, device: DeviceRow, message: str, now: float) -> None:
    """After a failure a good device is unknown until it passes a check; after failures of three jobs it is bad."""
    if device.health not in (Health.GOOD, Health.UNKNOWN):
        return
    failed_jobs = device_log.failed_jobs(connection, device.id, device.checked_at)
    if failed_jobs >= BAD_AFTER_JOBS:
        reason = f"{failed_jobs} jobs failed since its last passed check; last: {message}"
        devices.rate(connection, device, Health.BAD, reason, now)
    elif device.health is Health.GOOD:
        devices.rate(connection, device, Health.UNKNOWN, f"a job failed: {message}", now)
