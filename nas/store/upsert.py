"""The one statement that SQLite and PostgreSQL share but SQLAlchemy spells per dialect."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_if_absent(connection: Connection, table: Table, **values: Any) -> bool:
    """Inserts a row unless one with its key exists; whether it did."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(table).values(**values).on_conflict_do_nothing()
    return connection.execute(insert.returning(*table.primary_key)).first() is not None
