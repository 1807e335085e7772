"""Measurement jobs: one round each, for one device, claimed by that device's agent.

A claim raises the device's epoch. Whoever holds an older one is refused from then on; until then a result counts
however late it comes (`nas.store.outcomes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, select, update

from nas.core.errors import InvalidInput
from nas.core.plan import Plan, Round
from nas.core.protocol import Phase
from nas.store import devices, job_rows, queue
from nas.store.engine import Conflict
from nas.store.models import device as device_table
from nas.store.models import job as job_table
from nas.store.rows import Blame, DeviceState, JobKind, JobRow, JobState
from nas.store.store import Store, retried
from nas.store.timeouts import phase_limit_s, state_of
from nas.store.upsert import insert_if_absent

LEASE_S = 30.0
"""Seconds a device's lease lasts unless renewed; agents renew three times as often."""

MAX_FAILURES = 5
"""Failures of one job after which it is given up as the infrastructure's, where nothing says it is the candidate's."""

LIVE = (JobState.QUEUED, JobState.LEASED)

_HEARD_S = 30.0
"""A device that was heard from within this time need not be noted again."""

CHECK_PRIORITY = 1000
"""Of health checks. Measurements do not wait for one, which nobody may be there to ask for: it goes before them."""

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
    """Queues round `number` of the measurement `result_key`, unless it is there already: then that job is given.

    A cancelled job is queued anew. A failed one stays failed until `retry`.

    Args:
        store: where it is kept.
        result_key: of the measurement that the round is part of.
        round: what the device runs.
        device: id.
        number: of the round, from 0.
        trial: (study, number) that wants it; no number where the study as a whole does.
        priority: higher goes first; equals go in the order they came.
        kind: `check` jobs also go to a device of bad health.
        not_before: seconds since the epoch before which it is not claimed.

    Raises:
        UnknownName: no such device.
    """
    id = job_id(result_key, number)
    with store.write() as connection:
        devices.read(connection, device)
        now = store.now()
        values = {"result_key": result_key, "round": number, "kind": kind, "device": device, "priority": priority}
        values |= {"payload": round.model_dump(mode="json"), "state": JobState.QUEUED, "attempts": 0}
        values |= {"not_before": not_before, "created": now, "updated": now}
        study, trial_number = trial or (None, None)
        if not insert_if_absent(connection, job_table, id=id, study=study, trial=trial_number, **values):
            anew = {"state": JobState.QUEUED, "attempts": 0, "not_before": not_before, "updated": now}
            job_rows.change(connection, id, JobState.CANCELLED, **anew)
        stored = job_rows.find(connection, id)
        if stored is None:
            raise Conflict(f"job {id!r} was there, and was deleted with its study")
        return stored


@retried
def claim(store: Store, device: str, agent: str, *, lease_s: float = LEASE_S) -> JobRow | None:
    """Leases the next job for a device to its agent under a new epoch; None where there is nothing to do.

    An agent that asks while its device is leased is not running that job any more (it restarted, or never got the
    answer): it gets the job again under a new epoch.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    if queue.quiet(store, device, agent, heard_within_s=_HEARD_S):
        return None
    with store.write() as connection:
        now = store.now()
        # When it was heard from is written down with whatever else changes.
        row = devices.heard_from(connection, devices.read(connection, device, agent=agent), now, note=False)
        if row.state not in queue.TAKES_JOBS:
            devices.change(connection, device, last_seen=now)
            return None
        if row.lease_until is not None:
            _take_back(connection, device, now)
        found = queue.next_job(connection, row, now)
        if found is None:
            devices.move(connection, row, DeviceState.IDLE, now, last_seen=now, lease_holder=None, lease_until=None)
            return None
        job = job_rows.job_of(found)
        lease: dict[str, Any] = {"epoch": row.epoch + 1, "lease_until": now + lease_s}
        devices.move(connection, row, DeviceState.LEASED, now, last_seen=now, lease_holder=agent, **lease)
        taken: dict[str, Any] = {"state": JobState.LEASED, "attempts": job.attempts + 1, "phase": None, "updated": now}
        taken |= {"phase_until": now + phase_limit_s(None, job.payload), **lease}
        job_rows.change(connection, job.id, **taken)
        return replace(job, **taken)


@retried
def renew(
    store: Store, id: str, device: str, agent: str, epoch: int, *, phase: Phase = "running", lease_s: float = LEASE_S
) -> bool:
    """Prolongs the lease of a job that has come to `phase`; False where the agent should stop.

    That is so where the job was cancelled, the epoch is an older one, or the phase has lasted too long. Then it does
    not count as a word from the device either: what hangs there may be what asks for jobs, too. A lease that expired is
    good again as long as the device was not leased anew.

    Raises:
        UnknownName: no such device.
        InvalidInput: another agent serves it.
    """
    with store.write() as connection:
        now = store.now()
        row = devices.read(connection, device, agent=agent)
        job = job_rows.find(connection, id)
        if job is None or job.state not in LIVE or (job.device, job.epoch, row.epoch) != (device, epoch, epoch):
            return False
        entered = _PHASES.index(phase) > _PHASES.index(job.phase)
        until = now + phase_limit_s(phase, job.payload) if entered else job.phase_until
        if until is not None and until <= now:
            return False
        row = devices.heard_from(connection, row, now, note=False)
        state = row.state if row.state is DeviceState.DRAINING else state_of(phase if entered else job.phase or phase)
        devices.move(connection, row, state, now, last_seen=now, lease_holder=agent, lease_until=now + lease_s)
        told: dict[str, Any] = {"phase": phase, "phase_until": until} if entered else {}
        job_rows.change(connection, id, state=JobState.LEASED, updated=now, lease_until=now + lease_s, **told)
        return True


def get(store: Store, id: str) -> JobRow | None:
    """One job; None where there is none (any more: deleting a study deletes its jobs)."""
    with store.read() as connection:
        row = connection.execute(select(job_table).where(job_table.c.id == id)).first()
        return job_rows.job_of(row) if row else None


def of_key(store: Store, result_key: str) -> list[JobRow]:
    """The rounds of one measurement, in order."""
    query = select(job_table).where(job_table.c.result_key == result_key).order_by(job_table.c.round)
    with store.read() as connection:
        return [job_rows.job_of(row) for row in connection.execute(query)]


def live(store: Store, *, study: int | None = None) -> list[JobRow]:
    """Jobs queued or leased, of one study or all, in the order they will be claimed."""
    query = select(job_table).where(job_table.c.state.in_(LIVE)).order_by(*_order())
    if study is not None:
        query = query.where(job_table.c.study == study)
    with store.read() as connection:
        return [job_rows.job_of(row) for row in connection.execute(query)]


@retried
def cancel(store: Store, ids: Iterable[str]) -> None:
    """Takes back jobs that are not finished; an agent that runs one learns it from its next heartbeat."""
    with store.write() as connection:
        _cancel(connection, store.now(), job_table.c.id.in_(list(ids)))


@retried
def cancel_study(store: Store, study: int, *, trial: int | None = None) -> None:
    """Takes back all unfinished jobs of a study, or of one trial."""
    of_trial = [] if trial is None else [job_table.c.trial == trial]
    with store.write() as connection:
        _cancel(connection, store.now(), job_table.c.study == study, *of_trial)


@retried
def retry(store: Store, id: str) -> None:
    """Queues a failed job anew, with a clean count of attempts.

    Raises:
        InvalidInput: it has not failed.
    """
    with store.write() as connection:
        now = store.now()
        clean: dict[str, Any] = {
            "state": JobState.QUEUED,
            "attempts": 0,
            "blame": None,
            "reason": None,
            "message": None,
        }
        if not job_rows.change(connection, id, JobState.FAILED, not_before=now, updated=now, **clean):
            raise InvalidInput(f"job {id!r} has not failed, so it cannot be retried")


@retried
def give_up(store: Store, id: str, message: str) -> None:
    """Ends a job that nobody can do as the infrastructure's failure, unless it has ended; `retry` queues it anew."""
    end: dict[str, Any] = {"state": JobState.FAILED, "blame": Blame.INFRASTRUCTURE, "message": message}
    with store.write() as connection:
        for state in LIVE:
            job_rows.change(connection, id, state, epoch=None, lease_until=None, updated=store.now(), **end)


def job_id(result_key: str, number: int) -> str:
    """The id of a measurement's round."""
    return f"{result_key}.{number}"


def held(store: Store, agent: str) -> list[JobRow]:
    """The jobs whose results are awaited from `agent`: leased, or leased until lately and not granted anew."""
    current = (job_table.c.epoch == device_table.c.epoch) & job_table.c.state.in_(LIVE)
    query = select(job_table).join(device_table).where(device_table.c.agent == agent, current)
    with store.read() as connection:
        return [job_rows.job_of(row) for row in connection.execute(query)]


def files(round: Round) -> frozenset[str]:
    """SHA-256 of every file that a round needs: what its agent may download, and what must stay in the store."""
    plans = (round.candidate, round.reference) if round.reference else (round.candidate,)
    return frozenset(sha256 for plan in plans for sha256 in _plan_files(plan))


def _plan_files(plan: Plan) -> list[str]:
    return [file.sha256 for file in (*(given.travels for given in plan.inputs.values()), *plan.runner.files.values())]


def _take_back(connection: Connection, device: str, now: float) -> None:
    held = (job_table.c.device == device) & (job_table.c.state == JobState.LEASED)
    # A job that takes its agent down with it must end some day.
    given_up = held & (job_table.c.attempts >= MAX_FAILURES)
    message = f"its agent was gone {MAX_FAILURES} times before it was done"
    end = {"state": JobState.FAILED, "blame": Blame.INFRASTRUCTURE, "message": message}
    connection.execute(update(job_table).where(given_up).values(lease_until=None, updated=now, **end))
    connection.execute(update(job_table).where(held).values(state=JobState.QUEUED, lease_until=None, updated=now))


def _order() -> tuple[Any, ...]:
    return job_table.c.priority.desc(), job_table.c.created, job_table.c.id


def _cancel(connection: Connection, now: float, *which: Any) -> None:
    unfinished = select(job_table.c.id).where(job_table.c.state.in_(LIVE), *which).order_by(job_table.c.id)
    ids = list(connection.scalars(unfinished.with_for_update(key_share=True)))
    end = {"state": JobState.CANCELLED, "epoch": None, "lease_until": None, "updated": now}
    connection.execute(update(job_table).where(job_table.c.id.in_(ids)).values(**end))
