"""The tables. A new database is built from them; a test compares them with the result of `migrations/`.

Plain tables rather than mapped classes: the store returns the frozen records of `nas.infra.store.rows`, which load
nothing later. Times are seconds since the epoch, by the store's clock.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from nas.core.trial import EventKind, TrialState
from nas.infra.store.rows import (
    Blame,
    DesiredState,
    DeviceEventKind,
    DeviceState,
    Health,
    JobKind,
    JobState,
    Origin,
    Role,
    StudyState,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class DamagedValue(ValueError):
    """A column holds what was never written to it: SQLite stores any value in any column."""


class _Valid(TypeDecorator[Any]):
    """A value that is valid as `kind`, by pydantic."""

    impl: Any

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self._adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Returns the value as a `kind`; raises `DamagedValue` if it is none."""
        try:
            return None if value is None else self._adapter.validate_python(value)
        except ValidationError:
            raise DamagedValue(f"{str(value)[:40]!r} is no {getattr(self.kind, '__name__', 'word of it')}") from None


class _Word(_Valid):
    """A text of at most 16 characters, of an enumeration or `Literal`."""

    impl = String(16)
    cache_ok = True


class _Numbers(_Valid):
    """A JSON list of whole numbers."""

    impl = JSON()
    cache_ok = True

    def __init__(self) -> None:
        super().__init__(list[int])


_NullableJson = JSON(none_as_null=True)
_Sha256 = String(64)
_Name = String(64)


def _of_study(*, nullable: bool = False, primary_key: bool = False) -> Column[int]:
    return Column("study", ForeignKey("study.id", ondelete="CASCADE"), nullable=nullable, primary_key=primary_key)


def _of_trial() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["study", "trial"], ["trial.study", "trial.number"], ondelete="CASCADE")


# AUTOINCREMENT: the id of a deleted study or event is never used again, so an old orchestrator or reader cannot
# mistake a new one for its own.
study = Table(
    "study",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", _Name, nullable=False, unique=True),
    Column("space", JSON, nullable=False),
    Column("space_hash", _Sha256, nullable=False),
    Column("state", _Word(StudyState), nullable=False),
    Column("desired_state", _Word(DesiredState), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("version", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("scales", _NullableJson),
    Column("reference_point", _NullableJson),
    Column("proposer", _NullableJson),
    sqlite_autoincrement=True,
)

study_lease = Table(
    "study_lease",
    metadata,
    _of_study(primary_key=True),
    Column("holder", String(255), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("expires", Float, nullable=False),
)

trial = Table(
    "trial",
    metadata,
    _of_study(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("layout_id", _Sha256, nullable=False),
    Column("layout", JSON, nullable=False),
    Column("origin", _Word(Origin), nullable=False),
    Column("parents", _Numbers(), nullable=False),
    Column("operator", _Name),
    Column("record", _NullableJson),
    Column("created", Float, nullable=False),
    # The status after the last event (`nas.core.trial.advance`), so that lists need not read every event.
    Column("state", _Word(TrialState), nullable=False),
    Column("rung", Integer),
    Column("reason", Text),
    Column("retryable", Boolean, nullable=False),
    Column("updated", Float, nullable=False),
    UniqueConstraint("study", "layout_id"),
    Index(None, "study", "state"),
)

event = Table(
    "event",
    metadata,
    Column("id", Integer, primary_key=True),
    _of_study(),
    Column("trial", Integer),
    Column("kind", _Word(EventKind), nullable=False),
    Column("payload", JSON, nullable=False),
    Column("at", Float, nullable=False),
    _of_trial(),
    Index(None, "study", "id"),
    Index(None, "study", "trial", "id"),
    sqlite_autoincrement=True,
)

result = Table(
    "result",
    metadata,
    Column("result_key", _Sha256, primary_key=True),
    Column("stage", String(16), nullable=False),
    Column("payload", JSON, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created", Float, nullable=False),
)

result_use = Table(
    "result_use",
    metadata,
    _of_study(primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("result_key", ForeignKey("result.result_key"), primary_key=True),
    Column("first", Boolean, nullable=False),  # this trial did the work; others reused it
    _of_trial(),
    Index(None, "result_key"),
)

attempt = Table(
    "attempt",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("result_key", _Sha256, index=True),
    Column("stage", String(16)),
    _of_study(nullable=True),
    Column("trial", Integer),
    Column("job", String(128), index=True),
    Column("device", _Name),
    Column("payload", _NullableJson),
    _of_trial(),
    Index(None, "study", "trial"),
    Index(None, "device", "at"),
)

artifact = Table(
    "artifact",
    metadata,
    Column("sha256", _Sha256, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Column("last_used", Float, nullable=False, index=True),
)

artifact_pin = Table(
    "artifact_pin",
    metadata,
    Column("sha256", ForeignKey("artifact.sha256"), primary_key=True),
    Column("owner", String(128), primary_key=True),
)

agent = Table(
    "agent",
    metadata,
    Column("name", _Name, primary_key=True),
    # None: a local agent, authenticated by the permissions of the Unix socket. Empty: revoked.
    Column("secret_hash", _Sha256),
    Column("boot_id", String(128)),
    Column("created", Float, nullable=False),
    Column("last_seen", Float),
)

enrol_token = Table(
    "enrol_token",
    metadata,
    Column("token_hash", _Sha256, primary_key=True),
    Column("expires", Float, nullable=False),
    Column("agent", _Name),  # None: valid for any new name
)

api_token = Table(
    "api_token",
    metadata,
    Column("name", _Name, primary_key=True),
    Column("token_hash", _Sha256, nullable=False),
    Column("role", _Word(Role), nullable=False),
    Column("created", Float, nullable=False),
    Column("last_used", Float),
)

# One row: the name of this database. Devices remember it, so that epochs of two databases are never compared.
identity = Table(
    "identity",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", _Name, nullable=False),
)

device = Table(
    "device",
    metadata,
    Column("id", _Name, primary_key=True),
    Column("agent", ForeignKey("agent.name"), nullable=False, index=True),
    Column("device", JSON, nullable=False),
    Column("state", _Word(DeviceState), nullable=False),
    Column("health", _Word(Health), nullable=False),
    Column("health_reason", Text),
    Column("checked_at", Float, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("lease_holder", _Name),
    Column("lease_until", Float),
    Column("last_seen", Float, nullable=False),
    Column("state_since", Float, nullable=False),
    Column("health_since", Float, nullable=False),
    Column("check_due", Float),  # None: no health check is wanted
    Column("check_number", Integer, nullable=False),
    Column("checks_failed", Integer, nullable=False),  # since the last passed one
    Index(None, "check_due"),
)

# The log of a device. Results of jobs are in `job`; failures are here too, because a study's jobs and attempts are
# deleted with it.
device_event = Table(
    "device_event",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("device", ForeignKey("device.id", ondelete="CASCADE"), nullable=False),
    Column("at", Float, nullable=False),
    Column("kind", _Word(DeviceEventKind), nullable=False),
    Column("what", _Name, nullable=False),
    Column("reason", Text),
    Column("job", String(128)),
    Index(None, "device", "kind", "id"),
    sqlite_autoincrement=True,
)

job = Table(
    "job",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("result_key", _Sha256, nullable=False),
    Column("round", Integer, nullable=False),
    Column("kind", _Word(JobKind), nullable=False),
    _of_study(nullable=True),
    Column("trial", Integer),
    Column("device", ForeignKey("device.id"), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("payload", JSON, nullable=False),
    Column("state", _Word(JobState), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("epoch", Integer),
    Column("lease_until", Float),
    Column("not_before", Float, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Column("result", _NullableJson),
    Column("blame", _Word(Blame)),
    Column("reason", String(32)),
    Column("message", Text),
    Column("phase", String(16)),  # the last that its agent reported; None: none yet
    Column("phase_until", Float),
    _of_trial(),
    UniqueConstraint("result_key", "round"),
    Index(None, "device", "state", "priority", "created", "id"),
    Index(None, "state", "lease_until"),
    Index(None, "study", "trial"),
)

calibration = Table(
    "calibration",
    metadata,
    Column("device", ForeignKey("device.id", ondelete="CASCADE"), primary_key=True),
    Column("runtime", _Name, primary_key=True),
    Column("build", String(128), primary_key=True),
    Column("reference_ms", Float, nullable=False),
    Column("samples", JSON, nullable=False),
    Column("created", Float, nullable=False),
)

# One row per round of a measurement, so that storing a round again changes nothing.
reference_run = Table(
    "reference_run",
    metadata,
    Column("job", String(128), primary_key=True),
    Column("device", ForeignKey("device.id", ondelete="CASCADE"), nullable=False),
    Column("runtime", _Name, nullable=False),
    Column("build", String(128), nullable=False),
    Column("at", Float, nullable=False),
    Column("calibration_ms", Float, nullable=False),
    Column("runs", JSON, nullable=False),
    Index(None, "device", "runtime", "build", "at"),
)
