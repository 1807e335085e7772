"""Engines: SQLite (WAL) or PostgreSQL, with one way to begin a reading and a writing transaction on either.

A reading transaction is a snapshot; on PostgreSQL REPEATABLE READ and READ ONLY, which nobody else can make fail.

A writing transaction on SQLite takes the file's one write lock at its beginning: writers follow each other. On
PostgreSQL they run side by side, READ COMMITTED: one locks the rows that it decides by before it looks at them, so
what it reads from then on is what the others have committed. Rows are locked in the order study, agent, device, job,
and several of a table in the order of their keys, so that two never wait for each other. Where a foreign key is
followed against that order (a study is deleted while one of its jobs fails) they can; then the database undoes one of
them, as a `Conflict`, and `nas.store.store.retried` does it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DataError,
    InternalError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from nas.core.canonical import canonical_json
from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.paths import home
from nas.store import postgresql

WRITE_DEADLINE_S = 30.0
"""Longest wait for the write lock, or on PostgreSQL for one row's."""

_BUSY_TIMEOUT_MS = 500
_RETRY_S = 0.02

_UNDONE_FOR_OTHERS = ("40001", "40P01")
"""SQLSTATE of a serialization failure and of a deadlock."""


class Conflict(InfrastructureFailed):
    """The database undid a transaction in favour of another one; the same again can succeed at once."""


def database_url(url: str | None = None) -> URL:
    """`url`, or that of `$NAS_HOME/hilnas.db`.

    Raises:
        InvalidInput: no URL of a database that can be used.
    """
    try:
        parsed = make_url(url or f"sqlite:///{home() / 'hilnas.db'}")
    except ArgumentError:
        valid = "sqlite:////path/to/file.db or postgresql://user@host/name"
        # What was given is not repeated: it may hold a password all the same.
        raise InvalidInput(f"this is no database URL; write {valid}", where="--db") from None
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise InvalidInput(f"{parsed.get_backend_name()!r} databases are not supported; use sqlite or postgresql")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise InvalidInput("an SQLite database must be a file: threads and processes share it")
    return parsed.set(drivername=postgresql.DRIVER) if parsed.drivername == "postgresql" else parsed


def make_engine(url: URL, *, create: bool, foreign_keys: bool = True) -> Engine:
    """An engine whose SQLite connections begin their transactions themselves.

    Args:
        url: of the database.
        create: whether a missing SQLite file is made; a PostgreSQL database is made by its administrator.
        foreign_keys: whether SQLite enforces them.

    Raises:
        InvalidInput: the driver is not installed or not supported, or there is no such file and `create` is false.
        InfrastructureFailed: the folder of the file cannot be made.
    """
    path = sqlite_file(url)
    if path is None:
        return postgresql.make_engine(url, lock_s=WRITE_DEADLINE_S)
    _prepare(path, create)
    try:
        engine = create_engine(url, json_serializer=canonical_json)
    except (NoSuchModuleError, ImportError) as error:
        raise InvalidInput(f"the driver of {url.drivername!r} is not installed: {error}") from None
    event.listen(engine, "connect", partial(_configure, foreign_keys))
    event.listen(engine, "begin", _begin)
    return engine


def sqlite_file(url: URL) -> Path | None:
    """The database file, or None for a server."""
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def snapshots(engine: Engine) -> Engine:
    """The same engine for reading transactions; both share one pool of connections."""
    if sqlite_file(engine.url):
        return engine
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


@contextmanager
def writing(engine: Engine, clock: Clock) -> Iterator[Connection]:
    """A connection in a writing transaction, committed at the end and rolled back by an exception.

    SQLite takes its one write lock here, not at the first change, so a transaction never fails half-way for it.

    Raises:
        InfrastructureFailed: a lock was not free within `WRITE_DEADLINE_S`, the disk is full, or the server is gone.
        Conflict: the database undid it in favour of another one.
    """
    with translated(engine.url), engine.connect() as plain:
        connection = plain.execution_options(nas_write=True)
        deadline = clock.monotonic() + WRITE_DEADLINE_S
        while not _try_begin(connection, give_up=clock.monotonic() >= deadline):
            clock.sleep(_RETRY_S)
        yield connection
        connection.commit()


def lock_tables(connection: Connection, *tables: Table) -> None:
    """Lets nobody else change these tables until the transaction ends; on SQLite nobody can anyway."""
    if connection.dialect.name == "postgresql":
        names = ", ".join(table.name for table in tables)
        connection.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Raises the database's operational errors as ours; programming errors pass.

    Raises:
        InfrastructureFailed: locked, full, unreachable.
        Conflict: undone in favour of another transaction.
        InvalidInput: the file is no database, or a value cannot be stored in this one.
    """
    shown = url.render_as_string(hide_password=True)
    try:
        yield
    except PoolTimeoutError as error:
        raise InfrastructureFailed(f"database {shown}: all connections of this process are in use") from error
    except (OperationalError, InternalError) as error:
        kind = Conflict if getattr(error.orig, "sqlstate", None) in _UNDONE_FOR_OTHERS else InfrastructureFailed
        raise kind(f"database {shown}: {str(error.orig).strip()}") from error
    except DataError as error:
        raise InvalidInput(f"the database cannot store this: {str(error.orig).strip()}") from error
    except DatabaseError as error:
        if "file is not a database" in str(error.orig):
            raise InvalidInput(f"{shown} is not an SQLite database") from error
        raise


def _prepare(path: Path, create: bool) -> None:
    if not create:
        if not path.exists():
            raise InvalidInput(f"no database at {path}")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureFailed(f"cannot make the folder of the database: {error}") from error


def _configure(foreign_keys: bool, connection: Any, record: Any) -> None:
    # None: the driver begins no transaction of its own; `_begin` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        f"foreign_keys={int(foreign_keys)}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("nas_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _try_begin(connection: Connection, *, give_up: bool) -> bool:
    try:
        connection.begin()
    except OperationalError as error:
        if give_up or "database is locked" not in str(error.orig):
            raise
        return False
    return True
