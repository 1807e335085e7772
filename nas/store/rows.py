"""What the store hands out: frozen rows, detached from the database."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from nas.core.device import Device
from nas.core.errors import FailureReason
from nas.core.plan import Round, RoundResult
from nas.core.protocol import Phase
from nas.core.trial import TrialStatus

Json = dict[str, Any]
Stage = Literal["export", "measure", "train", "gate"]
Origin = Literal["reference", "seed", "proposal"]
DesiredState = Literal["run", "pause", "stop"]


class StudyState(StrEnum):
    """What a study does; `desired_state` is what it was last told to do."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    COMPLETE = "complete"
    FAILED = "failed"


class JobState(StrEnum):
    """Where a measurement job stands."""

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
    """What a device does."""

    OFFLINE = "offline"
    PREPARING = "preparing"
    IDLE = "idle"
    LEASED = "leased"
    COOLING = "cooling"
    DRAINING = "draining"


class Health(StrEnum):
    """What is thought of a device, apart from what it does."""

    UNKNOWN = "unknown"
    GOOD = "good"
    BAD = "bad"
    MAINTENANCE = "maintenance"
    RETIRED = "retired"


class CheckOutcome(StrEnum):
    """How a health check ended. `unsure`: the device works, but not as when it was calibrated, or cannot be judged."""

    PASSED = "passed"
    FAILED = "failed"
    UNSURE = "unsure"


class DeviceEventKind(StrEnum):
    """What can happen to a device."""

    REGISTERED = "registered"
    STATE = "state"
    HEALTH = "health"
    CHECK = "check"
    FAILURE = "failure"


class Role(StrEnum):
    """What the holder of an API token may do: look; also steer studies and devices; also remove and revoke."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


class Blame(StrEnum):
    """Whose failure a failed job is."""

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
    """The right to orchestrate a study. `epoch` fences: writes under an older one are refused."""

    study: int
    holder: str
    epoch: int
    expires: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate about to become a trial.

    Args:
        layout: canonical JSON of the layout.
        layout_id: its SHA-256.
        origin: a reference layout, a seed given by the space, or a proposer's.
        parents: numbers of the trials it was made from.
        operator: what made it, such as 'crossover'.
        record: what the proposer knew: predictions, acquisition value, rank.
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
class Artifact:
    """A file in the store, named by its content."""

    sha256: str
    size: int
    created: float
    last_used: float
    pinned: bool


class AgentAccess(StrEnum):
    """How an agent is let in: by a Unix socket's permissions, by its secret, or not at all."""

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
    """A person's right to use the API. `last_used` is noted at most once a minute."""

    name: str
    role: Role
    created: float
    last_used: float | None


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A registered device and its lease.

    `epoch` grows with every lease; `checked_at` is when it last passed a health check, 0 for never; `check_due` is when
    the next one may run, None where none is wanted; `check_number` counts those that ended, `checks_failed` those since
    the last that passed.
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
    """Something that happened to a device.

    `what` is the new state or health, the end of a check, or how far a failed job had come; `job` is the job that
    failed.
    """

    id: int
    device: str
    at: float
    kind: DeviceEventKind
    what: str
    reason: str | None
    job: str | None


@dataclass(frozen=True, slots=True)
class JobRow:
    """One round of a measurement, for one device.

    `epoch` is that of the device's lease; None where no result is awaited. `blame`, `reason` and `message` say why a
    failed job failed. `phase` is how far its agent says that it has come, `phase_until` when that ends at the latest.
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
    """The reference run's own figure on a device: what drift is measured against."""

    device: str
    runtime: str
    build: str
    reference_ms: float
    samples: Json
    created: float
