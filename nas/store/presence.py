"""Word of many agents at once: who was heard from, and whose leases go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Connection, Select, bindparam, select, update

from nas.core.protocol import Phase
from nas.store import devices
from nas.store.jobs import LEASE_S
from nas.store.models import device as device_table
from nas.store.models import job as job_table
from nas.store.rows import DeviceState, JobState
from nas.store.store import Store, retried
from nas.store.timeouts import LIMITS

_LONG_S = LIMITS[DeviceState.OFFLINE].seconds


def _held_until() -> Select[Any]:
    of: dict[str, BindParameter[Any]] = {
        name: bindparam(name) for name in ("job", "device", "agent", "epoch", "phase", "now")
    }
    serves = (device_table.c.id == of["device"]) & (device_table.c.agent == of["agent"])
    serves &= (device_table.c.epoch == of["epoch"]) & (device_table.c.state != DeviceState.OFFLINE)
    current = (job_table.c.epoch == of["epoch"]) & (job_table.c.state == JobState.LEASED)
    current &= (job_table.c.phase == of["phase"]) & (job_table.c.phase_until > of["now"])
    return select(job_table.c.lease_until).join(device_table).where(job_table.c.id == of["job"], serves, current)


# Made once: each heartbeat asks, and to make it costs more than to ask.
_HELD_UNTIL = _held_until()


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease to prolong, if it is the device's current one."""

    job: str
    device: str
    agent: str
    epoch: int


def held_until(store: Store, id: str, device: str, agent: str, epoch: int, phase: Phase) -> float | None:
    """When the lease of job `id` runs out; None where that is not all, and `jobs.renew` says the rest.

    That is so where `agent` does not hold it just now, the device is taken to be offline, or the job has come to
    another phase or was in it for too long.
    """
    of = {"job": id, "device": device, "agent": agent, "epoch": epoch, "phase": phase, "now": store.now()}
    with store.read() as connection:
        until = connection.scalar(_HELD_UNTIL, of)
    return None if until is None else float(until)


@retried
def note(store: Store, heard: Collection[str], renewed: Sequence[Renewal], *, lease_s: float = LEASE_S) -> None:
    """Writes down that devices were heard from, those of renewals too, and prolongs leases.

    A lease that meanwhile ended, or is another's, stays as it is. So does what a device does: its agent may have said
    meanwhile that it is gone. `jobs.claim` and `jobs.renew` bring one back from offline.
    """
    everybody = {*heard, *(each.device for each in renewed)}
    if not everybody:
        return
    now, of_heard = store.now(), device_table.c.id.in_(everybody)
    of_device = device_table.c.id == bindparam("of_device")
    of_epoch: BindParameter[int] = bindparam("of_epoch")
    seen = update(device_table).where(of_heard).values(last_seen=now)
    lease = update(device_table).where(of_device, device_table.c.epoch == of_epoch)
    lease = lease.where(device_table.c.lease_until.is_not(None)).values(lease_until=now + lease_s)
    job = update(job_table).where(job_table.c.id == bindparam("of_job"), job_table.c.epoch == of_epoch)
    job = job.where(job_table.c.state == JobState.LEASED).values(lease_until=now + lease_s)
    with store.write() as connection:
        devices.hold_all(connection, of_heard)
        _check_returned(connection, everybody, now)
        connection.execute(seen)
        if renewed:
            connection.execute(lease, [{"of_device": each.device, "of_epoch": each.epoch} for each in renewed])
            connection.execute(job, [{"of_job": each.job, "of_epoch": each.epoch} for each in renewed])


def _check_returned(connection: Connection, heard: Collection[str], now: float) -> None:
    """What was away for long, while nobody was there to note it, is to be checked."""
    away = (device_table.c.state != DeviceState.OFFLINE) & (device_table.c.last_seen < now - _LONG_S)
    for device in connection.scalars(select(device_table.c.id).where(away).order_by(device_table.c.id)).all():
        if device in heard:
            devices.heard_from(connection, devices.read(connection, device), now)
