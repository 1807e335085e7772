"""The schema of version 0.1.0, and the upgrade of databases from before it (revisions 0001 to 0005).

A new database is built from `nas.infra.store.models` and stamped with the newest revision, so this runs for old ones
only.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0006"
down_revision = None


def upgrade() -> None:
    """Runs the steps that follow the revision `before`, which `nas.infra.store.migrate` passes."""
    for number, step in _STEPS.items():
        if number > context.config.attributes["before"]:
            step()


def _authority() -> None:
    op.create_table(
        "identity",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_identity")),
    )


def _enrol_tokens_for_a_name() -> None:
    op.add_column("enrol_token", sa.Column("agent", sa.String(64)))


def _api_tokens() -> None:
    op.create_table(
        "api_token",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("last_used", sa.Float()),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_token")),
    )


def _device_health() -> None:
    times, counts = ("state_since", "health_since"), ("check_number", "checks_failed")
    with op.batch_alter_table("device") as device:
        for name in times:
            device.add_column(sa.Column(name, sa.Float(), nullable=False, server_default="0"))
        for name in counts:
            device.add_column(sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
        device.add_column(sa.Column("check_due", sa.Float()))
    with op.batch_alter_table("device") as device:
        for name in (*times, *counts):
            device.alter_column(name, server_default=None)
        device.create_index(op.f("ix_device_check_due"), ["check_due"])
    op.execute("UPDATE device SET state_since = last_seen, health_since = last_seen")
    op.execute("UPDATE device SET check_due = last_seen WHERE health IN ('unknown', 'bad')")
    op.add_column("job", sa.Column("phase", sa.String(16)))
    op.add_column("job", sa.Column("phase_until", sa.Float()))
    op.create_table(
        "device_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("what", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("job", sa.String(128)),
        sa.ForeignKeyConstraint(["device"], ["device.id"], name=op.f("fk_device_event_device"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device_event")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_device_event_device_kind_id"), "device_event", ["device", "kind", "id"])
    place = ["device", "runtime", "build", "at"]
    op.create_table(
        "reference_run",
        sa.Column("job", sa.String(128), nullable=False),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("runtime", sa.String(64), nullable=False),
        sa.Column("build", sa.String(128), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("calibration_ms", sa.Float(), nullable=False),
        sa.Column("runs", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["device.id"], name=op.f("fk_reference_run_device"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_reference_run")),
    )
    op.create_index(op.f("ix_reference_run_device_runtime_build_at"), "reference_run", place)


def _queue_index() -> None:
    op.drop_index(op.f("ix_job_device_state_priority"), "job")
    columns = ["device", "state", "priority", "created", "id"]
    op.create_index(op.f("ix_job_device_state_priority_created_id"), "job", columns)


_STEPS = {
    "0002": _authority,
    "0003": _enrol_tokens_for_a_name,
    "0004": _api_tokens,
    "0005": _device_health,
    "0006": _queue_index,
}
"""Revision of the development versions -> the step that led to it, in order."""
