"""Measurement jobs: the queue, claims, leases and heartbeats.

A job is one round of a measurement, for one device, and is claimed by that device's agent. Each claim increments the
device's epoch (fencing): agents with an older epoch are refused from then on. Until then a result counts however late
it arrives (`nas.infra.store.outcomes`).

A device runs the job of highest priority, then the oldest, among the kinds that its health allows and, while it is
reserved, of the study that it is reserved for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    and_,
    bindparam,
    exists,
    func,
    or_,
    select,
    true,
    update,
)

from nas.core.errors import InvalidInput
from nas.core.plan import Round, RoundResult
from nas.core.wire import Phase
from nas.infra.store import devices
from nas.infra.store.engine import Conflict, insert_if_absent
from nas.infra.store.models import attempt as attempt_table
from nas.infra.store.models import device as device_table
from nas.infra.store.models import job as job_table
from nas.infra.store.models import study as study_table
from nas.infra.store.rows import Blame, DeviceRow, DeviceState, Health, JobKind, JobRow, JobState, Reservation, from_row
from nas.infra.store.store import Store, retried

LEASE_S = 30.0
"""Seconds that a device's lease lasts unless renewed; agents renew it six times as often."""

MAX_FAILURES = 5
"""Failures after which a job fails for good, by the infrastructure unless the candidate was found at fault."""

BLAMABLE = "infrastructure"
"""Kind of an attempt: a failure that may be the candidate's."""
HARMLESS = "interrupted"
"""Kind of an attempt: a failure that cannot be the candidate's."""

RETRIED = "retried"
"""Kind of an attempt that marks where a job was queued again: earlier failures do not count."""

_BACKOFF_S = 5.0
"""Before a job that failed is tried again; doubles with each failure."""

LIVE = (JobState.QUEUED, JobState.LEASED)

CHECK_PRIORITY = 1000
"""Of health checks: they run before measurements."""

TAKES_JOBS = frozenset({DeviceState.IDLE, DeviceState.LEASED, DeviceState.PREPARING, DeviceState.COOLING})
"""States in which a device may be given a job."""

_KINDS = {
    Health.GOOD: (JobKind.MEASURE, JobKind.CHECK),
    Health.UNKNOWN: (JobKind.MEASURE, JobKind.CHECK),
    Health.BAD: (JobKind.CHECK,),
    Health.MAINTENANCE: (),
    Health.RETIRED: (),
}
_HELD = select(job_table).where(job_table.c.id == bindparam("of")).with_for_update(key_share=True)
_PHASES: tuple[Phase | None, ...] = (None, "preparing", "cooling", "running")


@retried
def enqueue(
    store: Store,
    result_key: str,
    round: Round,
    *,
    device: str,
    number: int = 0,
    trial: tuple[int, int | None] | None = None,
    priority: int = 0,
    kind: JobKind = JobKind.MEASURE,
    not_before: float = 0.0,
) -> JobRow:
    """Queues round `number` of the measurement `result_key` and returns its job, which may exist already.

    A cancelled job is queued again, as it is wanted now. A failed one stays failed until `retry`.

    `trial` is (study, number), number None: for the study as a whole. Higher priorities run first, equal ones in the
    order of their creation, none before `not_before`. Jobs of the kind `check` also run on a device of bad health.
    """
    id = job_id(result_key, number)
    with store.write() as connection:
        devices.read(connection, device)
        now = store.now()
        study, trial_number = trial or (None, None)
        of: dict[str, Any] = {"kind": kind, "device": device, "study": study, "trial": trial_number}
        fresh = of | {"priority": priority, "payload": round.model_dump(mode="json"), "not_before": not_before}
        fresh |= _clean(now)
        new: dict[str, Any] = {"id": id, "result_key": result_key, "round": number, "created": now}
        if not insert_if_absent(connection, job_table, **new, **fresh) and change(
            connection, id, JobState.CANCELLED, **fresh
        ):
            _forget_failures(connection, id, now)
        stored = find(connection, id)
        if stored is None:
            raise Conflict(f"job {id!r} was there, and was deleted with its study")
        return stored


@retried
def claim(store: Store, device: str, agent: str) -> JobRow | None:
    """Leases the next job for a device to its agent under a new epoch; returns None where there is none.

    An agent that asks while its device is leased does not run that job (it restarted, never received the answer, or is
    a copy of the one that does): it is given the job again under a new epoch, and only later if the job failed before.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        row = devices.heard_from(connection, devices.read(connection, device, agent=agent), now)
        if row.state not in TAKES_JOBS:
            return None
        if row.lease_until is not None:
            _take_back(connection, row, now)
        next_row = next_job(connection, row, now)
        if next_row is None:
            devices.move(connection, row, DeviceState.IDLE, now, lease_holder=None, lease_until=None)
            return None
        job = _job(next_row)
        lease: dict[str, Any] = {"epoch": row.epoch + 1, "lease_until": now + LEASE_S}
        devices.move(connection, row, DeviceState.LEASED, now, lease_holder=agent, **lease)
        leased: dict[str, Any] = {"state": JobState.LEASED, "attempts": job.attempts + 1, "phase": None, "updated": now}
        leased |= {"phase_until": now + devices.phase_limit_s(None, job.payload), **lease}
        change(connection, job.id, **leased)
        return replace(job, **leased)


@retried
def renew(store: Store, id: str, device: str, agent: str, epoch: int, *, phase: Phase = "running") -> bool:
    """Extends the lease of a job that has reached `phase`: a heartbeat. Returns False where the agent should stop.

    That is where the job was cancelled, the epoch is an older one, or the phase has lasted too long; such a heartbeat
    does not count as a message from the device, since what hangs there may be what asks for jobs, too. An expired lease
    is extended as long as the device was not leased again.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        row = devices.read(connection, device, agent=agent)
        job = find(connection, id)
        if job is None or job.state not in LIVE or (job.device, job.epoch, row.epoch) != (device, epoch, epoch):
            return False
        entered = _PHASES.index(phase) > _PHASES.index(job.phase)
        until = now + devices.phase_limit_s(phase, job.payload) if entered else job.phase_until
        if until is not None and until <= now:
            return False
        row = devices.heard_from(connection, row, now)
        of_phase = devices.state_of(phase if entered else job.phase or phase)
        state = row.state if row.state is DeviceState.DRAINING else of_phase
        devices.move(connection, row, state, now, lease_holder=agent, lease_until=now + LEASE_S)
        reached: dict[str, Any] = {"phase": phase, "phase_until": until} if entered else {}
        change(connection, id, state=JobState.LEASED, updated=now, lease_until=now + LEASE_S, **reached)
        return True


@retried
def extend_leases(store: Store) -> None:
    """Gives every lease its full time again. A coordinator calls it when it starts, before `outcomes.expire`."""
    with store.write() as connection:
        until = store.now() + LEASE_S
        ids = devices.hold_all(connection, device_table.c.lease_until.is_not(None))
        connection.execute(update(device_table).where(device_table.c.id.in_(ids)).values(lease_until=until))
        leased = (job_table.c.state == JobState.LEASED) & job_table.c.device.in_(ids)
        connection.execute(update(job_table).where(leased).values(lease_until=until))
        # Agents could not report a new phase meanwhile.
        connection.execute(update(job_table).where(leased, job_table.c.phase_until < until).values(phase_until=until))


@retried
def restart_phases(store: Store) -> None:
    """Gives every leased job the full time of its phase again: after a jump of the clock its age is not known."""
    leased = select(job_table).where(job_table.c.state == JobState.LEASED).order_by(job_table.c.id)
    with store.write() as connection:
        now = store.now()
        for row in connection.execute(leased.with_for_update(key_share=True)).all():
            job = _job(row)
            change(connection, job.id, phase_until=now + devices.phase_limit_s(job.phase, job.payload))


def get(store: Store, id: str) -> JobRow | None:
    """Returns one job; None where there is none (deleting a study deletes its jobs)."""
    with store.read() as connection:
        row = connection.execute(select(job_table).where(job_table.c.id == id)).first()
        return _job(row) if row else None


def of_key(store: Store, result_key: str) -> list[JobRow]:
    """Returns the rounds of one measurement, in order."""
    return _all(store, job_table.c.result_key == result_key, order=(job_table.c.round,))


def live(store: Store) -> list[JobRow]:
    """Returns the queued and leased jobs in the order in which they will be claimed."""
    order = (job_table.c.priority.desc(), job_table.c.created, job_table.c.id)
    return _all(store, job_table.c.state.in_(LIVE), order=order)


def held(store: Store, agent: str) -> list[JobRow]:
    """Returns the jobs whose results are expected from `agent`: leased, or with a lease that only just expired."""
    current = (job_table.c.epoch == device_table.c.epoch) & job_table.c.state.in_(LIVE)
    of_agent = (device_table.c.id == job_table.c.device) & (device_table.c.agent == agent)
    return _all(store, exists().where(of_agent, current), order=(job_table.c.id,))


def with_work(store: Store, among: Collection[str]) -> frozenset[str]:
    """Returns those of the devices `among` for which `claim` would find a job."""
    of_device = (job_table.c.device == device_table.c.id) & (job_table.c.state == JobState.QUEUED)
    by_health = or_(
        *((device_table.c.health == health) & job_table.c.kind.in_(kinds) for health, kinds in _KINDS.items() if kinds)
    )
    with store.read() as connection:
        admitted = _admitted(job_table, devices.reservations(connection, store.now()))
        due = exists().where(of_device, by_health, _due(job_table, store.now()), admitted)
        query = select(device_table.c.id).where(device_table.c.id.in_(among), device_table.c.state.in_(TAKES_JOBS), due)
        return frozenset(connection.scalars(query))


@retried
def cancel(store: Store, ids: Iterable[str]) -> None:
    """Cancels jobs that are not finished; an agent that runs one learns of it from its next heartbeat."""
    with store.write() as connection:
        _cancel(connection, store.now(), job_table.c.id.in_(list(ids)))


@retried
def cancel_study(store: Store, study: int) -> None:
    """Cancels all unfinished jobs of a study."""
    with store.write() as connection:
        _cancel(connection, store.now(), job_table.c.study == study)


@retried
def retry(store: Store, id: str) -> None:
    """Queues a failed job again; its failures count from 0.

    Raises:
        InvalidInput: it has not failed.
    """
    with store.write() as connection:
        now = store.now()
        if not change(connection, id, JobState.FAILED, not_before=now, **_clean(now)):
            raise InvalidInput(f"job {id!r} has not failed, so it cannot be retried")
        _forget_failures(connection, id, now)


@retried
def give_up(store: Store, id: str, message: str) -> None:
    """Fails an unfinished job that no agent can do, as the infrastructure's failure; `retry` queues it again."""
    end: dict[str, Any] = {"state": JobState.FAILED, "blame": Blame.INFRASTRUCTURE, "message": message}
    with store.write() as connection:
        for state in LIVE:
            change(connection, id, state, epoch=None, lease_until=None, updated=store.now(), **end)


def job_id(result_key: str, number: int) -> str:
    """Returns the id of a measurement's round."""
    return f"{result_key}.{number}"


def find(connection: Connection, id: str) -> JobRow | None:
    """Returns the job `id`, if it exists, and locks it until the transaction ends."""
    row = connection.execute(_HELD, {"of": id}).first()
    return _job(row) if row else None


def change(connection: Connection, id: str, if_state: JobState | None = None, **values: Any) -> bool:
    """Sets columns of a job, only where it is in `if_state`, if given; returns whether it did."""
    query = update(job_table).where(job_table.c.id == id)
    if if_state is not None:
        query = query.where(job_table.c.state == if_state)
    return connection.execute(query.values(values)).rowcount == 1


def next_job(connection: Connection, device: DeviceRow, now: float) -> Row[Any] | None:
    """Returns and locks the row of the next job for the device; one that another transaction has locked is skipped.

    First the highest priority is found, then its oldest job: one index lookup each, however long the queue.
    """
    reserved = devices.reservations(connection, now)

    def ready(job: FromClause) -> ColumnElement[bool]:
        queued = (job.c.device == device.id) & (job.c.state == JobState.QUEUED)
        return queued & job.c.kind.in_(_KINDS[device.health]) & _due(job, now) & _admitted(job, reserved)

    other = job_table.alias()
    highest = select(other.c.priority).where(ready(other)).order_by(other.c.priority.desc()).limit(1).scalar_subquery()
    of_highest = select(job_table).where(ready(job_table), job_table.c.priority == highest)
    first = of_highest.order_by(job_table.c.created, job_table.c.id).limit(1)
    row = connection.execute(first.with_for_update(key_share=True, skip_locked=True)).first()
    if row is not None or connection.dialect.name == "sqlite":
        return row
    # Others may hold every job of that priority, because they cancel them.
    order = (job_table.c.priority.desc(), job_table.c.created, job_table.c.id)
    any_other = select(job_table).where(ready(job_table)).order_by(*order).limit(1)
    return connection.execute(any_other.with_for_update(key_share=True, skip_locked=True)).first()


def _clean(now: float) -> dict[str, Any]:
    """Returns the columns of a job that waits for its first attempt."""
    outcome: dict[str, Any] = {"blame": None, "reason": None, "message": None}
    return {"state": JobState.QUEUED, "attempts": 0, "updated": now} | outcome


def add_attempt(connection: Connection, job: JobRow, kind: str, message: str, now: float) -> None:
    """Stores an attempt at a job that gave no result."""
    of_job = {"job": job.id, "device": job.device, "study": job.study, "trial": job.trial, "result_key": job.result_key}
    connection.execute(attempt_table.insert().values(kind=kind, message=message, stage="measure", at=now, **of_job))


def attempts_at(job: JobRow) -> ColumnElement[bool]:
    """Returns the condition of attempts at a job that its own study recorded: others may be from an imported file."""
    return (attempt_table.c.job == job.id) & attempt_table.c.study.is_not_distinct_from(job.study)


def after_failure(connection: Connection, job: JobRow, now: float) -> dict[str, Any]:
    """Returns the columns of a job whose failure was recorded: it is tried again later, or failed too often.

    A job that takes its agent down each time must end some day.
    """
    retried_last = (
        select(func.max(attempt_table.c.id)).where(attempts_at(job), attempt_table.c.kind == RETRIED).scalar_subquery()
    )
    counted = attempt_table.c.kind.in_((BLAMABLE, HARMLESS)) & (attempt_table.c.id > func.coalesce(retried_last, 0))
    failures = connection.scalar(select(func.count()).where(attempts_at(job), counted)) or 0
    if failures >= MAX_FAILURES:
        return {"state": JobState.FAILED, "blame": Blame.INFRASTRUCTURE}
    return {"state": JobState.QUEUED, "not_before": now + _BACKOFF_S * 2 ** (failures - 1)}


def _forget_failures(connection: Connection, id: str, now: float) -> None:
    """Marks in the log of attempts that earlier failures of a job do not count any more (`MAX_FAILURES`)."""
    job, attempts = find(connection, id), select(attempt_table.c.id).where(attempt_table.c.job == id)
    if job is not None and connection.scalar(attempts.limit(1)) is not None:
        add_attempt(connection, job, RETRIED, "queued again", now)


def _admitted(job: FromClause, reserved: Mapping[str, Reservation]) -> ColumnElement[bool]:
    """Returns the condition that a job's device is not reserved, or reserved for the job's study."""
    health_check = job.c.study.is_(None) & (job.c.kind == JobKind.CHECK)
    admitted: list[ColumnElement[bool]] = [true()]
    for device, reservation in reserved.items():
        other = job.c.device != device
        if reservation.study is None:
            admitted.append(other)
        else:
            study = select(study_table.c.id).where(study_table.c.name == reservation.study)
            admitted.append(other | health_check | job.c.study.in_(study))
    return and_(*admitted)


def _due(job: FromClause, now: float) -> ColumnElement[bool]:
    """Returns the condition that a job's pause is over; it is where the clock was set back since the pause began."""
    return (job.c.not_before <= now) | (job.c.updated > now)


def _all(store: Store, *which: ColumnElement[bool], order: tuple[Any, ...]) -> list[JobRow]:
    return [_job(row) for row in store.rows(select(job_table).where(*which).order_by(*order))]


def _job(row: Row[Any]) -> JobRow:
    return from_row(JobRow, row, payload=Round.model_validate, result=RoundResult.model_validate)


def _take_back(connection: Connection, device: DeviceRow, now: float) -> None:
    """Records that the job of a leased device was not done, and queues it: the first time it may begin at once."""
    held = (job_table.c.device == device.id) & (job_table.c.state == JobState.LEASED)
    message = f"agent {device.agent!r} asked for work while it had the job: it restarted, or runs twice"
    for row in connection.execute(select(job_table).where(held).with_for_update(key_share=True)).all():
        job = _job(row)
        add_attempt(connection, job, HARMLESS, message, now)
        values = after_failure(connection, job, now)
        if job.attempts == 1:
            values |= {"not_before": now}
        change(connection, job.id, lease_until=None, updated=now, message=message, **values)


def _cancel(connection: Connection, now: float, *which: ColumnElement[bool]) -> None:
    unfinished = select(job_table.c.id).where(job_table.c.state.in_(LIVE), *which).order_by(job_table.c.id)
    ids = list(connection.scalars(unfinished.with_for_update(key_share=True)))
    end = {"state": JobState.CANCELLED, "epoch": None, "lease_until": None, "updated": now}
    connection.execute(update(job_table).where(job_table.c.id.in_(ids)).values(**end))
