"""How jobs end: with a result, with a failure, or with a lease that nobody renewed; and whose failure it is.

A failure counts against the device first. It becomes the candidate's where the trial failed on two devices, or twice
on one that passed its health check in between. A device turns bad once three different jobs failed on it since its
last passed check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, exists, func, or_, select, update

from nas.core.errors import FailureReason
from nas.core.plan import RoundResult
from nas.core.protocol import Failure
from nas.store import devices, jobs
from nas.store.attempts import insert_attempt
from nas.store.models import agent as agent_table
from nas.store.models import attempt
from nas.store.models import device as device_table
from nas.store.models import job as job_table
from nas.store.rows import Blame, DeviceRow, DeviceState, Health, JobKind, JobRow, JobState
from nas.store.store import Store, retried

BAD_AFTER_JOBS = 3
"""Different jobs that fail on a device before it turns bad."""

OFFLINE_S = 60.0
"""Seconds without a word from its agent after which a device is offline."""

_BACKOFF_S = 5.0
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
        row = devices.read(connection, device, agent=agent)
        job = jobs.read(connection, id)
        repeated = job is not None and _finished_under(job, row, epoch)
        refusal = None if repeated else _refusal(job, row, epoch)
        devices.heard_from(connection, row, now, **({} if repeated or refusal else _freed(row)))
        if repeated or refusal:
            return Verdict(repeated, refusal)
        end = {"state": JobState.DONE, "result": result.model_dump(mode="json"), "lease_until": None}
        end |= {"blame": None, "reason": None, "message": None}
        connection.execute(update(job_table).where(job_table.c.id == id).values(updated=now, **end))
        return Verdict(True)


@retried
def fail(
    store: Store,
    id: str,
    device: str,
    agent: str,
    epoch: int,
    failure: Failure,
    *,
    reason: FailureReason = "crash",
) -> Verdict:
    """Ends a job's attempt without a result: queued again later, failed for good, or cancelled.

    `reason` is what the candidate failed of, should the failure turn out to be its own.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        row = devices.read(connection, device, agent=agent)
        job = jobs.read(connection, id)
        refusal = _refusal(job, row, epoch)
        if refusal is None and job is not None and job.state not in jobs.LIVE:
            refusal = f"the job is {job.state.value} already"
        devices.heard_from(connection, row, store.now(), **({} if refusal else _freed(row)))
        if job is None or refusal:
            return Verdict(False, refusal)
        _count(connection, job, row, failure.kind, failure.message, reason, store.now())
        # Nothing more is expected under this epoch, unlike after a lease that ran out.
        connection.execute(update(job_table).where(job_table.c.id == id).values(epoch=None))
        return Verdict(True)


def expire(store: Store, *, local_only: bool = False) -> list[str]:
    """Takes back leases that ran out and notes devices that fell silent; gives the ids of the jobs concerned.

    With `local_only`, leases of agents that enrolled stay as they are: their coordinator may be another process.
    """
    now = store.now()
    lost = (job_table.c.state == JobState.LEASED) & (job_table.c.lease_until <= now)
    if local_only:
        lost &= job_table.c.device.in_(_local_devices())
    silent = (device_table.c.last_seen <= now - OFFLINE_S) & device_table.c.state.not_in(_STAY)
    with store.read() as connection:
        over = list(connection.execute(select(job_table.c.id, job_table.c.device).where(lost).order_by(job_table.c.id)))
        quiet = connection.scalar(select(exists().where(silent)))
    if quiet:
        _put_offline(store, silent)
    return [id for id, device in over if _take_back(store, id, device)]


@retried
def _put_offline(store: Store, silent: ColumnElement[bool]) -> None:
    with store.write() as connection:
        # A device that somebody holds is not silent.
        ids = devices.hold_all(connection, silent, skip_held=True)
        connection.execute(update(device_table).where(device_table.c.id.in_(ids)).values(state=DeviceState.OFFLINE))


@retried
def _take_back(store: Store, id: str, device: str) -> bool:
    """Ends a lease that ran out, unless it was renewed or the job ended meanwhile."""
    with store.write() as connection:
        now, row = store.now(), devices.read(connection, device)
        job = jobs.read(connection, id)
        if job is None or job.state is not JobState.LEASED or job.lease_until is None or job.lease_until > now:
            return False
        connection.execute(update(device_table).where(device_table.c.id == device).values(**_freed(row)))
        silence = f"agent {row.agent!r} did not renew its lease of {row.id!r}"
        _count(connection, job, row, "infrastructure", silence, "timeout", now)
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


def _freed(device: DeviceRow) -> dict[str, Any]:
    state = device.state if device.state is DeviceState.DRAINING else DeviceState.IDLE
    return {"state": state, "lease_holder": None, "lease_until": None}


def _count(
    connection: Connection, job: JobRow, device: DeviceRow, kind: str, message: str, reason: FailureReason, now: float
) -> None:
    """Records a failed attempt and decides what becomes of its job and its device."""
    note = {"kind": kind, "message": message, "at": now, "job": job.id, "device": device.id}
    insert_attempt(connection, result_key=job.result_key, stage="measure", study=job.study, trial=job.trial, **note)
    values: dict[str, Any] = {"updated": now, "lease_until": None, "message": message}
    if kind == "infrastructure":
        _doubt(connection, job, device, message)
        values |= _verdict(connection, job, device, reason, now)
    elif kind == "refused":
        values |= {"state": JobState.FAILED, "blame": Blame.REFUSED}
    else:
        values |= {"state": JobState.CANCELLED}
    connection.execute(update(job_table).where(job_table.c.id == job.id).values(**values))


def _verdict(
    connection: Connection, job: JobRow, device: DeviceRow, reason: FailureReason, now: float
) -> dict[str, Any]:
    failures = _failures(connection, job)
    own = [failure for failure in failures if failure.job == job.id]
    if job.kind is JobKind.MEASURE and _is_candidates(failures, own, device):
        return {"state": JobState.FAILED, "blame": Blame.CANDIDATE, "reason": reason}
    if len(own) >= jobs.MAX_FAILURES:
        return {"state": JobState.FAILED, "blame": Blame.INFRASTRUCTURE}
    return {"state": JobState.QUEUED, "not_before": now + _BACKOFF_S * 2 ** (len(own) - 1)}


def _is_candidates(failures: list[Row[Any]], own: list[Row[Any]], device: DeviceRow) -> bool:
    two_devices = len({failure.device for failure in failures}) > 1
    checked_between = any(failure.device == device.id and failure.at < device.checked_at for failure in own)
    return two_devices or checked_between


def _failures(connection: Connection, job: JobRow) -> list[Row[Any]]:
    """Infrastructure failures of the job, and of its trial's other measurements."""
    of_job = attempt.c.job == job.id
    of_trial = (attempt.c.study == job.study) & (attempt.c.trial == job.trial)
    query = select(attempt.c.job, attempt.c.device, attempt.c.at).where(
        attempt.c.kind == "infrastructure", of_job if job.trial is None else or_(of_job, of_trial)
    )
    return list(connection.execute(query.order_by(attempt.c.id)))


def _doubt(connection: Connection, job: JobRow, device: DeviceRow, message: str) -> None:
    """After a failure a good device is unknown until it passes a check; after failures of three jobs it is bad."""
    failed_jobs = connection.scalar(
        select(func.count(attempt.c.job.distinct())).where(
            attempt.c.device == device.id, attempt.c.kind == "infrastructure", attempt.c.at >= device.checked_at
        )
    )
    assert failed_jobs is not None
    if failed_jobs >= BAD_AFTER_JOBS:
        health, reason = Health.BAD, f"{failed_jobs} jobs failed since its last passed check; last: {message}"
    elif device.health is Health.GOOD:
        health, reason = Health.UNKNOWN, f"a job failed: {message}"
    else:
        return
    connection.execute(
        update(device_table).where(device_table.c.id == device.id).values(health=health, health_reason=reason)
    )
