"""The wire format of agents and the coordinator: messages as JSON over HTTP, on a Unix socket or TLS.

    GET  /v1/ca                 the coordinator's CA certificate, PEM; trusted by its fingerprint only
    POST /v1/agents/enrol       EnrolRequest     -> EnrolReply        once a token; everything below needs the secret
    POST /v1/agents/register    RegisterRequest  -> RegisterReply
    POST /v1/lease              LeaseRequest     -> LeaseReply        long poll
    POST /v1/heartbeat          HeartbeatRequest -> HeartbeatReply
    POST /v1/jobs/{id}/result   ResultRequest    -> ResultReply
    GET  /v1/runners            SignedManifest    the runners that agents may run
    GET  /v1/files/{sha256}     bytes, with Range; on a Unix socket the response may be empty and name a local file

Over TLS an agent authenticates by HTTP Basic: its name and the secret of its enrolment. On a Unix socket the
socket's permissions authenticate it.

Every request but `enrol` is idempotent: register replaces, a heartbeat renews, a result is stored once per epoch and
reported as accepted when it is sent again.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nas.core.device import Device
from nas.core.plan import Round, RoundResult
from nas.core.trust import PublicKey

CA_PATH = "/v1/ca"
ENROL_PATH = "/v1/agents/enrol"
REGISTER_PATH = "/v1/agents/register"
LEASE_PATH = "/v1/lease"
HEARTBEAT_PATH = "/v1/heartbeat"
RESULT_PATH = "/v1/jobs/{job}/result"
MANIFEST_PATH = "/v1/runners"
FILE_PATH = "/v1/files/{sha256}"

MOST_DEVICES = 256
"""Devices that one agent serves."""

LOCAL_PATH_HEADER = "X-Local-Path"
"""Percent-encoded path of the file, for an agent on the coordinator's own machine; the agent verifies the hash."""

AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
DeviceId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Authority = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Epoch = Annotated[int, Field(ge=0, lt=1 << 31)]
LAST_EPOCH = 1 << 30
"""The highest epoch of a device that a coordinator continues from; it leaves as many to count."""

FailureKind = Literal["infrastructure", "refused", "cancelled"]
"""Why an agent has no result. infrastructure: host, device or network, another try can help. refused: this agent may
not or cannot run the plan, another try on it is pointless. cancelled: the coordinator stopped it."""

Phase = Literal["preparing", "cooling", "running"]
"""Phases of a round, in this order: files are pushed, the device cools down, processes run."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EnrolRequest(_Message):
    """Exchanges a one-time token for the agent's own secret. The name is the agent's from then on."""

    token: str = Field(min_length=1, max_length=128)
    agent: AgentName


class EnrolReply(_Message):
    """An agent's secret, and the key that signs the runners it may run."""

    secret: str
    signing_key: PublicKey
    authority: Authority


class RegisterRequest(_Message):
    """An agent and every device it serves. `boot_id` distinguishes a restarted host from a restarted agent."""

    agent: AgentName
    devices: tuple[Device, ...] = Field(max_length=MOST_DEVICES)
    boot_id: str = Field(max_length=128)


class RegisterReply(_Message):
    """Intervals of requests. `authority` is the name of the database that counts the epochs of leases."""

    authority: Authority
    poll_s: float = Field(gt=0, description="longest wait of a lease request")
    heartbeat_s: float = Field(default=10.0, gt=0, description="interval of heartbeats while a job runs")


class LeaseRequest(_Message):
    """Asks for a job for one device; the response may take `wait_s` (long poll)."""

    agent: AgentName
    device: DeviceId
    wait_s: float = Field(ge=0)


class Job(_Message):
    """A leased measurement job. `epoch` is the fencing number of the device's lease."""

    id: JobId
    epoch: Epoch
    deadline_s: float = Field(gt=0, description="seconds from the lease to the last useful moment")
    round: Round


class LeaseReply(_Message):
    """A job, or none within the wait."""

    job: Job | None = None


class HeartbeatRequest(_Message):
    """Renews the lease of a running job."""

    agent: AgentName
    device: DeviceId
    job: JobId
    epoch: Epoch
    phase: Phase = "running"


class HeartbeatReply(_Message):
    """`cancel`: the lease is gone or the job is no longer wanted."""

    cancel: bool = False


OWN_FILE = "the coordinator's own "
"""Start of the message of a job that the coordinator gave up because of a missing or damaged file of its own."""

_ON_THE_WAY = ("coordinator: ", "download", "content of ", OWN_FILE)


def on_the_way(message: str) -> bool:
    """Returns whether a failure happened before anything was sent to the device, which then had no part in it."""
    return message.startswith(_ON_THE_WAY)


class Failure(_Message):
    """Why there is no result. A runner's crash or timeout is a result, not a failure."""

    kind: FailureKind
    message: str = Field(max_length=4000)
    phase: Phase = Field("running", description="how far it had come: before 'running' it is never the candidate's")
    overdue: bool = Field(False, description="whether the job's deadline was over")
    last_epoch: int | None = Field(
        None,
        ge=0,
        le=LAST_EPOCH,
        description="the device refused the lease because it has recorded this newer epoch of the same authority: the "
        "coordinator's database was restored from a backup, or is used twice",
    )

    @property
    def reached_device(self) -> bool:
        """Whether the device had a part in it: not where files were lost between the coordinator and its agent."""
        return self.phase != "preparing" or not on_the_way(self.message)


class ResultRequest(_Message):
    """The end of a job: its result or the failure, not both."""

    agent: AgentName
    device: DeviceId
    epoch: Epoch
    result: RoundResult | None = None
    failure: Failure | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.result is None) == (self.failure is None):
            raise ValueError("give either a result or a failure")
        return self


class ResultReply(_Message):
    """The answer to a result: accepted, or refused with a `reason` (an older epoch, for example)."""

    accepted: bool
    reason: str | None = None
