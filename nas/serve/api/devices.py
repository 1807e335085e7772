"""The users' API: devices, agents and jobs. The pages of the dashboard use the same functions and models."""

from __future__ import annotations

import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from nas.core.device import Device
from nas.core.errors import InvalidInput
from nas.core.wire import AgentName, DeviceId
from nas.infra.store import agents, calibrations, devices, outcomes
from nas.infra.store import listings as pages
from nas.infra.store.rows import (
    AgentAccess,
    ApiToken,
    Calibration,
    DeviceEventKind,
    DeviceLabels,
    DeviceRow,
    DeviceState,
    Health,
    JobState,
    Reservation,
    Role,
)
from nas.infra.store.store import Store
from nas.infra.web.errors import documented
from nas.infra.web.events import DOCUMENTED, Streams, wants_stream
from nas.infra.web.off_loop import off_loop
from nas.measure.devices.attachments import Tag
from nas.measure.farm.agent_api import Access, guarded
from nas.serve.api.access import require
from nas.serve.api.submissions import SubmittedStudies
from nas.serve.api.types import ONE_LINE, EventId, Limit, StudyName, Time, Wait, shared, with_example

LONGEST_RESERVATION_S = 7 * 86_400.0
HISTORY = 20
"""Jobs and events shown with a device."""
RUNS = 50
"""Reference runs shown for each build."""
_DEVICE = {
    "id": "pixel-7",
    "agent": "lab-1",
    "state": "leased",
    "state_since": 1763690380.0,
    "health": "good",
    "health_reason": None,
    "health_since": 1763683200.0,
    "checked_at": 1763683200.0,
    "last_seen": 1763690400.0,
    "epoch": 41,
    "lease": {"holder": "lab-1", "until": 1763690430.0, "study": "phones", "submitted_by": "laptop"},
    "device": {
        "id": "pixel-7",
        "transport": "adb",
        "model": "Pixel 7",
        "cpu": "Tensor G2",
        "target": "aarch64-android",
        "cores": 8,
        "memory_mb": 7600,
        "os": "Android 15",
        "tags": ["phone"],
    },
    "name": "desk, left",
    "note": "new battery in May",
    "tags": ["phone", "fast"],
    "reservation": {"until": 1763697600.0, "by": "laptop", "reason": "release of Monday", "study": "phones"},
    "condition": {"at": 1763690100.0, "temperature_c": 41.5, "battery_percent": 83.0},
    "queue": [{"study": "phones", "jobs": 3, "place": 1, "since": 1763690390.0}],
}
_JOB = {
    "id": f"{'1f0c' * 16}.0",
    "kind": "measure",
    "study": "phones",
    "trial": 12,
    "device": "pixel-7",
    "priority": 0,
    "state": "leased",
    "attempts": 1,
    "epoch": 41,
    "lease_until": 1763690430.0,
    "not_before": 0.0,
    "created": 1763690380.0,
    "updated": 1763690400.0,
    "blame": None,
    "reason": None,
    "message": None,
}
_AGENT = {
    "name": "lab-1",
    "access": "enrolled",
    "created": 1763600000.0,
    "last_seen": 1763690400.0,
    "devices": ["pixel-7"],
}
_DEVICE_EVENT = {
    "id": 87,
    "device": "pixel-7",
    "at": 1763690400.0,
    "kind": "health",
    "what": "unknown",
    "reason": "a job failed: the cable fell out",
    "job": None,
}
_RUN = {"at": 1763690100.0, "job": _JOB["id"], "ratio": 1.013, "temperature_c": 41.5, "calm": True}
_DRIFT = {
    "runtime": "llama.cpp",
    "build": "b7000",
    "calibration": "9c91",
    "reference_ms": 212.5,
    "off": 0.011,
    "recalibrate": False,
    "runs": [_RUN],
}
_CALIBRATION = {
    "runtime": "llama.cpp",
    "build": "b7000",
    "calibration": "9c91",
    "reference_ms": 212.5,
    "created": 1763683210.0,
}
_SUMMARIES: dict[DeviceOrder, str] = {
    "drain": "Let a device finish its job and take no other",
    "resume": "End a drain",
    "quarantine": "Keep a device from all work",
    "release": "Take a device back from quarantine, bad health or removal",
    "check": "Have a device pass a health check again",
}
After = Annotated[str, Query(max_length=160, description="`next` of the previous page")]
DeviceOrder = Literal["drain", "resume", "quarantine", "release", "check"]


class Lease(BaseModel):
    """The holder of a device, and when the lease ends unless it is renewed."""

    holder: str
    until: Time
    study: str | None = Field(None, description="whose job it runs; null: of no study")
    submitted_by: str | None = Field(None, description="name of the API token; null: launched on this host")


class ReservationView(BaseModel):
    """Until when a device is for one study."""

    model_config = ConfigDict(from_attributes=True)

    until: Time
    by: str
    reason: str
    study: str | None = Field(description="null: it takes no jobs")


class ConditionView(BaseModel):
    """What a device's sensors said right after the latest run of the reference model."""

    at: Time
    temperature_c: float | None = Field(description="null: no sensor")
    battery_percent: float | None = Field(description="null: no battery")


class WaitingView(BaseModel):
    """A study, or health checks, that wait for a device."""

    study: str | None = Field(description="null for health checks")
    jobs: int = Field(description="that it has queued for the device")
    place: int = Field(description="of its first job in the queue, from 1")
    since: Time
    submitted_by: str | None = Field(None, description="name of the API token; null: launched on this host")


class DeviceView(BaseModel):
    """A registered device: what it does (`state`), and whether it can be used (`health`)."""

    model_config = with_example(**_DEVICE)

    id: str
    agent: str
    state: DeviceState
    state_since: Time
    health: Health
    health_reason: str | None
    health_since: Time
    checked_at: float = Field(description="when it last passed a health check; 0 for never")
    last_seen: Time
    epoch: int = Field(description="number of its last lease")
    lease: Lease | None
    device: Device
    name: str | None = Field(None, description="to show beside the id")
    note: str | None = None
    tags: list[str] = Field([], description="all of its tags: those of its host, and those that were given here")
    reservation: ReservationView | None = None
    condition: ConditionView | None = Field(None, description="null: it was not measured with yet")
    queue: list[WaitingView] = Field([], description="who waits for it, in the order of their first jobs")


class CalibrationView(BaseModel):
    """Time of the reference run on a device with one build of a runtime."""

    model_config = with_example(**_CALIBRATION)

    runtime: str
    build: str | None = Field(description="id of the runtime's build; null where the calibration does not say")
    calibration: str = Field(description="hash of the build, the reference model, its workload, threads and cores")
    reference_ms: float
    created: Time

    @classmethod
    def of(cls, stored: Calibration) -> CalibrationView:
        """Returns the view of a stored calibration, whose `build` is the name of the calibration."""
        return cls(
            runtime=stored.runtime,
            build=stored.samples.get("build"),
            calibration=stored.build,
            reference_ms=stored.reference_ms,
            created=stored.created,
        )


class DeviceEventView(BaseModel):
    """Something that happened to a device: `what` is the new state or health, how a check or a job ended."""

    model_config = with_example(**_DEVICE_EVENT)

    id: int
    device: str
    at: Time
    kind: DeviceEventKind
    what: str
    reason: str | None
    job: str | None


class ReferenceRunView(BaseModel):
    """A run of the reference model: its time as a ratio to the calibration, and under which conditions."""

    model_config = with_example(**_RUN)

    at: Time
    job: str
    ratio: float
    temperature_c: float | None
    calm: bool = Field(description="whether nothing disturbed the device meanwhile")


class DriftView(BaseModel):
    """Deviation of a device from its calibration, with one build of a runtime; its latest runs, oldest first."""

    model_config = with_example(**_DRIFT)

    runtime: str
    build: str | None = Field(description="id of the runtime's build; null where the calibration does not say")
    calibration: str = Field(description="hash of the build, the reference model, its workload, threads and cores")
    reference_ms: float | None = Field(description="the calibration; null where there is none")
    off: float | None = Field(description="share by which the latest runs are off it; null: too few")
    recalibrate: bool = Field(description="whether that is beyond the limit")
    runs: list[ReferenceRunView]


class DeviceDetail(DeviceView):
    """A device with its calibrations and drift, and its latest events and jobs, newest first."""

    model_config = with_example(
        **_DEVICE, calibrations=[_CALIBRATION], drift=[_DRIFT], history=[_DEVICE_EVENT], jobs=[_JOB]
    )

    calibrations: list[CalibrationView]
    drift: list[DriftView]
    history: list[DeviceEventView]
    jobs: list[pages.JobSummary]


class AgentView(BaseModel):
    """An agent, how it is let in, and the devices it serves."""

    model_config = with_example(**_AGENT)

    name: str
    access: AgentAccess
    created: Time
    last_seen: float | None
    devices: list[str]


class DevicePage(BaseModel):
    """Devices by id. `next`: what to give as `after` for the next page; null on the last one."""

    model_config = with_example(devices=[_DEVICE], next="pixel-7")

    devices: list[DeviceView]
    next: str | None


class DeviceEventPage(BaseModel):
    """Events of devices, oldest first. Ask again with `after` = `last`."""

    model_config = with_example(events=[_DEVICE_EVENT], last=87)

    events: list[DeviceEventView]
    last: int

    @property
    def ended(self) -> bool:
        """Never: something can always happen to a device."""
        return False


class AgentPage(BaseModel):
    """Agents by name. `next`: what to give as `after` for the next page; null on the last one."""

    model_config = with_example(agents=[_AGENT], next=None)

    agents: list[AgentView]
    next: str | None


class JobPage(BaseModel):
    """Rounds of measurements, newest first. `next`: what to give as `after` for the next page; null on the last one."""

    model_config = with_example(jobs=[_JOB], next=f"1763690380.0~{_JOB['id']}")

    jobs: list[pages.JobSummary]
    next: str | None


class ServerView(BaseModel):
    """The coordinator, and the caller's role."""

    model_config = with_example(version="0.2.0", authority="a" * 32, token="laptop", role="operate")

    version: str
    authority: str = Field(description="name of its database, which counts the epochs of leases")
    token: str = Field(description="name of the caller's API token")
    role: Role


class LabelRequest(BaseModel):
    """What people write about a device; only what is given changes, and empty texts and lists remove it."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"note": "new battery in May", "tags": ["fast"]}]}
    )

    name: str | None = Field(None, max_length=64, pattern=ONE_LINE, description="to show beside the id")
    note: str | None = Field(None, max_length=500, pattern=ONE_LINE)
    tags: list[Tag] | None = Field(None, max_length=20, description="beside those of its host")


class Reason(BaseModel):
    """Why something is done to a device; shown to whoever asks about it."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"reason": "battery swollen"}]})

    reason: str = Field("", max_length=500, pattern=ONE_LINE)


class ReserveRequest(BaseModel):
    """For how long a device is for one study; 0 s end its reservation."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"for_s": 7200, "reason": "release of Monday", "study": "phones"}]},
    )

    for_s: float = Field(ge=0, le=LONGEST_RESERVATION_S)
    reason: str = Field("", max_length=200, pattern=ONE_LINE)
    study: StudyName | None = Field(None, description="null: the device takes no jobs")


def devices_router(store: Store, access: Access, submitted: SubmittedStudies | None = None) -> APIRouter:
    """Returns the operations to list and control devices."""
    router = APIRouter(prefix="/v1/devices", tags=["devices"], route_class=guarded(access))
    read, operate, admin = (require(role) for role in (Role.READ, Role.OPERATE, Role.ADMIN))

    @router.get("", summary="List devices", dependencies=[read])
    def list_devices(after: After = "", limit: Limit = 100) -> DevicePage:
        return page_of_devices(store, after=after, limit=limit, submitted=submitted)

    @router.get("/{id}", summary="Show a device", dependencies=[read], responses=documented(404))
    def show_device(id: DeviceId) -> DeviceDetail:
        return device_detail(store, id, submitted=submitted)

    def steer(order: DeviceOrder) -> None:
        @router.post(
            f"/{{id}}/{order}",
            summary=_SUMMARIES[order],
            operation_id=f"{order}_device",
            dependencies=[operate],
            responses=documented(404),
        )
        def give(id: DeviceId, why: Reason | None = None) -> DeviceView:
            return steer_device(store, id, order, why.reason if why else "", submitted=submitted)

    for order in typing.get_args(DeviceOrder):
        steer(order)

    @router.post(
        "/{id}/label", summary="Name, note and tag a device", dependencies=[operate], responses=documented(404)
    )
    def label(id: DeviceId, request: LabelRequest) -> DeviceView:
        return label_device(store, id, request, submitted=submitted)

    @router.post("/{id}/reserve", summary="Reserve a device for one study", responses=documented(404))
    def reserve(id: DeviceId, request: ReserveRequest, token: ApiToken = operate) -> DeviceView:
        return reserve_device(store, id, request, token.name, submitted=submitted)

    @router.post("/{id}/remove", summary="Retire a device", dependencies=[admin], responses=documented(404))
    def remove_device(id: DeviceId) -> DeviceView:
        return retire_device(store, id, submitted=submitted)

    return router


def device_events_router(store: Store, access: Access, streams: Streams) -> APIRouter:
    """Returns the operation that follows the log of devices."""
    router = APIRouter(prefix="/v1/device-events", tags=["devices"], route_class=guarded(access))

    @router.get(
        "",
        summary="Follow what happens to devices",
        dependencies=[require(Role.READ)],
        response_model=DeviceEventPage,
        responses=DOCUMENTED | documented(404, 429),
    )
    async def follow_devices(
        http: Request, device: DeviceId | None = None, after: EventId = 0, limit: Limit = 100, wait_s: Wait = 0.0
    ) -> DeviceEventPage | Response:
        async def fetch(after: int) -> DeviceEventPage:
            return await off_loop(page_of_device_events, store, after=after, limit=limit, device=device)

        if wants_stream(http):
            return await streams.open(http, fetch, after)
        return await streams.next_page(fetch, after, wait_s)

    return router


def agents_router(store: Store, access: Access, revoked: Callable[[], None]) -> APIRouter:
    """Returns the operations to list agents and revoke them; `revoked` is called afterwards."""
    router = APIRouter(prefix="/v1/agents", tags=["agents"], route_class=guarded(access))

    @router.get("", summary="List agents", dependencies=[require(Role.READ)])
    def list_agents(after: After = "", limit: Limit = 100) -> AgentPage:
        return page_of_agents(store, after=after, limit=limit)

    @router.post(
        "/{name}/revoke",
        summary="Take an agent's secret away",
        dependencies=[require(Role.ADMIN)],
        responses=documented(404),
    )
    def revoke_agent(name: AgentName) -> AgentView:
        view = revoke_secret(store, name)
        revoked()
        return view

    return router


def jobs_router(store: Store, access: Access) -> APIRouter:
    """Returns the operation to list jobs."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=guarded(access))

    @router.get("", summary="List jobs, newest first", dependencies=[require(Role.READ)])
    def list_jobs(
        after: After | None = None,
        limit: Limit = 100,
        state: JobState | None = None,
        device: DeviceId | None = None,
        study: StudyName | None = None,
    ) -> JobPage:
        cursor = _job_cursor(after) if after is not None else None
        rows = pages.jobs(store, limit=limit + 1, after=cursor, state=state, device=device, study_name=study)
        page = rows[:limit]
        return JobPage(jobs=page, next=f"{page[-1].created!r}~{page[-1].id}" if len(rows) > limit else None)

    return router


def page_of_devices(
    store: Store, *, after: str = "", limit: int, submitted: SubmittedStudies | None = None
) -> DevicePage:
    """Returns devices by id, after `after`; `submitted` says who submitted the studies that wait for them."""
    rows = sorted((row for row in devices.all(store) if row.id > after), key=lambda row: row.id)  # not by collation
    views = _views(store, rows[:limit], submitted)
    return DevicePage(devices=views, next=views[-1].id if len(rows) > limit else None)


def device_detail(
    store: Store, id: str, *, history: int = HISTORY, runs: int = RUNS, submitted: SubmittedStudies | None = None
) -> DeviceDetail:
    """Returns one device with at most `history` events and jobs, and at most `runs` reference runs of each build."""
    view = _view(store, id, submitted)
    return DeviceDetail(
        **shared(DeviceView, view),
        calibrations=[CalibrationView.of(calibration) for calibration in calibrations.of_device(store, id)],
        drift=[_drift(drift, runs) for drift in calibrations.drift(store, id)],
        history=[DeviceEventView.model_validate(event) for event in devices.history(store, id, limit=history)],
        jobs=pages.jobs(store, device=id, limit=history),
    )


def page_of_device_events(store: Store, *, after: int, limit: int, device: str | None = None) -> DeviceEventPage:
    """Returns the events after the id `after` of one device or of all, oldest first."""
    latest = devices.events_since(store, after, limit=limit, device=device)
    events = [DeviceEventView.model_validate(event) for event in latest]
    return DeviceEventPage(events=events, last=events[-1].id if events else after)


def steer_device(
    store: Store, id: str, what: DeviceOrder, reason: str = "", *, submitted: SubmittedStudies | None = None
) -> DeviceView:
    """Steers a device and returns its new state. Giving the same order again changes nothing.

    drain: it finishes its job and takes no other; resume ends that. quarantine: it is kept from all work until
    release, after which its health is unknown. check: it has to pass a health check again.

    Raises:
        UnknownName: no such device.
        InvalidInput: the order makes no sense for a device that was removed.
    """
    with store.write():
        row = devices.get(store, id)
        if row.health is Health.RETIRED and what != "release":
            raise InvalidInput(f"device {id!r} was removed; 'nas device release {id}' takes it back")
        match what:
            case "drain":
                devices.set_state(store, id, DeviceState.DRAINING, reason or None)
            case "resume":
                devices.set_state(store, id, DeviceState.IDLE, reason or None)
            case "quarantine":
                devices.set_health(store, id, Health.MAINTENANCE, reason or "put into quarantine")
            case "release" if row.health in (Health.MAINTENANCE, Health.BAD, Health.RETIRED):
                devices.set_health(store, id, Health.UNKNOWN, reason or "released, not checked yet")
            case "check" if row.health is Health.MAINTENANCE:
                raise InvalidInput(f"device {id!r} is in quarantine; release it first")
            case "check":
                if row.health is Health.GOOD:
                    devices.set_health(store, id, Health.UNKNOWN, reason or "a check was asked for")
                outcomes.request_check(store, id)
    return _view(store, id, submitted)


def label_device(
    store: Store, id: str, request: LabelRequest, *, submitted: SubmittedStudies | None = None
) -> DeviceView:
    """Sets the labels of a device that are given, and returns it.

    Raises:
        UnknownName: no such device.
    """
    texts = request.name, request.note, None if request.tags is None else " ".join(dict.fromkeys(request.tags))
    kinds = DeviceEventKind.NAME, DeviceEventKind.NOTE, DeviceEventKind.TAGS
    devices.get(store, id)
    for kind, text in zip(kinds, texts, strict=True):
        if text is not None:
            devices.label(store, id, kind, text.strip() or None)
    return _view(store, id, submitted)


def reserve_device(
    store: Store, id: str, request: ReserveRequest, by: str, *, submitted: SubmittedStudies | None = None
) -> DeviceView:
    """Reserves a device, or ends its reservation, and returns it.

    Raises:
        UnknownName: no such device.
        InvalidInput: without a reason.
    """
    reservation = None
    if request.for_s > 0:
        if not request.reason.strip():
            raise InvalidInput("say what the device is reserved for", where="reason")
        reservation = Reservation(store.now() + request.for_s, by, request.reason.strip(), request.study)
    devices.reserve(store, id, reservation)
    return _view(store, id, submitted)


def retire_device(store: Store, id: str, *, submitted: SubmittedStudies | None = None) -> DeviceView:
    """Retires a device; `release` takes it back. Raises InvalidInput if it has jobs to do."""
    devices.remove(store, id)
    return _view(store, id, submitted)


def page_of_agents(store: Store, *, after: str = "", limit: int) -> AgentPage:
    """Returns agents by name, after `after`."""
    later = [view for view in _agent_views(store) if view.name > after]
    return AgentPage(agents=later[:limit], next=later[limit - 1].name if len(later) > limit else None)


def revoke_secret(store: Store, name: str) -> AgentView:
    """Takes an agent's secret away; raises InvalidInput if it has none."""
    agents.revoke(store, name)
    return next(view for view in _agent_views(store) if view.name == name)


def _agent_views(store: Store) -> list[AgentView]:
    """Returns all agents, by name."""
    served = defaultdict(list)
    for row in devices.all(store):
        served[row.agent].append(row.id)
    views = [AgentView(**shared(AgentView, agent), devices=served[agent.name]) for agent in agents.all(store)]
    return sorted(views, key=lambda view: view.name)  # not by collation


def _drift(drift: calibrations.Drift, most: int) -> DriftView:
    runs = [
        ReferenceRunView(at=point.at, job=point.job, **shared(ReferenceRunView, point.run))
        for point in drift.points[-most:]
    ]
    calibration = drift.calibration
    return DriftView(
        runtime=drift.runtime,
        build=calibration and calibration.samples.get("build"),
        calibration=drift.build,
        reference_ms=calibration and calibration.reference_ms,
        off=drift.off,
        recalibrate=drift.recalibrate,
        runs=runs,
    )


def _job_cursor(cursor: str) -> pages.JobPlace:
    created, _, id = cursor.partition("~")
    try:
        return float(created), id
    except ValueError:
        raise InvalidInput("'after' must be the 'next' of an earlier page", where="after") from None


def _view(store: Store, id: str, submitted: SubmittedStudies | None) -> DeviceView:
    (view,) = _views(store, [devices.get(store, id)], submitted)
    return view


def _views(store: Store, rows: Sequence[DeviceRow], submitted: SubmittedStudies | None) -> list[DeviceView]:
    labels, queues, running = devices.labels(store), pages.queues(store), pages.running(store)
    latest = calibrations.latest_runs(store)
    with store.read() as connection:
        reserved = devices.reservations(connection, store.now())

    def submitter(study: str | None) -> str | None:
        return submitted.submitter(study) if submitted is not None and study is not None else None

    return [
        _device(
            row,
            labels.get(row.id, DeviceLabels()),
            queues.get(row.id, ()),
            running.get(row.id),
            reserved.get(row.id),
            latest.get(row.id),
            submitter,
        )
        for row in rows
    ]


def _device(
    row: DeviceRow,
    labels: DeviceLabels,
    queue: Sequence[pages.QueuedJob],
    running: str | None,
    reservation: Reservation | None,
    latest: tuple[float, calibrations.ReferenceRun] | None,
    submitter: Callable[[str | None], str | None],
) -> DeviceView:
    lease = None
    if row.lease_holder is not None and row.lease_until is not None:
        lease = Lease(holder=row.lease_holder, until=row.lease_until, study=running, submitted_by=submitter(running))
    condition = None
    if latest is not None:
        at, run = latest
        condition = ConditionView(at=at, temperature_c=run.temperature_c, battery_percent=run.battery_percent)
    counts = Counter(job.study for job in queue)
    first = {job.study: job for job in reversed(queue)}
    waiting = [
        WaitingView(study=study, jobs=counts[study], place=job.position, since=job.since, submitted_by=submitter(study))
        for study, job in first.items()
    ]
    return DeviceView(
        **shared(DeviceView, row),
        lease=lease,
        name=labels.name,
        note=labels.note,
        tags=list(dict.fromkeys([*row.device.tags, *labels.tags])),
        reservation=reservation and ReservationView.model_validate(reservation),
        condition=condition,
        queue=sorted(waiting, key=lambda study: study.place),
    )
