"""The schema of version 0.2.0, the first that can be upgraded.

A new database is built from `nas.infra.store.models` and stamped with the newest revision, so this one never runs. The
next revision names it as its `down_revision`.
"""

revision = "0.2.0"
down_revision = None


def upgrade() -> None:
    """Does nothing: databases of this revision have their tables."""
