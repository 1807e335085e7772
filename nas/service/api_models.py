"""What the users' API answers about devices, agents and jobs. The command line prints the same objects."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from nas.core.device import Device
from nas.store.rows import AgentAccess, Blame, DeviceEventKind, DeviceState, Health, JobKind, JobState, Role

MAX_PAGE = 500

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="most entries of a page")]
EventId = Annotated[int, Query(ge=0, lt=1 << 53, description="id of the last event that is known")]
LONGEST_WAIT_S = 30.0
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, description="longest wait for an event, seconds")]
Time = Annotated[float, Field(description="seconds since the epoch, by the coordinator's clock")]


def with_example(**example: Any) -> ConfigDict:
    """Settings of a model that is read from rows and shown with an example."""
    return ConfigDict(from_attributes=True, frozen=True, json_schema_extra={"examples": [example]})


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
    "lease": {"holder": "lab-1", "until": 1763690430.0},
    "device": {
        "id": "pixel-7", "transport": "adb", "model": "Pixel 7", "cpu": "Tensor G2", "target": "aarch64-android",
        "cores": 8, "memory_mb": 7600, "os": "Android 15", "tags": ["phone"],
    },
}  # fmt: skip
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
_AGENT = {"name": "lab-1", "access": "enrolled", "created": 1763600000.0, "last_seen": 1763690400.0,
          "devices": ["pixel-7"]}  # fmt: skip
_DEVICE_EVENT = {"id": 87, "device": "pixel-7", "at": 1763690400.0, "kind": "health", "what": "unknown",
                 "reason": "a job failed: the cable fell out", "job": None}  # fmt: skip
_RUN = {"at": 1763690100.0, "job": _JOB["id"], "ratio": 1.013, "temperature_c": 41.5, "calm": True}
_DRIFT = {"runtime": "llama.cpp", "build": "b7000", "reference_ms": 212.5, "off": 0.011, "recalibrate": False,
          "runs": [_RUN]}  # fmt: skip
_CALIBRATION = {"runtime": "llama.cpp", "build": "b7000", "reference_ms": 212.5, "created": 1763683210.0}


class Lease(BaseModel):
    """Who has a device, and until when unless the lease is renewed."""

    holder: str
    until: Time


class DeviceView(BaseModel):
    """A registered device: what it does (`state`) and what is thought of it (`health`)."""

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


class JobView(BaseModel):
    """One round of a measurement. `study` and `trial` want it; `blame`, `reason` and `message` say why it failed."""

    model_config = with_example(**_JOB)

    id: str
    kind: JobKind
    study: str | None
    trial: int | None
    device: str
    priority: int
    state: JobState
    attempts: int
    epoch: int | None
    lease_until: float | None
    not_before: float
    created: Time
    updated: Time
    blame: Blame | None
    reason: str | None
    message: str | None


class CalibrationView(BaseModel):
    """What the reference run takes on a device with one build of a runtime."""

    model_config = with_example(**_CALIBRATION)

    runtime: str
    build: str
    reference_ms: float
    created: Time


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
    """How far a device runs off its calibration, with one build of a runtime; its latest runs, oldest first."""

    model_config = with_example(**_DRIFT)

    runtime: str
    build: str
    reference_ms: float | None = Field(description="the calibration; null where there is none")
    off: float | None = Field(description="share by which the latest calm runs are off it; null: too few")
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
    jobs: list[JobView]


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
    """Jobs, newest first. `next`: what to give as `after` for the next page; null on the last one."""

    model_config = with_example(jobs=[_JOB], next=f"1763690380.0~{_JOB['id']}")

    jobs: list[JobView]
    next: str | None


class ServerView(BaseModel):
    """The coordinator, and what the caller may do there."""

    model_config = with_example(version="0.1.0", authority="a" * 32, token="laptop", role="operate")

    version: str
    authority: str = Field(description="name of its database, which counts the epochs of leases")
    token: str = Field(description="name of the caller's API token")
    role: Role


class Reason(BaseModel):
    """Why something is done to a device; shown to whoever asks about it."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"reason": "battery swollen"}]})

    reason: str = Field("", max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")
