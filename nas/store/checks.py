"""Health checks: which devices are due for one, and what follows from how it ended."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, delete, exists, select

from nas.store import device_log, devices
from nas.store.jobs import LIVE
from nas.store.models import device as device_table
from nas.store.models import job as job_table
from nas.store.rows import CheckOutcome, DeviceEventKind, DeviceRow, DeviceState, Health, JobKind, JobState
from nas.store.store import Store, retried

_UNREACHABLE = (DeviceState.OFFLINE, DeviceState.DRAINING)
_CHECKED = (Health.UNKNOWN, Health.GOOD, Health.BAD)
_ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
_JOBS_KEPT_S = 86_400.0


def due(store: Store, *, among: Collection[str] | None = None, most: int = 1000) -> list[DeviceRow]:
    """Devices that should be checked now and can be reached, those that waited longest first, at most `most`.

    One that runs a check is not among them, nor one that a study calibrates just now, which says as much.

    Args:
        store: the database.
        among: ids to choose from; None: all.
        most: how many to give.
    """
    columns = device_table.c
    wanted = [columns.check_due <= store.now(), columns.health.in_(_CHECKED), columns.state.not_in(_UNREACHABLE)]
    if among is not None:
        wanted.append(columns.id.in_(among))
    of_device = (job_table.c.device == columns.id) & job_table.c.state.in_(LIVE)
    query = select(device_table).where(*wanted, ~exists().where(of_device, job_table.c.kind == JobKind.CHECK))
    return devices.select_rows(store, query.order_by(columns.check_due, columns.id).limit(most))


@retried
def request(store: Store, id: str) -> DeviceRow:
    """Asks for a check now, whatever is thought of the device; one that runs already is the one asked for.

    The check ended once `check_number` has risen; `nas.store.devices.history` tells how.

    Raises:
        UnknownName: no such device.
    """
    with store.write() as connection:
        devices.read(connection, id)
        devices.change(connection, id, check_due=store.now())
        return devices.read(connection, id)


@retried
def conclude(store: Store, id: str, number: int, outcome: CheckOutcome, reason: str | None, at: float) -> bool:
    """Ends check `number` of a device; False where somebody else ended it before.

    Passed: the device is good, unless a job failed there after `at`. Failed: it is bad. Unsure: it stays what it was,
    with the reason. What a person decided (maintenance, retired) stays in any case. A device that did not pass is
    checked again, ever more rarely.

    Args:
        store: the database.
        id: of the device.
        number: its `check_number` when the check began.
        outcome: how it ended.
        reason: why it was not passed.
        at: when the last of its runs ended.

    Raises:
        UnknownName: no such device.
    """
    with store.write() as connection:
        row, now = devices.read(connection, id), store.now()
        if row.check_number != number:
            return False
        devices.change(connection, id, check_number=number + 1)
        device_log.record(connection, id, now, DeviceEventKind.CHECK, outcome, reason)
        _forget_old_jobs(connection, id, now)
        if row.health in _CHECKED:
            _follow(connection, row, outcome, reason, at, now)
        return True


def _follow(
    connection: Connection, row: DeviceRow, outcome: CheckOutcome, reason: str | None, at: float, now: float
) -> None:
    if outcome is CheckOutcome.PASSED:
        if device_log.failed_jobs(connection, row.id, at):
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


def _forget_old_jobs(connection: Connection, device: str, now: float) -> None:
    """Jobs of checks belong to no study, with which they would be deleted."""
    of_check = (job_table.c.kind == JobKind.CHECK) & job_table.c.study.is_(None) & (job_table.c.device == device)
    old = job_table.c.state.in_(_ENDED) & (job_table.c.updated < now - _JOBS_KEPT_S)
    connection.execute(delete(job_table).where(of_check, old))
