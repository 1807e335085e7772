"""The store's records: frozen dataclasses, detached from the database, one for each table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar

from sqlalchemy import Row

from nas.core.device import Device
from nas.core.errors import FailureReason
from nas.core.plan import Round, RoundResult
from nas.core.trial import TrialStatus
from nas.core.wire import Phase

Json = dict[str, Any]
Stage = Literal["export", "measure", "train", "gate"]
Origin = Literal["reference", "seed", "proposal"]
DesiredState = Literal["run", "pause", "stop"]

T = TypeVar("T")


def from_row(record: type[T], row: Row[Any], /, **convert: Callable[[Any], Any]) -> T:
    """Returns a dataclass with its fields taken from a row by name, through `convert` where not None."""
    values = dict(row._mapping)
    typed = {name: make(values[name]) for name, make in convert.items() if values[name] is not None}
    return record(**values | typed)


class StudyState(StrEnum):
    """State of a study; `desired_state` is the last request of a user."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    COMPLETE = "complete"
    FAILED = "failed"


class JobState(StrEnum):
    """State of a measurement job."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobKind(StrEnum):
    """`check` jobs (health, calibration) also go to devices of unknown or bad health."""

    MEASURE = "measure"
    CHECK = "check"


class DeviceState(StrEnum):
    """State of a device: what it does now."""

    OFFLINE = "offline"
    PREPARING = "preparing"
    IDLE = "idle"
    LEASED = "leased"
    COOLING = "cooling"
    DRAINING = "draining"


class Health(StrEnum):
    """Health of a device: trust in its measurements, independent of its state."""

    UNKNOWN = "unknown"
    GOOD = "good"
    BAD = "bad"
    MAINTENANCE = "maintenance"
    RETIRED = "retired"


class CheckOutcome(StrEnum):
    """Result of a health check. `unsure`: the device works, but off its calibration, or cannot be judged."""

    PASSED = "passed"
    FAILED = "failed"
    UNSURE = "unsure"


class DeviceEventKind(StrEnum):
    """Kinds of events in a device's log."""

    REGISTERED = "registered"
    STATE = "state"
    HEALTH = "health"
    CHECK = "check"
    FAILURE = "failure"
    NAME = "name"
    NOTE = "note"
    TAGS = "tags"
    RESERVATION = "reservation"


class Role(StrEnum):
    """Rights of an API token: read; also operate studies and devices; also delete and revoke."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Returns whether the role has all rights of another one."""
        order = [*Role]
        return order.index(self) >= order.index(other)


class Blame(StrEnum):
    """Cause of a failed job."""

    CANDIDATE = "candidate"
    INFRASTRUCTURE = "infrastructure"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Study:
    """One launched search. `reference_point` is None until the references have finished."""

    id: int
    name: str
    space: Json
    space_hash: str
    state: StudyState
    desired_state: DesiredState
    seed: int
    version: str
    created: float
    scales: Json | None
    reference_point: Json | None
    proposer: Json | None


@dataclass(frozen=True, slots=True)
class StudyLease:
    """The right to orchestrate a study. `epoch` is a fencing number: writes under an older one are refused."""

    study: int
    holder: str
    epoch: int
    expires: float


@dataclass(frozen=True, slots=True)
class NewTrial:
    """A candidate about to become a trial.

    Args:
        layout: canonical JSON of the layout.
        layout_id: its SHA-256.
        origin: a reference layout, a seed given by the space, or a proposer's.
        parents: numbers of the trials it was made from.
        operator: what made it, such as 'crossover'.
        record: the proposer's predictions, acquisition value and rank.
    """

    layout: Json
    layout_id: str
    origin: Origin = "proposal"
    parents: tuple[int, ...] = ()
    operator: str | None = None
    record: Json | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate in a study; `number` counts from 0 without gaps."""

    study: int
    number: int
    layout_id: str
    layout: Json
    origin: Origin
    parents: tuple[int, ...]
    operator: str | None
    record: Json | None
    created: float
    updated: float
    status: TrialStatus


@dataclass(frozen=True, slots=True)
class Result:
    """A stage's result under its key."""

    result_key: str
    stage: Stage
    payload: Json
    seconds: float
    created: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """Work that gave no result: an invalid measurement, or a failure."""

    id: int
    kind: str
    message: str
    at: float
    result_key: str | None
    stage: Stage | None
    study: int | None
    trial: int | None
    job: str | None
    device: str | None
    payload: Json | None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the store, named by its content."""

    sha256: str
    size: int
    created: float
    last_used: float
    pinned: bool


class AgentAccess(StrEnum):
    """Authentication of an agent: by a Unix socket's permissions, by its secret, or not at all."""

    LOCAL = "local"
    ENROLLED = "enrolled"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Agent:
    """A process that serves devices."""

    name: str
    boot_id: str | None
    created: float
    last_seen: float | None
    access: AgentAccess


@dataclass(frozen=True, slots=True)
class ApiToken:
    """A person's token for the API. `last_used` is updated at most once a minute."""

    name: str
    role: Role
    created: float
    last_used: float | None


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A registered device and its lease.

    `epoch` increases with every lease; `checked_at` is when it last passed a health check, 0: never; `check_due` is
    when the next check may run, None: no check is wanted; `check_number` counts all finished checks, `checks_failed`
    those since the last passed one.
    """

    id: str
    agent: str
    device: Device
    state: DeviceState
    health: Health
    health_reason: str | None
    checked_at: float
    epoch: int
    lease_holder: str | None
    lease_until: float | None
    last_seen: float
    state_since: float
    health_since: float
    check_due: float | None
    check_number: int
    checks_failed: int


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An entry of a device's log.

    `what` is the new state or health, the outcome of a check, the phase of a failed job, or whether a label was set or
    removed; `job` is the failed job.
    """

    id: int
    device: str
    at: float
    kind: DeviceEventKind
    what: str
    reason: str | None
    job: str | None


@dataclass(frozen=True, slots=True)
class DeviceLabels:
    """What people wrote about a device: a name to show, a note, and tags beside those that its host gives it."""

    name: str | None = None
    note: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A device is for one study and its health checks until then; without a study, it takes no jobs.

    Args:
        until: seconds since the epoch.
        by: who reserved it: name of an API token, or a user of the coordinator's host.
        reason: shown to others.
        study: name; None: the device is used by hand.
    """

    until: float
    by: str
    reason: str
    study: str | None = None


@dataclass(frozen=True, slots=True)
class JobRow:
    """One round of a measurement, for one device.

    `epoch` is that of the device's lease; None: no result is expected. `blame`, `reason` and `message` say why a job
    failed. `phase` is the last one that its agent reported, `phase_until` when that phase must have ended.
    """

    id: str
    result_key: str
    round: int
    kind: JobKind
    study: int | None
    trial: int | None
    device: str
    priority: int
    payload: Round
    state: JobState
    attempts: int
    epoch: int | None
    lease_until: float | None
    not_before: float
    created: float
    updated: float
    result: RoundResult | None
    blame: Blame | None
    reason: FailureReason | None
    message: str | None
    phase: Phase | None
    phase_until: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The time of the reference run on a device, against which drift is measured."""

    device: str
    runtime: str
    build: str
    reference_ms: float
    samples: Json
    created: float
