"""Ends of jobs: results, failures, expired leases, health checks; and the attempts that gave no result.

Blame: a failure counts against the device first. It becomes the candidate's where the trial failed before, while it was
running, on a device that has passed a health check since: on the same device, or on another. Until a check has passed,
a failure may as well be the device's. Three things say nothing about the candidate: failures before it ran, failures of
jobs that were done in the end, and silence of an agent on another machine than the device. A device turns bad once
three different jobs failed on it since its last passed check.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, exists, or_, select

from nas.core.errors import FailureReason
from nas.core.plan import RoundResult
from nas.core.wire import Failure, Phase
from nas.infra.store import devices, jobs
from nas.infra.store.models import attempt
from nas.infra.store.models import device as device_table
from nas.infra.store.models import job as job_table
from nas.infra.store.rows import (
    Attempt,
    Blame,
    CheckOutcome,
    DeviceEventKind,
    DeviceRow,
    DeviceState,
    Health,
    JobKind,
    JobRow,
    JobState,
    Stage,
)
from nas.infra.store.store import Store, retried

BAD_AFTER_JOBS = 3
"""Different jobs that fail on a device before it turns bad."""

OFFLINE_S = devices.LIMITS[DeviceState.IDLE]
"""Seconds without a message from its agent after which a device is offline."""

_CHECK_JOBS_KEPT_S = 86_400.0
_LOCAL = "local"
"""Transport of a device that its agent runs on."""

_LASTING = (DeviceState.DRAINING, DeviceState.OFFLINE)
_CHECKED = (Health.UNKNOWN, Health.GOOD, Health.BAD)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to an agent's result or failure; `reason` says why it was not accepted."""

    accepted: bool
    reason: str | None = None


@retried
def submit(store: Store, id: str, device: str, agent: str, epoch: int, result: RoundResult) -> Verdict:
    """Ends a job with its result. Accepted under the device's current epoch, however late; repeating is accepted.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        row = devices.heard_from(connection, devices.read(connection, device, agent=agent), now)
        job = jobs.find(connection, id)
        if job is not None and job.state is JobState.DONE and (job.device, job.epoch) == (row.id, epoch):
            return Verdict(True)
        refusal = _refusal(job, row, epoch)
        if refusal is not None:
            return Verdict(False, refusal)
        end: dict[str, Any] = {"state": JobState.DONE, "result": result.model_dump(mode="json"), "lease_until": None}
        jobs.change(connection, id, updated=now, blame=None, reason=None, message=None, **end)
        _end_lease(connection, row, now)
        return Verdict(True)


@retried
def fail(store: Store, id: str, device: str, agent: str, epoch: int, failure: Failure) -> Verdict:
    """Ends a job's attempt without a result: it is queued again, fails for good, or is cancelled.

    A device that has recorded a newer epoch than this database is not at fault (the database was restored from a
    backup, or is used twice): its epoch is raised to that, so that the next lease is accepted. A failure of a job whose
    expired lease was counted already is not counted again.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        row = devices.heard_from(connection, devices.read(connection, device, agent=agent), now)
        job = jobs.find(connection, id)
        refusal = _refusal(job, row, epoch)
        if job is None or refusal is not None:
            return Verdict(False, refusal)
        if job.state not in jobs.LIVE:
            return Verdict(False, f"the job is {job.state.value} already")
        _end_lease(connection, row, now)
        if failure.last_epoch is not None and failure.last_epoch > row.epoch:
            devices.change(connection, device, epoch=failure.last_epoch)
            again: dict[str, Any] = {"state": JobState.QUEUED, "attempts": max(0, job.attempts - 1)}
            jobs.change(connection, id, updated=now, lease_until=None, message=failure.message, **again)
        elif failure.kind != "refused" and job.state is JobState.QUEUED:
            pass  # `expire` has counted this attempt
        elif failure.kind == "infrastructure":
            reason: FailureReason = "timeout" if failure.overdue else "crash"
            ran = failure.phase == "running"
            failed = _Failed(job, row, failure.message, failure.phase, ran, reason)
            _record_failure(connection, failed, now, of_device=failure.reached_device)
        else:
            _end_uncounted(connection, job, failure, now)
        # Nothing more is expected under this epoch, unlike after an expired lease.
        jobs.change(connection, id, epoch=None)
        return Verdict(True)


def expire(store: Store, *, agent: str | None = None) -> list[str]:
    """Takes back expired leases and makes silent devices offline; returns the ids of the jobs concerned.

    With `agent`, leases of other agents stay as they are: their coordinator is another process, maybe on another host.
    """
    with store.read() as connection:
        now = store.now()
        over = or_(job_table.c.lease_until <= now, job_table.c.phase_until <= now)
        lost = (job_table.c.state == JobState.LEASED) & over
        if agent is not None:
            lost &= job_table.c.device.in_(select(device_table.c.id).where(device_table.c.agent == agent))
        silent = devices.silent(now)
        rows = list(connection.execute(select(job_table.c.id, job_table.c.device).where(lost).order_by(job_table.c.id)))
        quiet = connection.scalar(select(exists().where(silent)))
    # In this order: a device whose lease ends becomes idle, if it is not silent.
    expired = [id for id, device in rows if _take_back(store, id, device)]
    if quiet:
        _put_offline(store, silent)
    return expired


def due_checks(store: Store, *, among: Collection[str] | None = None, most: int = 1000) -> list[DeviceRow]:
    """Returns at most `most` reachable devices, `among` these ids, whose check is due, longest overdue first.

    Devices are left out while a job of kind `check` is queued or running there: a check, or a study's calibration.
    """
    columns = device_table.c
    conditions = [columns.check_due <= store.now(), columns.health.in_(_CHECKED), columns.state.not_in(_LASTING)]
    if among is not None:
        conditions.append(columns.id.in_(among))
    of_device = (job_table.c.device == columns.id) & job_table.c.state.in_(jobs.LIVE)
    query = select(device_table).where(*conditions, ~exists().where(of_device, job_table.c.kind == JobKind.CHECK))
    return devices.select_rows(store, query.order_by(columns.check_due, columns.id).limit(most))


@retried
def request_check(store: Store, id: str) -> DeviceRow:
    """Makes a health check due now, whatever the device's health; it has ended once `check_number` is greater."""
    with store.write() as connection:
        devices.read(connection, id)
        devices.change(connection, id, check_due=store.now())
        return devices.read(connection, id)


@retried
def conclude_check(store: Store, id: str, number: int, outcome: CheckOutcome, reason: str | None, at: float) -> bool:
    """Ends check `number` of a device; returns False where it was ended before.

    Passed: the device is good, unless a job failed there after `at`, the end of the check's last run. Failed: it is
    bad. Unsure: its health stays, with the reason. A person's decision (maintenance, retired) stays in any case. A
    device that did not pass is checked again, at increasing intervals, unless it is good.
    """
    with store.write() as connection:
        row, now = devices.read(connection, id), store.now()
        if row.check_number != number:
            return False
        devices.change(connection, id, check_number=number + 1)
        devices.log_event(connection, id, now, DeviceEventKind.CHECK, outcome, reason)
        # Jobs of checks belong to no study, which would delete them.
        of_check = (job_table.c.kind == JobKind.CHECK) & job_table.c.study.is_(None) & (job_table.c.device == id)
        old = job_table.c.state.not_in(jobs.LIVE) & (job_table.c.updated < now - _CHECK_JOBS_KEPT_S)
        connection.execute(delete(job_table).where(of_check, old))
        if row.health in _CHECKED:
            _rate_by_check(connection, row, outcome, reason, at, now)
        return True


@retried
def record_attempt(
    store: Store,
    kind: str,
    message: str,
    *,
    result_key: str | None = None,
    stage: Stage | None = None,
    study: int | None = None,
    trial: int | None = None,
) -> Attempt:
    """Stores an attempt that gave no valid result; `kind` is a word such as 'infrastructure'."""
    of = {"result_key": result_key, "stage": stage, "study": study, "trial": trial}
    with store.write() as connection:
        return insert_attempt(connection, kind=kind, message=message, at=store.now(), **of)


def attempts_of_key(store: Store, key: str) -> list[Attempt]:
    """Returns the attempts at the result of `key`, oldest first."""
    query = select(attempt).where(attempt.c.result_key == key).order_by(attempt.c.id)
    return [Attempt(**row._mapping) for row in store.rows(query)]


def insert_attempt(connection: Connection, **values: Any) -> Attempt:
    """Stores an attempt under the next id."""
    row = connection.execute(attempt.insert().values(values).returning(*attempt.c)).one()
    return Attempt(**row._mapping)


@retried
def _put_offline(store: Store, silent: ColumnElement[bool]) -> None:
    with store.write() as connection:
        # A device that another transaction has locked is not silent.
        for id in devices.hold_all(connection, silent, skip_held=True):
            row = devices.read(connection, id)
            devices.go_offline(connection, row, store.now(), f"nothing was heard from its agent {row.agent!r}")


@retried
def _take_back(store: Store, id: str, device: str) -> bool:
    """Ends an expired lease, unless it was renewed or the job ended meanwhile."""
    with store.write() as connection:
        now, row = store.now(), devices.read(connection, device)
        job = jobs.find(connection, id)
        if job is None or job.state is not JobState.LEASED:
            return False
        if all(until is None or until > now for until in (job.lease_until, job.phase_until)):
            return False
        _end_lease(connection, row, now)
        _record_failure(connection, _describe_lost(job, row, now), now)
        return True


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
    """A failed attempt. `ran`: the candidate may have caused it, and then `reason` is its failure."""

    job: JobRow
    device: DeviceRow
    message: str
    phase: Phase | None
    ran: bool
    reason: FailureReason


def _describe_lost(job: JobRow, device: DeviceRow, now: float) -> _Failed:
    """Returns why a job failed whose lease was taken back."""
    if job.phase_until is not None and job.phase_until <= now:
        phase = "not begun" if job.phase is None else job.phase
        message = f"it was {phase} for longer than {device.id!r} may take for that"
        return _Failed(job, device, message, job.phase, job.phase == "running", "timeout")
    message = f"agent {device.agent!r} did not renew its lease of {device.id!r}, or its host restarted"
    # An agent on another machine would have survived and reported what happened on the device.
    ran = job.phase == "running" and device.device.transport == _LOCAL
    return _Failed(job, device, message, job.phase, ran, "crash")


def _end_lease(connection: Connection, device: DeviceRow, now: float) -> None:
    state = device.state if device.state in _LASTING else DeviceState.IDLE
    devices.move(connection, device, state, now, lease_holder=None, lease_until=None)


def _record_failure(connection: Connection, failed: _Failed, now: float, *, of_device: bool = True) -> None:
    """Records a failure and decides what happens to its job and, where the device had a part in it, to the device."""
    job, device, message = failed.job, failed.device, failed.message
    jobs.add_attempt(connection, job, jobs.BLAMABLE if failed.ran else jobs.HARMLESS, message, now)
    if of_device:
        phase = failed.phase or "not begun"
        devices.log_event(connection, device.id, now, DeviceEventKind.FAILURE, phase, message, job.id)
        _rate_by_failure(connection, device, message, now)
    values = {"updated": now, "lease_until": None, "message": message} | _verdict(connection, failed, now)
    jobs.change(connection, job.id, **values)


def _end_uncounted(connection: Connection, job: JobRow, failure: Failure, now: float) -> None:
    """Ends a job that its agent refused or cancelled; no failure is counted."""
    jobs.add_attempt(connection, job, failure.kind, failure.message, now)
    refused = {"state": JobState.FAILED, "blame": Blame.REFUSED}
    values: dict[str, Any] = refused if failure.kind == "refused" else {"state": JobState.CANCELLED}
    values |= {"updated": now, "lease_until": None, "message": failure.message}
    jobs.change(connection, job.id, **values)


def _verdict(connection: Connection, failed: _Failed, now: float) -> dict[str, Any]:
    job = failed.job
    if job.kind is JobKind.MEASURE and failed.ran and _failed_on_a_good_device(connection, job):
        return {"state": JobState.FAILED, "blame": Blame.CANDIDATE, "reason": failed.reason}
    return jobs.after_failure(connection, job, now)


def _failed_on_a_good_device(connection: Connection, job: JobRow) -> bool:
    """Returns whether this job, or an unfinished one of its trial, failed on a device that has passed a check since."""
    of_trial = (attempt.c.study == job.study) & (attempt.c.trial == job.trial)
    of_job = jobs.attempts_at(job)
    undone = job_table.c.state != JobState.DONE
    query = (
        select(attempt.c.id)
        .join(device_table, device_table.c.id == attempt.c.device)
        .join(job_table, job_table.c.id == attempt.c.job)
        .where(attempt.c.kind == jobs.BLAMABLE, attempt.c.at < device_table.c.checked_at, undone)
        .where(of_job if job.trial is None else or_(of_job, of_trial))
    )
    return connection.scalar(query.limit(1)) is not None


def _rate_by_failure(connection: Connection, device: DeviceRow, message: str, now: float) -> None:
    """Makes a good device unknown, so that it is checked, and one on which three jobs failed bad."""
    if device.health not in (Health.GOOD, Health.UNKNOWN):
        return
    failed_jobs = devices.failed_jobs(connection, device.id, device.checked_at)
    if failed_jobs >= BAD_AFTER_JOBS:
        reason = f"{failed_jobs} jobs failed since its last passed check; last: {message}"
        devices.rate(connection, device, Health.BAD, reason, now)
    elif device.health is Health.GOOD:
        devices.rate(connection, device, Health.UNKNOWN, f"a job failed: {message}", now)


def _rate_by_check(
    connection: Connection, row: DeviceRow, outcome: CheckOutcome, reason: str | None, at: float, now: float
) -> None:
    if outcome is CheckOutcome.PASSED:
        if devices.failed_jobs(connection, row.id, at):
            devices.change(connection, row.id, check_due=now)
        else:
            devices.rate(connection, row, Health.GOOD, None, now, checked_at=at)
        return
    failed = row.checks_failed + 1
    later: dict[str, Any] = {"checks_failed": failed, "check_due": now + devices.check_pause_s(failed)}
    if outcome is CheckOutcome.FAILED:
        devices.rate(connection, row, Health.BAD, reason, now, **later)
    elif row.health is Health.GOOD:
        devices.change(connection, row.id, check_due=None)
    else:
        devices.rate(connection, row, row.health, reason, now, **later)
