"""Enrolment tokens for one agent's name."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """To this revision."""
    op.add_column("enrol_token", sa.Column("agent", sa.String(length=64), nullable=True))
