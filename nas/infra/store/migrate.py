"""Schema versions, by Alembic without its command line.

A new database is built, a current one is used, an older one is upgraded when its owner asks for it (a backup copy is
made first), and one of a newer hilnas is refused.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, func, inspect, select, text

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store.engine import database_url, make_engine, sqlite_file, translated, writing
from nas.infra.store.models import metadata

REVISION = "0.2.1"
"""The newest of `migrations/versions`. Kept here so that opening a current database does not load Alembic."""

OWN_TABLES = frozenset({"study", "study_lease", "result_use"})
"""Tables that only a database of hilnas has."""

_OPTUNAS = {"studies", "study_directions", "version_info"}

_UPGRADE_LOCK = 0x68696C6E6173
"""An arbitrary number that no other user of the database takes for an advisory lock."""

MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Result of `upgrade`: revisions before and after, and the backup copy."""

    before: str | None
    after: str
    backup: Path | None


def ensure_current(engine: Engine, clock: Clock, *, create: bool) -> None:
    """Builds the tables of an empty database, and upgrades an older one that has no study.

    Raises:
        InvalidInput: an older one with studies, an empty one though `create` is false, a newer one, or not ours.
        InfrastructureFailed: it cannot be reached, stayed locked, or the disk is full.
    """
    with translated(engine.url), engine.connect() as connection:
        revision = _revision(connection)
        if revision == REVISION:
            return
        if revision is None and not create:
            raise InvalidInput(f"no hilnas tables in {_safe_url(connection)}")
        if revision is not None and connection.execute(text("SELECT 1 FROM study LIMIT 1")).first():
            copy = "which keeps a copy first" if sqlite_file(engine.url) else "after a copy by pg_dump"
            raise InvalidInput(
                f"{_safe_url(connection)} is of an older hilnas (revision {revision}, now {REVISION}); "
                f"run 'nas db upgrade', {copy}"
            )
    upgrade(engine.url.render_as_string(hide_password=False), clock=clock)


def upgrade(url: str | None, *, clock: Clock | None = None) -> Upgrade:
    """Upgrades a database to the newest revision in one transaction; an SQLite file is copied first, next to it.

    A PostgreSQL database is copied by its own tools (`pg_dump`).

    Raises:
        InvalidInput: a newer revision, not ours, or no such file.
        InfrastructureFailed: it stayed locked, or the disk is full.
    """
    target = database_url(url)
    clock = clock or SystemClock()
    # Without foreign keys: SQLite alters a table by dropping it, which would delete the rows that refer to it.
    engine = make_engine(target, create=False, foreign_keys=False)
    try:
        with writing(engine, clock) as connection:
            if connection.dialect.name == "postgresql":
                # The first process upgrades, the others wait and find it done. SQLite's write lock has the same effect.
                connection.execute(select(func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
            before = _revision(connection)
            if before == REVISION:
                return Upgrade(before, REVISION, None)
            path = sqlite_file(target)
            # The write lock is held, so the copy is of exactly what is about to change.
            backup = _backup(path, f"{before}-{clock.now():.0f}") if path and before else None
            _run(connection, before)
            return Upgrade(before, REVISION, backup)
    finally:
        engine.dispose()


def _revision(connection: Connection) -> str | None:
    """Returns the database's revision; None where it is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    revision = (
        connection.scalar(text("SELECT version_num FROM alembic_version")) if "alembic_version" in tables else None
    )
    if revision is None or not set(tables) >= OWN_TABLES:
        owner = "Optuna" if set(tables) >= _OPTUNAS else "something else than hilnas"
        raise InvalidInput(f"{_safe_url(connection)} holds tables of {owner}; name another database with --db")
    if revision != REVISION and revision not in _known_revisions():
        raise InvalidInput(
            f"{_safe_url(connection)} is of a newer hilnas, or of one before 0.2.0 (revision {revision}; this one "
            f"reads up to {REVISION}); install that hilnas, or name another database with --db"
        )
    return str(revision)


def _known_revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}


def _run(connection: Connection, before: str | None) -> None:
    """Builds all tables of an empty database (`before` is None), or runs the migrations that follow `before`."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if before is None:
        metadata.create_all(connection)
        command.stamp(config, "head")
        return
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


def _safe_url(connection: Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=True)
