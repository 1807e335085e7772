"""An index in which the next job of a device is found without sorting its queue."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """To this revision."""
    op.drop_index(op.f("ix_job_device_state_priority"), "job")
    columns = ["device", "state", "priority", "created", "id"]
    op.create_index(op.f("ix_job_device_state_priority_created_id"), "job", columns)
