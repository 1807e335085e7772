"""Devices: registration, state (what a device does), health (whether its measurements can be trusted), and its log.

`LIMITS` is the one table of the farm's time limits: how long a device may stay in each state. Times are those of
the coordinator; devices and agents have deadlines of their own (docs/reference/farm-health.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, delete, exists, func, select, update

from nas.core.device import Device
from nas.core.errors import InvalidInput, UnknownName
from nas.core.plan import Round
from nas.core.wire import Phase
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.models import agent as agent_table
from nas.infra.store.models import calibration, device_event, job
from nas.infra.store.models import device as device_table
from nas.infra.store.rows import (
    DeviceEvent,
    DeviceEventKind,
    DeviceLabels,
    DeviceRow,
    DeviceState,
    Health,
    JobState,
    Reservation,
    from_row,
)
from nas.infra.store.store import Store, retried

LIMITS: Mapping[DeviceState, float] = {
    DeviceState.OFFLINE: 86_400.0,
    DeviceState.PREPARING: 1_200.0,
    DeviceState.IDLE: 60.0,
    DeviceState.LEASED: 120.0,
    DeviceState.COOLING: 60.0,
    DeviceState.DRAINING: 600.0,
}
"""Longest time in a state, in seconds: of idle and offline since the agent's last message; of leased and cooling in
addition to what the job's plan takes. docs/reference/farm-health.md says what happens at the end.

Silence for the time of `idle` makes a device offline in every state but draining, which stays."""

LOG_KEPT = 100
"""Events kept of one device and kind; the oldest are deleted."""

_LABELS = (DeviceEventKind.NAME, DeviceEventKind.NOTE, DeviceEventKind.TAGS)

SETTLED_S = 1.0
"""Age after which no event with a lower id can appear any more."""

_STATES: Mapping[Phase, DeviceState] = {
    "preparing": DeviceState.PREPARING,
    "cooling": DeviceState.COOLING,
    "running": DeviceState.LEASED,
}
_LONGEST_REASON = 1000
"""Characters."""

_FIRST_CHECK_S = 15.0
"""Seconds from a failed health check to the next."""
_CHECK_FACTOR = 4.0
"""Factor by which that time grows with each further failed check."""
_RAREST_CHECK_S = 3600.0
"""Greatest time between two checks, in seconds."""
_LASTING = frozenset({DeviceState.OFFLINE, DeviceState.DRAINING})
"""States that do not change when the agent falls silent."""
_ONE = select(device_table).where(device_table.c.id == bindparam("of"))
_HELD = _ONE.with_for_update(key_share=True)
_BY_PERSON = frozenset({Health.MAINTENANCE, Health.RETIRED})


class NotServed(InvalidInput):
    """An agent names a device that another agent serves."""


def state_of(phase: Phase) -> DeviceState:
    """Returns the state of a device while its job is in `phase`."""
    return _STATES[phase]


def phase_limit_s(phase: Phase | None, round: Round) -> float:
    """Returns how long a job may stay in `phase`, in seconds; None: its agent has not sent a heartbeat yet."""
    if phase is None:
        return sum(phase_limit_s(part, round) for part in _STATES)
    planned = {"preparing": 0.0, "cooling": round.cool_down_s, "running": round.deadline_s}
    return LIMITS[state_of(phase)] + planned[phase]


@retried
def register(store: Store, agent: str, devices: Sequence[Device], *, boot_id: str) -> list[DeviceRow]:
    """Replaces the devices that `agent` serves. Idempotent: leases, health and calibrations stay.

    Devices it no longer names go offline. A new `boot_id` ends the leases of its devices: no process there survived.
    A device that was restarted, or whose description changed, has unknown health again.

    Raises:
        InvalidInput: the agent never enrolled.
        NotServed: a device is served by another agent.
    """
    ids = [device.id for device in devices]
    with store.write() as connection:
        now = store.now()
        of_agent = select(agent_table).where(agent_table.c.name == agent)
        row = connection.execute(of_agent.with_for_update(key_share=True)).first()
        if row is None:
            raise InvalidInput(f"agent {agent!r} has not enrolled; run 'nas agent enrol' there")
        if row.boot_id not in (None, boot_id):
            _end_leases(connection, agent, now)
            for device_id in connection.scalars(select(device_table.c.id).where(device_table.c.agent == agent)).all():
                log_event(
                    connection, device_id, now, DeviceEventKind.REGISTERED, agent, "the agent's host has restarted"
                )
        connection.execute(
            update(agent_table).where(agent_table.c.name == agent).values(boot_id=boot_id, last_seen=now)
        )
        for device in sorted(devices, key=lambda device: device.id):
            _register(connection, agent, device, now)
        rest = (device_table.c.agent == agent) & device_table.c.id.not_in(ids)
        for device_id in hold_all(connection, rest):
            go_offline(connection, read(connection, device_id), now, f"agent {agent!r} does not serve it any more")
        return [read(connection, id) for id in ids]


def get(store: Store, id: str) -> DeviceRow:
    """Returns one device; raises `UnknownName`."""
    with store.read() as connection:
        return _with_silence(read(connection, id, held=False), store.now())


def all(store: Store) -> list[DeviceRow]:
    """Returns every device, by id."""
    return select_rows(store, select(device_table).order_by(device_table.c.id))


def select_rows(store: Store, query: Select[Any]) -> list[DeviceRow]:
    """Returns the devices that `query` selects, in its order."""
    return [_with_silence(_row(row), store.now()) for row in store.rows(query)]


@retried
def set_state(store: Store, id: str, state: DeviceState, reason: str | None = None) -> None:
    """Starts or ends draining: a `draining` device finishes its job and takes no other; `idle` ends that.

    Raises:
        InvalidInput: another state; those follow from the agents' messages and their absence.
        UnknownName: no such device.
    """
    if state not in (DeviceState.DRAINING, DeviceState.IDLE):
        raise InvalidInput(f"a device cannot be set to {state}; only to draining, or to idle again")
    with store.write() as connection:
        row = read(connection, id)
        if DeviceState.DRAINING in (state, row.state):
            ends = DeviceState.LEASED if row.lease_holder else DeviceState.IDLE
            move(connection, row, state if state is DeviceState.DRAINING else ends, store.now(), reason)


@retried
def set_health(store: Store, id: str, health: Health, reason: str | None = None) -> None:
    """Sets a device's health and the reason for it. `good` counts as a health check that it just passed."""
    with store.write() as connection:
        rate(connection, read(connection, id), health, reason, store.now())


def history(store: Store, id: str, *, kind: DeviceEventKind | None = None, limit: int = 100) -> list[DeviceEvent]:
    """Returns a device's events, newest first, without states that follow from a job (leased ... idle)."""
    query = select(device_event).where(device_event.c.device == id).order_by(device_event.c.id.desc()).limit(limit)
    if kind is not None:
        query = query.where(device_event.c.kind == kind)
    with store.read() as connection:
        read(connection, id, held=False)
        return [_event(row) for row in connection.execute(query)]


@retried
def label(store: Store, id: str, kind: DeviceEventKind, text: str | None) -> None:
    """Sets the name, the note or the tags (separated by spaces) of a device; None removes them.

    Labels are events of the device's log: the newest of its kind is valid, and the history shows the earlier ones.

    Raises:
        UnknownName: no such device.
    """
    assert kind in _LABELS, f"{kind} is not a label"
    assert text is None or len(text) <= _LONGEST_REASON, "a label is stored whole"
    with store.write() as connection:
        read(connection, id)
        newest = connection.execute(_newest_labels(id).where(device_event.c.kind == kind)).first()
        if (newest.reason if newest else None) != (text or None):
            log_event(connection, id, store.now(), kind, "set" if text else "removed", text)


def labels(store: Store, id: str | None = None) -> dict[str, DeviceLabels]:
    """Returns device -> its labels, of those that have any; of one device only where `id` is given."""
    by_device: dict[str, dict[str, Any]] = {}
    for event in store.rows(_newest_labels(id)):
        if event.reason:
            value = tuple(event.reason.split()) if event.kind == DeviceEventKind.TAGS else event.reason
            by_device.setdefault(event.device, {})[event.kind] = value
    return {device: DeviceLabels(**values) for device, values in by_device.items()}


@retried
def reserve(store: Store, id: str, reservation: Reservation | None) -> None:
    """Reserves a device in place of any earlier reservation; None ends it. A running job is finished.

    Raises:
        UnknownName: no such device.
    """
    text = None if reservation is None else json.dumps(asdict(reservation), ensure_ascii=False)
    assert text is None or len(text) <= _LONGEST_REASON, "a reservation is stored whole"
    with store.write() as connection:
        read(connection, id)
        if reservation is not None or id in reservations(connection, store.now()):
            log_event(connection, id, store.now(), DeviceEventKind.RESERVATION, "set" if text else "removed", text)


def reservations(connection: Connection, now: float) -> dict[str, Reservation]:
    """Returns device -> its reservation, of those that are reserved now."""
    of_kind = device_event.c.kind == DeviceEventKind.RESERVATION
    newest = select(func.max(device_event.c.id)).where(of_kind).group_by(device_event.c.device)
    query = select(device_event.c.device, device_event.c.reason).where(device_event.c.id.in_(newest))
    newest_of = {device: Reservation(**json.loads(text)) for device, text in connection.execute(query) if text}
    return {device: reservation for device, reservation in newest_of.items() if reservation.until > now}


def _newest_labels(id: str | None) -> Select[Any]:
    kinds = device_event.c.kind.in_(_LABELS)
    newest = select(func.max(device_event.c.id)).where(kinds).group_by(device_event.c.device, device_event.c.kind)
    query = select(device_event).where(device_event.c.id.in_(newest))
    return query if id is None else query.where(device_event.c.device == id)


def events_since(store: Store, after: int, *, limit: int, device: str | None) -> list[DeviceEvent]:
    """Returns the events of a device, or of all, after the id `after`: at most `limit`, oldest first.

    They end before the first that is newer than `SETTLED_S`: of concurrent transactions the higher id may become
    visible first, and a reader that continues after it would miss the other. One of the future is old: the clock was
    set back since.

    Raises:
        UnknownName: no such device.
    """
    query = select(device_event).where(device_event.c.id > after).order_by(device_event.c.id).limit(limit)
    with store.read() as connection:
        if device is not None:
            read(connection, device, held=False)
            query = query.where(device_event.c.device == device)
        now = store.now()
        events = [_event(row) for row in connection.execute(query)]
    return list(takewhile(lambda event: abs(now - event.at) >= SETTLED_S, events))


@retried
def remove(store: Store, id: str) -> None:
    """Retires a device, deletes its calibrations, and cancels the jobs that wait there for no study.

    The row stays, so that its epochs never restart; it stays retired when its agent registers it again, until
    `set_health` changes that or another agent registers it.

    Raises:
        InvalidInput: a job runs there, or a study has one queued.
        UnknownName: no such device.
    """
    with store.write() as connection:
        row = read(connection, id)
        unfinished = (job.c.device == id) & job.c.state.in_([JobState.QUEUED, JobState.LEASED])
        # Of health checks, and of commands that may have been killed: nobody could stop what queued them.
        of_nobody = unfinished & job.c.study.is_(None) & (job.c.state == JobState.QUEUED)
        if connection.scalar(select(exists().where(unfinished, ~of_nobody))):
            raise InvalidInput(f"device {id!r} has jobs to do; drain it and stop the studies that use it first")
        end = {"state": JobState.CANCELLED, "epoch": None, "updated": store.now()}
        connection.execute(update(job).where(of_nobody).values(**end))
        connection.execute(delete(calibration).where(calibration.c.device == id))
        rate(connection, row, Health.RETIRED, "removed", store.now())
        move(connection, row, DeviceState.OFFLINE, store.now(), "removed")


def silent(now: float) -> ColumnElement[bool]:
    """Returns the SQL condition that a device is silent for so long that it is offline, but not stored as such."""
    quiet = device_table.c.last_seen <= now - LIMITS[DeviceState.IDLE]
    return quiet & device_table.c.state.not_in(_LASTING)


def read(connection: Connection, id: str, *, agent: str | None = None, held: bool = True) -> DeviceRow:
    """Returns the device, which must be served by `agent`, if given.

    Locks it until the writing transaction ends, unless `held` is false; the lock covers its jobs too.

    Raises:
        UnknownName: no such device; the message lists an agent's own devices only.
        NotServed: another agent serves it.
    """
    row = connection.execute(_HELD if held else _ONE, {"of": id}).first()
    if row is None:
        valid = select(device_table.c.id)
        raise UnknownName(
            "device", id, connection.scalars(valid.where(device_table.c.agent == agent) if agent else valid)
        )
    if agent is not None and row.agent != agent:
        raise NotServed(f"device {id!r} is served by agent {row.agent!r}, not by {agent!r}")
    return _row(row)


def hold_all(connection: Connection, *which: ColumnElement[bool], skip_held: bool = False) -> list[str]:
    """Locks the devices that match all of `which`, or those that no other transaction has locked; returns the ids."""
    query = select(device_table.c.id).where(*which).order_by(device_table.c.id)
    return list(connection.scalars(query.with_for_update(key_share=True, skip_locked=skip_held)))


def heard_from(connection: Connection, device: DeviceRow, now: float) -> DeviceRow:
    """Stores that the agent of a locked device sent a message for it, and returns the device as it is then.

    An offline device is idle again, or continues its job. After a long absence, good health becomes unknown.
    """
    change(connection, device.id, last_seen=now)
    silent_s, heard = now - device.last_seen, replace(device, last_seen=now)
    if device.state is DeviceState.OFFLINE:
        state = DeviceState.LEASED if device.lease_holder else DeviceState.IDLE
        move(connection, device, state, now, "back online")
        heard = replace(heard, state=state, state_since=now)
    if device.health is Health.GOOD and silent_s > LIMITS[DeviceState.OFFLINE]:
        rate(connection, device, Health.UNKNOWN, f"it was away for {silent_s / 3600:.0f} h", now)
        heard = replace(heard, health=Health.UNKNOWN)
    return heard


def move(
    connection: Connection, device: DeviceRow, state: DeviceState, now: float, reason: str | None = None, **more: Any
) -> None:
    """Changes a device's state, and `more` columns with it."""
    if state is not device.state:
        more |= {"state": state, "state_since": now}
        if {state, device.state} & _LASTING:
            log_event(connection, device.id, now, DeviceEventKind.STATE, state, reason)
    if more:
        change(connection, device.id, **more)


def go_offline(connection: Connection, device: DeviceRow, now: float, reason: str) -> None:
    """Makes a device offline that cannot be reached; a draining one stays draining."""
    if device.state is not DeviceState.DRAINING:
        move(connection, device, DeviceState.OFFLINE, now, reason)


def rate(
    connection: Connection, device: DeviceRow, health: Health, reason: str | None, now: float, **more: Any
) -> None:
    """Changes a device's health and when its next check is due; `more` columns override these."""
    values: dict[str, Any] = {"health": health, "health_reason": reason, "check_due": None}
    if health is Health.GOOD:
        values |= {"checked_at": now, "checks_failed": 0}
    elif health in (Health.UNKNOWN, Health.BAD):
        values["check_due"] = now if health is Health.UNKNOWN else now + check_pause_s(0)
    if health is not device.health:
        values["health_since"] = now
        log_event(connection, device.id, now, DeviceEventKind.HEALTH, health, reason)
    change(connection, device.id, **values | more)


def check_pause_s(failed: int) -> float:
    """Returns the seconds until the next health check after `failed` checks that did not pass."""
    return min(_FIRST_CHECK_S * _CHECK_FACTOR ** min(failed, 8), _RAREST_CHECK_S)


def change(connection: Connection, id: str, **values: Any) -> None:
    """Sets columns of a device."""
    connection.execute(update(device_table).where(device_table.c.id == id).values(values))


def log_event(
    connection: Connection,
    device: str,
    at: float,
    kind: DeviceEventKind,
    what: str,
    reason: str | None = None,
    job: str | None = None,
) -> None:
    """Appends to a device's log and deletes its oldest events of that kind."""
    columns = device_event.c
    reason = reason[:_LONGEST_REASON] if reason else None
    connection.execute(device_event.insert().values(device=device, at=at, kind=kind, what=what, reason=reason, job=job))
    alike = (columns.device == device) & (columns.kind == kind)
    oldest_kept = select(columns.id).where(alike).order_by(columns.id.desc()).offset(LOG_KEPT - 1).limit(1)
    connection.execute(delete(device_event).where(alike, columns.id < oldest_kept.scalar_subquery()))


def failed_jobs(connection: Connection, device: str, since: float) -> int:
    """Returns how many different jobs have failed on a device since then."""
    columns = device_event.c
    failures = (columns.device == device) & (columns.kind == DeviceEventKind.FAILURE) & (columns.at >= since)
    return connection.scalar(select(func.count(columns.job.distinct())).where(failures)) or 0


def _register(connection: Connection, agent: str, device: Device, now: float) -> None:
    described = device.model_dump(mode="json")
    new = {"state": DeviceState.IDLE, "state_since": now, "epoch": 0, "last_seen": now, "health": Health.UNKNOWN}
    new |= {"health_since": now, "checked_at": 0.0, "check_due": now, "check_number": 0, "checks_failed": 0}
    if insert_if_absent(connection, device_table, id=device.id, agent=agent, device=described, **new):
        log_event(connection, device.id, now, DeviceEventKind.REGISTERED, agent)
        return
    registered = read(connection, device.id)
    if registered.agent != agent and registered.health is not Health.RETIRED:
        raise NotServed(f"device {device.id!r} is served by agent {registered.agent!r}; remove it there first")
    registered = heard_from(connection, registered, now)
    if registered.agent != agent:
        reason = f"moved here from agent {registered.agent!r}"
    elif registered.device != device:
        reason = _change(registered.device, device)
    else:
        return
    log_event(connection, device.id, now, DeviceEventKind.REGISTERED, agent, reason)
    if registered.health not in _BY_PERSON or registered.agent != agent:
        rate(connection, registered, Health.UNKNOWN, reason, now, checked_at=0.0, checks_failed=0)
    change(connection, device.id, agent=agent, device=described)


def _change(before: Device, now: Device) -> str:
    """Returns what changed about a device. After a restart too its speed may differ from its calibration."""
    if None not in (before.boot, now.boot) and before.model_copy(update={"boot": now.boot}) == now:
        return "it was restarted"
    return "it describes itself otherwise than before"


def _end_leases(connection: Connection, agent: str, now: float) -> None:
    ids = hold_all(connection, device_table.c.agent == agent, device_table.c.lease_until.is_not(None))
    connection.execute(update(device_table).where(device_table.c.id.in_(ids)).values(lease_until=now))
    leased = (job.c.state == JobState.LEASED) & job.c.device.in_(ids)
    connection.execute(update(job).where(leased).values(lease_until=now))


def _with_silence(device: DeviceRow, now: float) -> DeviceRow:
    """Returns a silent device as offline, even where no coordinator is running to store that."""
    silent_at = device.last_seen + LIMITS[DeviceState.IDLE]
    if device.state in _LASTING or silent_at > now:
        return device
    return replace(device, state=DeviceState.OFFLINE, state_since=silent_at)


def _row(row: Row[Any]) -> DeviceRow:
    return from_row(DeviceRow, row, device=Device.model_validate)


def _event(row: Row[Any]) -> DeviceEvent:
    event = DeviceEvent(**row._mapping)
    if event.kind is not DeviceEventKind.RESERVATION or event.reason is None:
        return event
    reservation = Reservation(**json.loads(event.reason))
    return replace(event, reason=f"{reservation.by}, for {reservation.study or 'no study'}: {reservation.reason}")
