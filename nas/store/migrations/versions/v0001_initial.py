"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """To this revision."""
    op.create_table(
        "agent",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=True),
        sa.Column("boot_id", sa.String(length=128), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_agent")),
    )
    op.create_table(
        "artifact",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("last_used", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifact")),
    )
    op.create_index(op.f("ix_artifact_last_used"), "artifact", ["last_used"], unique=False)
    op.create_table(
        "enrol_token",
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_enrol_token")),
    )
    op.create_table(
        "result",
        sa.Column("result_key", sa.String(length=64), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("result_key", name=op.f("pk_result")),
    )
    op.create_table(
        "study",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("space", sa.JSON(), nullable=False),
        sa.Column("space_hash", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("desired_state", sa.String(length=16), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("scales", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reference_point", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("proposer", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_study")),
        sa.UniqueConstraint("name", name=op.f("uq_study_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "artifact_pin",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(["sha256"], ["artifact.sha256"], name=op.f("fk_artifact_pin_sha256")),
        sa.PrimaryKeyConstraint("sha256", "owner", name=op.f("pk_artifact_pin")),
    )
    op.create_table(
        "device",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("agent", sa.String(length=64), nullable=False),
        sa.Column("device", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("health", sa.String(length=16), nullable=False),
        sa.Column("health_reason", sa.Text(), nullable=True),
        sa.Column("checked_at", sa.Float(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("lease_holder", sa.String(length=64), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["agent"], ["agent.name"], name=op.f("fk_device_agent")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device")),
    )
    op.create_index(op.f("ix_device_agent"), "device", ["agent"], unique=False)
    op.create_table(
        "study_lease",
        sa.Column("study", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(length=255), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["study"], ["study.id"], name=op.f("fk_study_lease_study"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study", name=op.f("pk_study_lease")),
    )
    op.create_table(
        "trial",
        sa.Column("study", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("layout_id", sa.String(length=64), nullable=False),
        sa.Column("layout", sa.JSON(), nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("parents", sa.JSON(), nullable=False),
        sa.Column("operator", sa.String(length=64), nullable=True),
        sa.Column("record", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("rung", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("retryable", sa.Boolean(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["study"], ["study.id"], name=op.f("fk_trial_study"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study", "number", name=op.f("pk_trial")),
        sa.UniqueConstraint("study", "layout_id", name=op.f("uq_trial_study_layout_id")),
    )
    op.create_index(op.f("ix_trial_study_state"), "trial", ["study", "state"], unique=False)
    op.create_table(
        "attempt",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("result_key", sa.String(length=64), nullable=True),
        sa.Column("stage", sa.String(length=16), nullable=True),
        sa.Column("study", sa.Integer(), nullable=True),
        sa.Column("trial", sa.Integer(), nullable=True),
        sa.Column("job", sa.String(length=128), nullable=True),
        sa.Column("device", sa.String(length=64), nullable=True),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["study", "trial"], ["trial.study", "trial.number"], name=op.f("fk_attempt_study_trial"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["study"], ["study.id"], name=op.f("fk_attempt_study"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempt")),
    )
    op.create_index(op.f("ix_attempt_device_at"), "attempt", ["device", "at"], unique=False)
    op.create_index(op.f("ix_attempt_job"), "attempt", ["job"], unique=False)
    op.create_index(op.f("ix_attempt_result_key"), "attempt", ["result_key"], unique=False)
    op.create_index(op.f("ix_attempt_study_trial"), "attempt", ["study", "trial"], unique=False)
    op.create_table(
        "calibration",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("runtime", sa.String(length=64), nullable=False),
        sa.Column("build", sa.String(length=128), nullable=False),
        sa.Column("reference_ms", sa.Float(), nullable=False),
        sa.Column("samples", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["device.id"], name=op.f("fk_calibration_device"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("device", "runtime", "build", name=op.f("pk_calibration")),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study", sa.Integer(), nullable=False),
        sa.Column("trial", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["study", "trial"], ["trial.study", "trial.number"], name=op.f("fk_event_study_trial"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["study"], ["study.id"], name=op.f("fk_event_study"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_event_study_id"), "event", ["study", "id"], unique=False)
    op.create_index(op.f("ix_event_study_trial_id"), "event", ["study", "trial", "id"], unique=False)
    op.create_table(
        "job",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("result_key", sa.String(length=64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("study", sa.Integer(), nullable=True),
        sa.Column("trial", sa.Integer(), nullable=True),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("not_before", sa.Float(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("blame", sa.String(length=16), nullable=True),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["device"], ["device.id"], name=op.f("fk_job_device")),
        sa.ForeignKeyConstraint(
            ["study", "trial"], ["trial.study", "trial.number"], name=op.f("fk_job_study_trial"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["study"], ["study.id"], name=op.f("fk_job_study"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint("result_key", "round", name=op.f("uq_job_result_key_round")),
    )
    op.create_index(op.f("ix_job_device_state_priority"), "job", ["device", "state", "priority"], unique=False)
    op.create_index(op.f("ix_job_state_lease_until"), "job", ["state", "lease_until"], unique=False)
    op.create_index(op.f("ix_job_study_trial"), "job", ["study", "trial"], unique=False)
    op.create_table(
        "result_use",
        sa.Column("study", sa.Integer(), nullable=False),
        sa.Column("trial", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("result_key", sa.String(length=64), nullable=False),
        sa.Column("first", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["result_key"], ["result.result_key"], name=op.f("fk_result_use_result_key")),
        sa.ForeignKeyConstraint(
            ["study", "trial"],
            ["trial.study", "trial.number"],
            name=op.f("fk_result_use_study_trial"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["study"], ["study.id"], name=op.f("fk_result_use_study"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study", "trial", "result_key", name=op.f("pk_result_use")),
    )
    op.create_index(op.f("ix_result_use_result_key"), "result_use", ["result_key"], unique=False)
