"""Device health: checks that are due, phases of jobs, what happened to a device, and its reference runs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_TIMES, _COUNTS = ("state_since", "health_since"), ("check_number", "checks_failed")


def upgrade() -> None:
    """To this revision."""
    with op.batch_alter_table("device") as device:
        for name in _TIMES:
            device.add_column(sa.Column(name, sa.Float(), nullable=False, server_default="0"))
        for name in _COUNTS:
            device.add_column(sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
        device.add_column(sa.Column("check_due", sa.Float()))
    with op.batch_alter_table("device") as device:
        for name in (*_TIMES, *_COUNTS):
            device.alter_column(name, server_default=None)
        device.create_index(op.f("ix_device_check_due"), ["check_due"])
    op.execute("UPDATE device SET state_since = last_seen, health_since = last_seen")
    op.execute("UPDATE device SET check_due = last_seen WHERE health IN ('unknown', 'bad')")
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("phase", sa.String(length=16)))
        job.add_column(sa.Column("phase_until", sa.Float()))
    _device_event()
    _reference_run()


def _device_event() -> None:
    op.create_table(
        "device_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("what", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("job", sa.String(length=128), nullable=True),
        sa.ForeignKeyConstraint(["device"], ["device.id"], name=op.f("fk_device_event_device"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device_event")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_device_event_device_kind_id"), "device_event", ["device", "kind", "id"])


def _reference_run() -> None:
    op.create_table(
        "reference_run",
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("runtime", sa.String(length=64), nullable=False),
        sa.Column("build", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("calibration_ms", sa.Float(), nullable=False),
        sa.Column("runs", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["device.id"], name=op.f("fk_reference_run_device"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_reference_run")),
    )
    op.create_index(
        op.f("ix_reference_run_device_runtime_build_at"), "reference_run", ["device", "runtime", "build", "at"]
    )
