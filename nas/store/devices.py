"""Devices: what they are, what they do (state) and what is thought of them (health)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, delete, exists, select, update

from nas.core.device import Device
from nas.core.errors import InvalidInput, UnknownName
from nas.store import device_log
from nas.store.models import agent as agent_table
from nas.store.models import calibration, device_event, job
from nas.store.models import device as device_table
from nas.store.rows import DeviceEvent, DeviceEventKind, DeviceRow, DeviceState, Health, JobState
from nas.store.store import Store, retried
from nas.store.timeouts import LIMITS
from nas.store.upsert import insert_if_absent

SETTLED_S = 1.0
"""Age from which an event is followed by no other of a lower id."""

_FIRST_CHECK_S, _CHECK_FACTOR, _RAREST_CHECK_S = 15.0, 4.0, 3600.0
_LASTING = frozenset({DeviceState.OFFLINE, DeviceState.DRAINING})
"""States that outlast the silence of an agent."""
_BY_PERSON = frozenset({Health.MAINTENANCE, Health.RETIRED})

# Made once: to make them costs more than to run them.
_BY_ID = select(device_table).where(device_table.c.id == bindparam("of_device"))
_BY_ID_HELD = _BY_ID.with_for_update(key_share=True)
_CHANGE = update(device_table).where(device_table.c.id == bindparam("of_device"))


class NotServed(InvalidInput):
    """An agent speaks of a device that is another's."""


@retried
def register(store: Store, agent: str, devices: Sequence[Device], *, boot_id: str) -> list[DeviceRow]:
    """Replaces what `agent` serves. May be repeated: leases, health and calibrations stay.

    Devices it no longer names go offline. A new `boot_id` ends the leases of its devices: nothing on them survived.
    A device that was restarted, or describes itself otherwise than before, has unknown health again.

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
            for each in connection.scalars(select(device_table.c.id).where(device_table.c.agent == agent)).all():
                device_log.record(
                    connection, each, now, DeviceEventKind.REGISTERED, agent, "the agent's host has restarted"
                )
        connection.execute(
            update(agent_table).where(agent_table.c.name == agent).values(boot_id=boot_id, last_seen=now)
        )
        for device in sorted(devices, key=lambda device: device.id):
            _register(connection, agent, device, now)
        gone = (device_table.c.agent == agent) & device_table.c.id.not_in(ids)
        for each in hold_all(connection, gone):
            go_offline(connection, read(connection, each), now, f"agent {agent!r} does not serve it any more")
        return [read(connection, id) for id in ids]


def get(store: Store, id: str) -> DeviceRow:
    """One device.

    Raises:
        UnknownName: no such device.
    """
    with store.read() as connection:
        return _now(read(connection, id, held=False), store.now())


def all(store: Store) -> list[DeviceRow]:
    """Every device, by id."""
    return select_rows(store, select(device_table).order_by(device_table.c.id))


def select_rows(store: Store, query: Select[Any]) -> list[DeviceRow]:
    """The devices that `query` selects, in its order."""
    with store.read() as connection:
        return [_now(_row(row), store.now()) for row in connection.execute(query)]


@retried
def set_state(store: Store, id: str, state: DeviceState, reason: str | None = None) -> None:
    """What a person wants of the device. `draining` lets it finish its job and take no other; `idle` ends that.

    Raises:
        InvalidInput: another state; those follow from what agents say and do not say.
        UnknownName: no such device.
    """
    if state not in (DeviceState.DRAINING, DeviceState.IDLE):
        raise InvalidInput(f"a device cannot be told to be {state}; tell it to drain, or to be idle again")
    with store.write() as connection:
        row = read(connection, id)
        if DeviceState.DRAINING in (state, row.state):
            ends = DeviceState.LEASED if row.lease_holder else DeviceState.IDLE
            move(connection, row, state if state is DeviceState.DRAINING else ends, store.now(), reason)


@retried
def set_health(store: Store, id: str, health: Health, reason: str | None = None) -> None:
    """What is thought of the device now, and why. `good` says that it passed a health check just now.

    Raises:
        UnknownName: no such device.
    """
    with store.write() as connection:
        rate(connection, read(connection, id), health, reason, store.now())


def history(store: Store, id: str, *, kind: DeviceEventKind | None = None, limit: int = 100) -> list[DeviceEvent]:
    """What happened to a device, newest first: registrations, states, healths, checks, failures.

    What jobs did to its state (leased, preparing, cooling, idle) is not in it: that is told by the jobs.

    Raises:
        UnknownName: no such device.
    """
    query = select(device_event).where(device_event.c.device == id).order_by(device_event.c.id.desc()).limit(limit)
    if kind is not None:
        query = query.where(device_event.c.kind == kind)
    with store.read() as connection:
        read(connection, id, held=False)
        return [_event(row) for row in connection.execute(query)]


def events_since(store: Store, after: int, *, limit: int, device: str | None = None) -> list[DeviceEvent]:
    """What happened to a device, or to any, behind the event `after`: at most `limit`, oldest first.

    They end before the first that is newer than `SETTLED_S`: of transactions that run side by side, the later id may be
    seen first, and who goes on behind it would miss the other.

    Raises:
        UnknownName: no such device.
    """
    settled = store.now() - SETTLED_S
    query = select(device_event).where(device_event.c.id > after).order_by(device_event.c.id).limit(limit)
    with store.read() as connection:
        if device is not None:
            read(connection, device, held=False)
            query = query.where(device_event.c.device == device)
        found = [_event(row) for row in connection.execute(query)]
    return list(takewhile(lambda event: event.at <= settled, found))


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
        row = read(connection, id)
        busy = exists().where(job.c.device == id, job.c.state.in_([JobState.QUEUED, JobState.LEASED]))
        if connection.scalar(select(busy)):
            raise InvalidInput(f"device {id!r} has jobs to do; drain it and stop the studies that use it first")
        connection.execute(delete(calibration).where(calibration.c.device == id))
        rate(connection, row, Health.RETIRED, "removed", store.now())
        move(connection, row, DeviceState.OFFLINE, store.now(), "removed")


def silent(now: float) -> ColumnElement[bool]:
    """Whether nothing was heard of a device for so long that it is offline, and that is not written down yet."""
    quiet = device_table.c.last_seen <= now - LIMITS[DeviceState.IDLE].seconds
    return quiet & device_table.c.state.not_in(_LASTING)


def read(connection: Connection, id: str, *, agent: str | None = None, held: bool = True) -> DeviceRow:
    """The device, which must be served by `agent`, if given.

    Held until the writing transaction ends, unless `held` is false: who holds a device is alone with its jobs, too.

    Raises:
        UnknownName: no such device; an agent is told of its own ones only.
        NotServed: another agent serves it.
    """
    row = connection.execute(_BY_ID_HELD if held else _BY_ID, {"of_device": id}).first()
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


def heard_from(connection: Connection, device: DeviceRow, now: float, *, note: bool = True) -> DeviceRow:
    """What follows from the device's agent having spoken for it; gives it as it is then.

    An offline device is idle again, or goes on with its job. After a long time away, good health is unknown.

    Args:
        connection: in a transaction that holds the device.
        device: as it was.
        now: when it spoke.
        note: whether `last_seen` is written here, or by the caller, with what else it changes.
    """
    if note:
        change(connection, device.id, last_seen=now)
    silent_s, heard = now - device.last_seen, replace(device, last_seen=now)
    if device.state is DeviceState.OFFLINE:
        state = DeviceState.LEASED if device.lease_holder else DeviceState.IDLE
        move(connection, device, state, now, "heard from again")
        heard = replace(heard, state=state, state_since=now)
    if device.health is Health.GOOD and silent_s > LIMITS[DeviceState.OFFLINE].seconds:
        rate(connection, device, Health.UNKNOWN, f"it was away for {silent_s / 3600:.0f} h", now)
        heard = replace(heard, health=Health.UNKNOWN)
    return heard


def move(
    connection: Connection, device: DeviceRow, state: DeviceState, now: float, reason: str | None = None, **more: Any
) -> None:
    """Changes what a device does, and `more` columns with it."""
    if state is not device.state:
        more |= {"state": state, "state_since": now}
        if {state, device.state} & _LASTING:
            device_log.record(connection, device.id, now, DeviceEventKind.STATE, state, reason)
    if more:
        change(connection, device.id, **more)


def go_offline(connection: Connection, device: DeviceRow, now: float, reason: str) -> None:
    """The device cannot be reached; that it drains is remembered until it can."""
    if device.state is not DeviceState.DRAINING:
        move(connection, device, DeviceState.OFFLINE, now, reason)


def rate(
    connection: Connection, device: DeviceRow, health: Health, reason: str | None, now: float, **more: Any
) -> None:
    """Changes what is thought of a device, and when it is checked; `more` columns override what follows from that."""
    values: dict[str, Any] = {"health": health, "health_reason": reason, "check_due": None}
    if health is Health.GOOD:
        values |= {"checked_at": now, "checks_failed": 0}
    elif health in (Health.UNKNOWN, Health.BAD):
        values["check_due"] = now if health is Health.UNKNOWN else now + check_pause_s(0)
    if health is not device.health:
        values["health_since"] = now
        device_log.record(connection, device.id, now, DeviceEventKind.HEALTH, health, reason)
    change(connection, device.id, **values | more)


def check_pause_s(failed: int) -> float:
    """Seconds until the next health check after so many that were not passed."""
    return min(_FIRST_CHECK_S * _CHECK_FACTOR ** min(failed, 8), _RAREST_CHECK_S)


def change(connection: Connection, id: str, **values: Any) -> None:
    """Sets columns of a device."""
    connection.execute(_CHANGE, {"of_device": id, **values})


def _register(connection: Connection, agent: str, device: Device, now: float) -> None:
    described = device.model_dump(mode="json")
    new = {"state": DeviceState.IDLE, "state_since": now, "epoch": 0, "last_seen": now, "health": Health.UNKNOWN}
    new |= {"health_since": now, "checked_at": 0.0, "check_due": now, "check_number": 0, "checks_failed": 0}
    if insert_if_absent(connection, device_table, id=device.id, agent=agent, device=described, **new):
        device_log.record(connection, device.id, now, DeviceEventKind.REGISTERED, agent)
        return
    known = read(connection, device.id)
    if known.agent != agent and known.health is not Health.RETIRED:
        raise NotServed(f"device {device.id!r} is served by agent {known.agent!r}; remove it there first")
    heard_from(connection, known, now)
    if known.agent != agent:
        reason = f"moved here from agent {known.agent!r}"
    elif known.device != device:
        reason = _change(known.device, device)
    else:
        return
    device_log.record(connection, device.id, now, DeviceEventKind.REGISTERED, agent, reason)
    if known.health not in _BY_PERSON or known.agent != agent:
        rate(connection, known, Health.UNKNOWN, reason, now, checked_at=0.0, checks_failed=0)
    change(connection, device.id, agent=agent, device=described)


def _change(before: Device, now: Device) -> str:
    """What is new about a device: what its processor does after a restart need not be what was calibrated."""
    if None not in (before.boot, now.boot) and before.model_copy(update={"boot": now.boot}) == now:
        return "it was restarted"
    return "it describes itself otherwise than before"


def _end_leases(connection: Connection, agent: str, now: float) -> None:
    ids = hold_all(connection, device_table.c.agent == agent, device_table.c.lease_until.is_not(None))
    connection.execute(update(device_table).where(device_table.c.id.in_(ids)).values(lease_until=now))
    leased = (job.c.state == JobState.LEASED) & job.c.device.in_(ids)
    connection.execute(update(job).where(leased).values(lease_until=now))


def _now(device: DeviceRow, now: float) -> DeviceRow:
    """A device that fell silent is offline, even where no coordinator runs that would have written it down."""
    silent_at = device.last_seen + LIMITS[DeviceState.IDLE].seconds
    if device.state in _LASTING or silent_at > now:
        return device
    return replace(device, state=DeviceState.OFFLINE, state_since=silent_at)


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
        row.state_since,
        row.health_since,
        row.check_due,
        row.check_number,
        row.checks_failed,
    )


def _event(row: Row[Any]) -> DeviceEvent:
    return DeviceEvent(row.id, row.device, row.at, DeviceEventKind(row.kind), row.what, row.reason, row.job)
