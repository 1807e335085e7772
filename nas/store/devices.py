"""Devices: what they are, what they do (state) and what is thought of them (health)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, select, update

from nas.core.device import Device
from nas.core.errors import InvalidInput, UnknownName
from nas.store.models import agent as agent_table
from nas.store.models import calibration, job
from nas.store.models import device as device_table
from nas.store.rows import DeviceRow, DeviceState, Health, JobState
from nas.store.store import Store, retried
from nas.store.upsert import insert_if_absent


class NotServed(InvalidInput):
    """An agent speaks of a device that is another's."""


@retried
def register(store: Store, agent: str, devices: Sequence[Device], *, boot_id: str) -> list[DeviceRow]:
    """Replaces what `agent` serves. May be repeated: leases, health and calibrations stay.

    Devices it no longer names go offline. A new `boot_id` ends the leases of its devices: nothing on them survived.
    A device that describes itself otherwise than before has unknown health again.

    Raises:
        InvalidInput: the agent never enrolled.
        NotServed: a device is served by another agent.
    """
    ids = [device.id for device in devices]
    with store.write() as connection:
        now = store.now()
        known = select(agent_table).where(agent_table.c.name == agent)
        row = connection.execute(known.with_for_update(key_share=True)).first()
        if row is None:
            raise InvalidInput(f"agent {agent!r} has not enrolled; run 'nas agent enrol' there")
        if row.boot_id not in (None, boot_id):
            _end_leases(connection, agent, now)
        connection.execute(
            update(agent_table).where(agent_table.c.name == agent).values(boot_id=boot_id, last_seen=now)
        )
        for device in sorted(devices, key=lambda device: device.id):
            _register(connection, agent, device, now)
        gone = hold_all(connection, device_table.c.agent == agent, device_table.c.id.not_in(ids))
        connection.execute(update(device_table).where(device_table.c.id.in_(gone)).values(state=DeviceState.OFFLINE))
        return [read(connection, id) for id in ids]


def get(store: Store, id: str) -> DeviceRow:
    """One device.

    Raises:
        UnknownName: no such device.
    """
    with store.read() as connection:
        return read(connection, id, held=False)


def all(store: Store) -> list[DeviceRow]:
    """Every device, by id."""
    with store.read() as connection:
        return [_row(row) for row in connection.execute(select(device_table).order_by(device_table.c.id))]


@retried
def set_state(store: Store, id: str, state: DeviceState) -> None:
    """What the device does now. `draining` lets it finish its job and take no other; `idle` ends that.

    Raises:
        UnknownName: no such device.
    """
    with store.write() as connection:
        read(connection, id)
        connection.execute(update(device_table).where(device_table.c.id == id).values(state=state))


@retried
def set_health(store: Store, id: str, health: Health, reason: str | None = None) -> None:
    """What is thought of the device now, and why. `good` says that it passed a health check just now.

    Raises:
        UnknownName: no such device.
    """
    with store.write() as connection:
        read(connection, id)
        values: dict[str, Any] = {"health": health, "health_reason": reason}
        if health is Health.GOOD:
            values["checked_at"] = store.now()
        connection.execute(update(device_table).where(device_table.c.id == id).values(**values))


@retried
def remove(store: Store, id: str) -> None:
    """Retires a device and forgets its calibrations.

    The row stays, so that its epochs never start over; it stays retired when its agent names it again, until
    `set_health` says otherwise or another agent registers it.

    Raises:
        InvalidInput: it has a job queued or running.
        UnknownName: no such device.
    """
    with store.write() as connection:
        read(connection, id)
        busy = exists().where(job.c.device == id, job.c.state.in_([JobState.QUEUED, JobState.LEASED]))
        if connection.scalar(select(busy)):
            raise InvalidInput(f"device {id!r} has jobs to do; drain it and stop the studies that use it first")
        connection.execute(delete(calibration).where(calibration.c.device == id))
        retired = {"health": Health.RETIRED, "health_reason": "removed", "state": DeviceState.OFFLINE}
        connection.execute(update(device_table).where(device_table.c.id == id).values(**retired))


def read(connection: Connection, id: str, *, agent: str | None = None, held: bool = True) -> DeviceRow:
    """The device, which must be served by `agent`, if given.

    Held until the writing transaction ends, unless `held` is false: who holds a device is alone with its jobs, too.

    Raises:
        UnknownName: no such device; an agent is told of its own ones only.
        NotServed: another agent serves it.
    """
    query = select(device_table).where(device_table.c.id == id)
    row = connection.execute(query.with_for_update(key_share=True) if held else query).first()
    if row is None:
        valid = select(device_table.c.id)
        raise UnknownName(
            "device", id, connection.scalars(valid.where(device_table.c.agent == agent) if agent else valid)
        )
    if agent is not None and row.agent != agent:
        raise NotServed(f"device {id!r} is served by agent {row.agent!r}, not by {agent!r}")
    return _row(row)


def hold_all(connection: Connection, *which: ColumnElement[bool], skip_held: bool = False) -> list[str]:
    """The ids of the devices for which all of `which` hold, each held; those that others hold may be left out."""
    query = select(device_table.c.id).where(*which).order_by(device_table.c.id)
    return list(connection.scalars(query.with_for_update(key_share=True, skip_locked=skip_held)))


def heard_from(connection: Connection, device: DeviceRow, now: float, **changes: Any) -> None:
    """Notes that the device's agent spoke for it, and `changes`; an offline device is idle again."""
    state = DeviceState.IDLE if device.state is DeviceState.OFFLINE else device.state
    values = {"last_seen": now, "state": state} | changes
    connection.execute(update(device_table).where(device_table.c.id == device.id).values(**values))


def _register(connection: Connection, agent: str, device: Device, now: float) -> None:
    fresh = {"agent": agent, "device": device.model_dump(mode="json"), "health": Health.UNKNOWN, "checked_at": 0.0}
    if insert_if_absent(
        connection, device_table, id=device.id, state=DeviceState.IDLE, epoch=0, last_seen=now, **fresh
    ):
        return
    known = read(connection, device.id)
    if known.agent != agent and known.health is not Health.RETIRED:
        raise NotServed(f"device {device.id!r} is served by agent {known.agent!r}; remove it there first")
    heard_from(connection, known, now)
    if known.agent != agent:
        fresh["health_reason"] = f"moved here from agent {known.agent!r}"
    elif known.device != device:
        fresh["health_reason"] = "it describes itself otherwise than before"
    else:
        return
    connection.execute(update(device_table).where(device_table.c.id == device.id).values(**fresh))


def _end_leases(connection: Connection, agent: str, now: float) -> None:
    ids = hold_all(connection, device_table.c.agent == agent, device_table.c.lease_until.is_not(None))
    connection.execute(update(device_table).where(device_table.c.id.in_(ids)).values(lease_until=now))
    leased = (job.c.state == JobState.LEASED) & job.c.device.in_(ids)
    connection.execute(update(job).where(leased).values(lease_until=now))


def _row(row: Row[Any]) -> DeviceRow:
    return DeviceRow(
        row.id,
        row.agent,
        Device.model_validate(row.device),
        DeviceState(row.state),
        Health(row.health),
        row.health_reason,
        row.checked_at,
        row.epoch,
        row.lease_holder,
        row.lease_until,
        row.last_seen,
    )
