"""The log of a device takes whole names of agents: PostgreSQL refused those of more than 32 characters."""

import sqlalchemy as sa
from alembic import op

revision = "0.2.1"
down_revision = "0.2.0"


def upgrade() -> None:
    """Lets `device_event.what` have 64 characters."""
    with op.batch_alter_table("device_event", table_kwargs={"sqlite_autoincrement": True}) as event:
        event.alter_column("what", existing_type=sa.String(32), type_=sa.String(64), existing_nullable=False)
