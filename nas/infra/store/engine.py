"""Engines: SQLite (WAL) or PostgreSQL (psycopg 3), and how reading and writing transactions begin on either.

A reading transaction is a snapshot; on PostgreSQL REPEATABLE READ and READ ONLY, which never conflicts.

A writing transaction on SQLite takes the file's one write lock at its beginning, so writers run one after the other. On
PostgreSQL they run concurrently, READ COMMITTED: each locks the rows that it decides by before it reads them, so it
reads what the others have committed. Rows are locked in the order study, agent, device, job, and several of a table in
the order of their keys, which rules out deadlocks. A foreign key that is followed against that order (a study is
deleted while one of its jobs fails) can still cause one; then the database rolls back one of both transactions, as a
`Conflict`, and `nas.infra.store.store.retried` runs it again.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from shutil import disk_usage
from typing import Any
from urllib.parse import quote

from sqlalchemy import BigInteger, Connection, Engine, Float, Integer, String, Table, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DataError, InternalError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.types import TypeEngine

from nas.core.canonical import canonical_json
from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.paths import home
from nas.infra.store.models import DamagedValue

WRITE_DEADLINE_S = 30.0
"""Longest wait for the write lock, on PostgreSQL for the lock of one row."""

POSTGRESQL = "postgresql+psycopg"

CONNECTIONS = 16
"""Most PostgreSQL connections of one process; a server's default is 100 in all."""

_BUSY_TIMEOUT_MS = 500
_RETRY_S = 0.02

_TOO_LARGE = 1 << 31
"""Above what `Integer` holds on either database."""

_LEAST_FREE = 1 << 20
"""Bytes on a disk below which it is full."""

_CONFLICTS = ("40001", "40P01")
"""SQLSTATE of a serialization failure and of a deadlock."""

_PRIMARY = 0xFF
"""Of SQLite's error codes: the kind, without its details."""
_DAMAGES = ("no such table", "no such column", "Could not decode to UTF-8")
"""Beginnings of messages about a database whose revision says that it has these."""

_POOL_WAIT_S = 30.0
_SERVER_TIME = text("SELECT extract(epoch FROM clock_timestamp())")
_FOLLOW_S = 30.0
"""Seconds between two requests for the server's time."""
_CLOCK_SET_S = 0.5
"""Jump of this machine's clock, in seconds, after which the server's time is requested at once."""
_LIBPQ = {
    "connect_timeout": "10",
    "application_name": "hilnas",
    # A server that vanished silently is noticed within half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
"""libpq's settings where the URL has none of its own."""

_POSTGRESQL_SESSION = f"""
SET default_transaction_isolation = 'read committed';
SET lock_timeout = '{WRITE_DEADLINE_S:.0f}s';
-- Locks of a stopped or unreachable client are released.
SET idle_in_transaction_session_timeout = '300s';
SET tcp_keepalives_idle = 30;
SET tcp_keepalives_interval = 10;
SET tcp_keepalives_count = 3
"""


class Conflict(InfrastructureFailed):
    """The database rolled back a transaction in favour of another one; trying again can succeed at once."""


class DatabaseUnusable(InfrastructureFailed):
    """The database is damaged, may only be read, or cannot be opened: trying again changes nothing."""

    exit_code = 3


def database_url(url: str | None, where: str = "--db") -> URL:
    """Returns the parsed `url`, by default that of `$NAS_HOME/hilnas.db`.

    Args:
        url: the text, or None.
        where: the option that it comes from.

    Raises:
        InvalidInput: not the URL of a supported database.
    """
    if not url and "?" in str(home()):
        raise InvalidInput(f"{home()}: a database URL cannot name a path with '?'", where="NAS_HOME")
    try:
        parsed = make_url(url) if url else URL.create("sqlite", database=str(home() / "hilnas.db"))
        backend = parsed.get_backend_name()
    except (ArgumentError, ValueError):
        valid = "sqlite:////path/to/file.db or postgresql://user@host/name"
        # The text is not repeated: it may contain a password.
        raise InvalidInput(f"this is no database URL; write {valid}", where=where) from None
    if backend not in ("sqlite", "postgresql"):
        raise InvalidInput(f"{backend!r} databases are not supported; use sqlite or postgresql", where=where)
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise InvalidInput("an SQLite database must be a file: threads and processes share it", where=where)
    if backend == "sqlite" and parsed.query:
        raise InvalidInput("an SQLite URL names a file and has no options after '?'", where=where)
    return parsed.set(drivername=POSTGRESQL) if parsed.drivername == "postgresql" else parsed


def make_engine(url: URL, *, create: bool, foreign_keys: bool = True) -> Engine:
    """Returns an engine; SQLite connections leave the beginning of transactions to this module.

    An SQLite file that this user cannot write, or whose folder, is opened for reading.

    Raises:
        InvalidInput: the driver is not installed or not supported, or there is no SQLite file and `create` is false.
        InfrastructureFailed: the folder of the file cannot be created.
    """
    path = sqlite_file(url)
    if path is None:
        return _make_postgresql_engine(url)
    _prepare(path, create)
    # SQLite makes files beside the database.
    writable = not path.exists() or all(os.access(place, os.W_OK, effective_ids=True) for place in (path, path.parent))
    settings: dict[str, Any] = {} if writable else {"creator": partial(_connect_for_reading, path)}
    try:
        engine = create_engine(
            url, json_serializer=canonical_json, json_deserializer=partial(_stored_json, url), **settings
        )
    except (NoSuchModuleError, ImportError) as error:
        raise InvalidInput(f"the driver of {url.drivername!r} is not installed: {error}") from None
    _check_values(engine)
    event.listen(engine, "connect", partial(_configure, foreign_keys, writable))
    event.listen(engine, "begin", _begin)
    return engine


def sqlite_file(url: URL) -> Path | None:
    """Returns the database file, or None for a server."""
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def snapshots(engine: Engine) -> Engine:
    """Returns the engine for reading transactions; it shares the pool of connections."""
    if sqlite_file(engine.url):
        return engine
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


@contextmanager
def writing(engine: Engine, clock: Clock) -> Iterator[Connection]:
    """Opens a writing transaction, which is committed at the end and rolled back by an exception.

    SQLite takes its write lock here, not at the first change, so a transaction never fails half-way for lack of it.

    Raises:
        InfrastructureFailed: a lock was not free within `WRITE_DEADLINE_S`, the disk is full, or the server is gone.
        Conflict: the database rolled it back in favour of another one.
    """
    with translated(engine.url), engine.connect() as plain:
        connection = plain.execution_options(nas_write=True)
        deadline = clock.monotonic() + WRITE_DEADLINE_S
        while not _try_begin(connection, give_up=clock.monotonic() >= deadline):
            clock.sleep(_RETRY_S)
        yield connection
        connection.commit()


class ServerClock:
    """The time of a PostgreSQL server: hosts that share its database compare times, and their own clocks may differ.

    `now` is this machine's time plus the difference to the server's, which `follow` measures.

    Args:
        local: this machine's clock.
    """

    def __init__(self, local: Clock) -> None:
        self._local = local
        self._ahead_s = 0.0
        self._measured: tuple[float, float] | None = None

    def now(self) -> float:
        """Returns the server's seconds since the epoch."""
        return self._local.now() + self._ahead_s

    def monotonic(self) -> float:
        """Returns this machine's monotonic seconds."""
        return self._local.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps."""
        self._local.sleep(seconds)

    def follow(self, connection: Connection) -> None:
        """Measures the difference, if the last measurement is old or this machine's clock was set since."""
        local, monotonic = self._local.now(), self._local.monotonic()
        if self._measured is not None:
            since, since_monotonic = local - self._measured[0], monotonic - self._measured[1]
            if since_monotonic < _FOLLOW_S and abs(since - since_monotonic) < _CLOCK_SET_S:
                return
        server = float(connection.execute(_SERVER_TIME).scalar_one())
        self._ahead_s = server - (local + self._local.now()) / 2
        self._measured = local, monotonic


def lock_tables(connection: Connection, *tables: Table) -> None:
    """Keeps others from changing these tables until the transaction ends; SQLite's write lock does so anyway."""
    if connection.dialect.name == "postgresql":
        names = ", ".join(table.name for table in tables)
        connection.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Raises the database's operational errors as hilnas's; programming errors pass.

    Raises:
        InfrastructureFailed: locked, full, unreachable.
        Conflict: rolled back in favour of another transaction.
        DatabaseUnusable: the file is damaged, may only be read, or cannot be opened.
        InvalidInput: the file is no database, or a value cannot be stored in this one.
    """
    safe_url = url.render_as_string(hide_password=True)
    try:
        yield
    except PoolTimeoutError as error:
        raise InfrastructureFailed(f"database {safe_url}: all connections of this process are in use") from error
    except (OperationalError, InternalError) as error:
        if (unusable := _unusable(url, error)) is not None:
            raise unusable from error
        kind = Conflict if getattr(error.orig, "sqlstate", None) in _CONFLICTS else InfrastructureFailed
        message = str(error.orig).strip()
        # SQLite calls it an I/O error where the disk is too full for its write-ahead log.
        if message == "disk I/O error" and (file := sqlite_file(url)) and disk_usage(file.parent).free < _LEAST_FREE:
            message = f"the disk is full at {file.parent}; free some, for example with 'nas gc'"
        raise kind(f"database {safe_url}: {message}") from error
    except DamagedValue as error:
        raise damaged(url, str(error)) from error
    except DataError as error:
        raise InvalidInput(f"the database cannot store this: {str(error.orig).strip()}") from error
    except DatabaseError as error:
        if (unusable := _unusable(url, error)) is not None:
            raise unusable from error
        raise


def _unusable(url: URL, error: DatabaseError) -> InfrastructureFailed | InvalidInput | None:
    """Returns the error of a file that no further try can use; None if the reason is another one."""
    path, reason = sqlite_file(url), str(error.orig).strip()
    if path is None:
        return None
    code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_OK) & _PRIMARY
    if code == sqlite3.SQLITE_NOTADB:
        return InvalidInput(f"{url.render_as_string(hide_password=True)} is not an SQLite database")
    if code == sqlite3.SQLITE_CORRUPT or reason.startswith(_DAMAGES):
        return damaged(url, reason)
    if code == sqlite3.SQLITE_READONLY:
        return DatabaseUnusable(f"{path} may only be read: this user cannot write the file or its folder")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return DatabaseUnusable(f"{path} cannot be opened: check that this user may read the file and its folder")
    return None


def damaged(url: URL, reason: str) -> DatabaseUnusable:
    """Returns the error of a database whose content is not what was written."""
    path = sqlite_file(url)
    if path is None:
        return DatabaseUnusable(f"database {url.render_as_string(hide_password=True)} is damaged ({reason})")
    return DatabaseUnusable(
        f"{path} is damaged ({reason}): restore a copy of it ('nas db upgrade' leaves {path.name}.*.backup), or save "
        f"what can be read with: sqlite3 {shlex.quote(str(path))} .recover | sqlite3 saved.db"
    )


def insert_if_absent(connection: Connection, table: Table, **values: Any) -> bool:
    """Inserts a row unless one with its key exists; returns whether it did."""
    return connection.execute(_insert_if_absent(connection.dialect.name, table), values).first() is not None


@cache
def _insert_if_absent(dialect: str, table: Table) -> ReturningInsert[Any]:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    returning: ReturningInsert[Any] = insert.on_conflict_do_nothing().returning(*table.primary_key)
    return returning


def _make_postgresql_engine(url: URL) -> Engine:
    """Returns an engine that checks its pooled connections and replaces lost ones before a transaction begins."""
    if url.drivername != POSTGRESQL:
        raise InvalidInput(f"the driver of {url.drivername!r} is not supported; write postgresql://user@host/name")
    settings = {name: value for name, value in _LIBPQ.items() if name not in url.query}
    pool = {"pool_size": CONNECTIONS, "max_overflow": 0, "pool_timeout": _POOL_WAIT_S, "pool_pre_ping": True}
    try:
        engine = create_engine(url, json_serializer=canonical_json, connect_args=settings, **pool)
    except ImportError as error:
        raise InvalidInput(f"PostgreSQL needs its driver: pip install '.[postgres]' in a checkout ({error})") from None

    @event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        connection.autocommit = True
        connection.execute(_POSTGRESQL_SESSION)
        connection.autocommit = False

    return engine


def _prepare(path: Path, create: bool) -> None:
    if not create:
        if not path.exists():
            hint = "'nas launch' or 'nas demo-data' creates one; --db names another"
            raise InvalidInput(f"no database at {path}: {hint}")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureFailed(f"cannot make the folder of the database: {error}") from error


def _connect_for_reading(path: Path) -> sqlite3.Connection:
    # A database that somebody has open has a log, which readers need. One without cannot change under this process,
    # short of its owner opening it meanwhile; SQLite would make a log to read it, and cannot.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    return sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, check_same_thread=False)


def _stored_json(url: URL, text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(url, f"a value is not JSON: {error}") from error


def _check_values(engine: Engine) -> None:
    """Has each value that is read be of its column's type: SQLite stores any value in any column."""

    def checked(types: Any, kind: type[TypeEngine[Any]]) -> type[TypeEngine[Any]]:
        def check(value: Any) -> Any:
            if value is None or (isinstance(value, types) and (kind is not Integer or abs(value) < _TOO_LARGE)):
                return value
            raise DamagedValue(f"{str(value)[:40]!r} is no {kind.__name__.lower()}")

        return type(kind.__name__, (kind,), {"result_processor": lambda *_: check})

    of: dict[type[TypeEngine[Any]], Any] = {Integer: int, BigInteger: int, Float: (int, float), String: str}
    engine.dialect.colspecs = {**engine.dialect.colspecs, **{kind: checked(types, kind) for kind, types in of.items()}}


def _configure(foreign_keys: bool, writable: bool, connection: Any, record: Any) -> None:
    # None: the driver does not begin transactions; `_begin` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    if writable:
        _use_log(cursor)
        cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA foreign_keys={int(foreign_keys)}")
    cursor.close()


def _use_log(cursor: Any) -> None:
    """Has the database use a write-ahead log.

    SQLite does not wait here: of two processes that open a database without a log at once, it refuses one.
    """
    deadline = time.monotonic() + WRITE_DEADLINE_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if time.monotonic() >= deadline or "database is locked" not in str(error):
                raise
        time.sleep(_RETRY_S)


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
