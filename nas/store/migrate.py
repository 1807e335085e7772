"""The schema's version: Alembic, run from here rather than from a command line.

A new database is built, a current one used, an older one upgraded when its owner says so (after a backup copy), and
one of a newer hilnas refused.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.store.engine import database_url, make_engine, sqlite_file, translated, writing

REVISION = "0005"
"""The newest of `migrations/versions`. Stated here so that opening a current database need not load Alembic."""

MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What `upgrade` did: revisions before and after, and the copy of the database as it was."""

    before: str | None
    after: str
    backup: Path | None


def ensure_current(engine: Engine, clock: Clock, *, create: bool) -> None:
    """Builds the tables of an empty database, and upgrades an older one that holds no study.

    Raises:
        InvalidInput: an older one with studies, an empty one though `create` is false, a newer one, or not ours.
        InfrastructureFailed: it cannot be reached, stayed locked, or the disk is full.
    """
    with translated(engine.url), engine.connect() as connection:
        revision = _revision(connection)
        if revision == REVISION:
            return
        if revision is None and not create:
            raise InvalidInput(f"no hilnas tables in {_shown(connection)}")
        if revision is not None and _has_studies(connection):
            raise InvalidInput(
                f"{_shown(connection)} is of an older hilnas (revision {revision}, now {REVISION}); "
                "run 'nas db upgrade', which keeps a copy first"
            )
    upgrade(engine.url.render_as_string(hide_password=False), clock=clock)


def upgrade(url: str | None = None, *, clock: Clock | None = None) -> Upgrade:
    """Brings a database to this hilnas's revision in one transaction; SQLite files are copied beside themselves first.

    Raises:
        InvalidInput: a newer revision, not ours, or no such file.
        InfrastructureFailed: it stayed locked, or the disk is full.
    """
    target = database_url(url)
    clock = clock or SystemClock()
    # Without foreign keys: to alter a table, SQLite has to drop it, which would delete what refers to its rows.
    engine = make_engine(target, create=False, foreign_keys=False)
    try:
        with writing(engine, clock) as connection:
            before = _revision(connection)
            if before == REVISION:
                return Upgrade(before, REVISION, None)
            path = sqlite_file(target)
            # The write lock is held, so the copy is of exactly what is about to change.
            backup = _backup(path, f"{before}-{clock.now():.0f}") if path and before else None
            _run(connection)
            return Upgrade(before, REVISION, backup)
    finally:
        engine.dispose()


def _revision(connection: Connection) -> str | None:
    """The database's revision; None where it is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    revision = (
        connection.scalar(text("SELECT version_num FROM alembic_version")) if "alembic_version" in tables else None
    )
    if revision is None:
        raise InvalidInput(f"{_shown(connection)} holds tables of something else than hilnas")
    if revision != REVISION and revision not in _known_revisions():
        raise InvalidInput(
            f"{_shown(connection)} is of a newer hilnas (revision {revision}; this one reads up to {REVISION}); "
            "install that hilnas, or name another database with --db"
        )
    return str(revision)


def _has_studies(connection: Connection) -> bool:
    return connection.execute(text("SELECT 1 FROM study LIMIT 1")).first() is not None


def _known_revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}


def _run(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        assert not broken, f"the migration broke references: {broken[:5]}"


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
