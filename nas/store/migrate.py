"""The schema's version: Alembic, run from here rather than from a command line.

A new database is built, a current one used, an older one upgraded when its owner says so (after a backup copy), and
one of a newer hilnas refused.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.store.engine import database_url, make_engine, sqlite_file, writing

MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What `upgrade` did: revisions before and after, and the copy of the database as it was."""

    before: str | None
    after: str
    backup: Path | None


def head() -> str:
    """The revision that this hilnas reads and writes."""
    revision = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert revision is not None, "migrations/versions is empty"
    return revision


def is_current(connection: Connection) -> bool:
    """Whether the tables are of this hilnas's revision.

    Raises:
        InvalidInput: a newer revision, or tables that are not ours.
    """
    return _revision(connection) == head()


def build(connection: Connection, *, create: bool) -> None:
    """Builds the tables of a new database, or upgrades an older one that holds no study yet.

    Raises:
        InvalidInput: an older one with studies, an empty one though `create` is false, a newer one, or not ours.
    """
    revision = _revision(connection)
    if revision is None and not create:
        raise InvalidInput(f"no hilnas tables in {_shown(connection)}")
    if revision not in (None, head()) and _has_studies(connection):
        raise InvalidInput(
            f"{_shown(connection)} is of an older hilnas (revision {revision}, now {head()}); "
            "run 'nas db upgrade', which keeps a copy first"
        )
    _run(connection)


def upgrade(url: str | None = None, *, clock: Clock | None = None) -> Upgrade:
    """Brings a database to this hilnas's revision in one transaction; SQLite files are copied beside themselves first.

    Raises:
        InvalidInput: a newer revision, not ours, or no such file.
        InfrastructureFailed: it stayed locked, or the disk is full.
    """
    target = database_url(url)
    clock = clock or SystemClock()
    engine = make_engine(target, create=False)
    try:
        with writing(engine, clock) as connection:
            before = _revision(connection)
            if before == head():
                return Upgrade(before, before, None)
            path = sqlite_file(target)
            # The write lock is held, so the copy is of exactly what is about to change.
            backup = _backup(path, f"{before}-{clock.now():.0f}") if path and before else None
            _run(connection)
            return Upgrade(before, head(), backup)
    finally:
        engine.dispose()


def _revision(connection: Connection) -> str | None:
    """The database's revision; None where it is empty."""
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        if inspect(connection).get_table_names():
            raise InvalidInput(f"{_shown(connection)} holds tables of something else than hilnas")
        return None
    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if revision not in known:
        raise InvalidInput(
            f"{_shown(connection)} is of a newer hilnas (revision {revision}; this one reads up to {head()}); "
            "install that hilnas, or name another database with --db"
        )
    return revision


def _has_studies(connection: Connection) -> bool:
    return connection.execute(text("SELECT 1 FROM study LIMIT 1")).first() is not None


def _run(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _backup(path: Path, suffix: str) -> Path:
    copy = path.with_name(f"{path.name}.{suffix}.backup")
    partial = copy.with_suffix(".partial")
    try:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as target:
            source.backup(target)
        partial.replace(copy)
    except (OSError, sqlite3.Error) as error:
        partial.unlink(missing_ok=True)
        raise InfrastructureFailed(f"cannot back up the database to {copy}: {error}") from error
    return copy


def _shown(connection: Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=True)
