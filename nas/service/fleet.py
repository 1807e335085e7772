"""Devices, agents and jobs as people see and steer them: the same for the users' API and the command line."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from nas.core.errors import InvalidInput
from nas.service.api_models import (
    AgentPage,
    AgentView,
    CalibrationView,
    DeviceDetail,
    DeviceEventPage,
    DeviceEventView,
    DevicePage,
    DeviceView,
    DriftView,
    JobPage,
    JobView,
    Lease,
    ReferenceRunView,
)
from nas.store import agents, calibrations, checks, devices, pages
from nas.store.rows import DeviceRow, DeviceState, Health, JobState
from nas.store.store import Store

DeviceOrder = Literal["drain", "resume", "quarantine", "release", "check"]

HISTORY = 20
"""Jobs and events that are shown with a device."""

RUNS = 50
"""Reference runs that are shown of each build."""


def list_devices(store: Store, *, after: str = "", limit: int) -> DevicePage:
    """Devices by id, behind `after`."""
    rows = [row for row in devices.all(store) if row.id > after]
    shown = [_device(row) for row in rows[:limit]]
    return DevicePage(devices=shown, next=shown[-1].id if len(rows) > limit else None)


def show_device(store: Store, id: str, *, history: int = HISTORY, runs: int = RUNS) -> DeviceDetail:
    """One device, its calibrations and drift, and its latest events and jobs.

    Args:
        store: where it is registered.
        id: the device's.
        history: at most so many events, and so many jobs.
        runs: at most so many reference runs of each build.

    Raises:
        UnknownName: no such device.
    """
    view = _device(devices.get(store, id))
    return DeviceDetail(
        **{name: getattr(view, name) for name in DeviceView.model_fields},
        calibrations=[CalibrationView.model_validate(each) for each in calibrations.of_device(store, id)],
        drift=[_drift(each, runs) for each in calibrations.drift(store, id)],
        history=[DeviceEventView.model_validate(event) for event in devices.history(store, id, limit=history)],
        jobs=[JobView.model_validate(job) for job in pages.jobs(store, device=id, limit=history)],
    )


def device_events(store: Store, *, after: int, limit: int, device: str | None = None) -> DeviceEventPage:
    """What happened to devices behind the id `after`, oldest first: to one, or to all.

    Raises:
        UnknownName: no such device.
    """
    found = devices.events_since(store, after, limit=limit, device=device)
    shown = [DeviceEventView.model_validate(event) for event in found]
    return DeviceEventPage(events=shown, last=shown[-1].id if shown else after)


def order(store: Store, id: str, what: DeviceOrder, reason: str = "") -> DeviceView:
    """Steers a device and gives how it stands then. Giving the same order again changes nothing.

    drain: it finishes its job and takes no other; resume ends that. quarantine: it is kept from all work until
    release, after which its health is unknown. check: it has to pass a health check anew.

    Raises:
        UnknownName: no such device.
        InvalidInput: the order makes no sense for a device that was removed.
    """
    with store.write():
        row = devices.get(store, id)
        if row.health is Health.RETIRED and what != "release":
            raise InvalidInput(f"device {id!r} was removed; 'nas device release {id}' takes it back")
        _ORDERS[what](store, row, reason)
        return _device(devices.get(store, id))


def remove_device(store: Store, id: str) -> DeviceView:
    """Retires a device; `release` takes it back.

    Raises:
        UnknownName: no such device.
        InvalidInput: it has jobs to do.
    """
    devices.remove(store, id)
    return _device(devices.get(store, id))


def list_agents(store: Store, *, after: str = "", limit: int) -> AgentPage:
    """Agents by name, behind `after`."""
    served = defaultdict(list)
    for row in devices.all(store):
        served[row.agent].append(row.id)
    found = [agent for agent in agents.all(store) if agent.name > after]
    shown = [
        AgentView(
            name=agent.name, access=agent.access, created=agent.created, last_seen=agent.last_seen,
            devices=served[agent.name],
        )
        for agent in found[:limit]
    ]  # fmt: skip
    return AgentPage(agents=shown, next=shown[-1].name if len(found) > limit else None)


def revoke_agent(store: Store, name: str) -> AgentView:
    """Takes an agent's secret away.

    Raises:
        UnknownName: no such agent.
        InvalidInput: it has no secret.
    """
    agents.revoke(store, name)
    return next(agent for agent in list_agents(store, limit=len(agents.all(store))).agents if agent.name == name)


def list_jobs(
    store: Store,
    *,
    after: str | None = None,
    limit: int,
    state: JobState | None = None,
    device: str | None = None,
    study: str | None = None,
) -> JobPage:
    """Jobs, newest first, behind `after`.

    Raises:
        InvalidInput: `after` is not what an earlier page gave.
    """
    place = _place(after) if after is not None else None
    rows = pages.jobs(store, limit=limit + 1, after=place, state=state, device=device, study_name=study)
    shown = [JobView.model_validate(row) for row in rows[:limit]]
    return JobPage(jobs=shown, next=f"{shown[-1].created!r}~{shown[-1].id}" if len(rows) > limit else None)


def _drift(found: calibrations.Drift, most: int) -> DriftView:
    runs = [
        ReferenceRunView(
            at=point.at, job=point.job, ratio=point.run.ratio, temperature_c=point.run.temperature_c,
            calm=point.run.calm,
        )
        for point in found.points[-most:]
    ]  # fmt: skip
    reference_ms = found.calibration.reference_ms if found.calibration else None
    return DriftView(
        runtime=found.runtime, build=found.build, reference_ms=reference_ms, off=found.off,
        recalibrate=found.recalibrate, runs=runs,
    )  # fmt: skip


def _place(cursor: str) -> pages.JobPlace:
    created, _, id = cursor.partition("~")
    try:
        return float(created), id
    except ValueError:
        raise InvalidInput("'after' is what the page before gave as 'next'", where="after") from None


def _device(row: DeviceRow) -> DeviceView:
    lease = None
    if row.lease_holder is not None and row.lease_until is not None:
        lease = Lease(holder=row.lease_holder, until=row.lease_until)
    names = [name for name in DeviceView.model_fields if name != "lease"]
    return DeviceView(**{name: getattr(row, name) for name in names}, lease=lease)


def _drain(store: Store, row: DeviceRow, reason: str) -> None:
    devices.set_state(store, row.id, DeviceState.DRAINING, reason or None)


def _resume(store: Store, row: DeviceRow, reason: str) -> None:
    devices.set_state(store, row.id, DeviceState.IDLE, reason or None)


def _quarantine(store: Store, row: DeviceRow, reason: str) -> None:
    devices.set_health(store, row.id, Health.MAINTENANCE, reason or "put into quarantine")


def _release(store: Store, row: DeviceRow, reason: str) -> None:
    if row.health in (Health.MAINTENANCE, Health.BAD, Health.RETIRED):
        devices.set_health(store, row.id, Health.UNKNOWN, reason or "released, not checked yet")


def _check(store: Store, row: DeviceRow, reason: str) -> None:
    if row.health is Health.MAINTENANCE:
        raise InvalidInput(f"device {row.id!r} is in quarantine; release it first")
    if row.health is Health.GOOD:
        devices.set_health(store, row.id, Health.UNKNOWN, reason or "a check was asked for")
    checks.request(store, row.id)


_ORDERS = {"drain": _drain, "resume": _resume, "quarantine": _quarantine, "release": _release, "check": _check}
