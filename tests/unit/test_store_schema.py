"""Opening databases: new, current, older, newer, and not ours."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from store_support import new_study, open_store, proposal

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store import migrate, studies, trials
from nas.infra.store.models import metadata
from nas.infra.store.store import Store

NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{head}"

def upgrade():
    with op.batch_alter_table("study", recreate="always") as study:
        study.add_column(sa.Column("colour", sa.String(8)))
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'nas.db'}"


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this a later hilnas, with one revision more, from the call on."""
    folder = shutil.copytree(migrate.MIGRATIONS, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "next.py").write_text(NEXT.format(head=migrate.REVISION))

    def move() -> None:
        monkeypatch.setattr(migrate, "MIGRATIONS", folder)
        monkeypatch.setattr(migrate, "REVISION", "next")

    return move


def columns(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {row[1] for row in connection.execute("PRAGMA table_info(study)")}


def test_a_new_database_is_of_the_newest_revision(url: str) -> None:
    store = Store.open(url)
    with store.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == migrate.REVISION
    assert ScriptDirectory(str(migrate.MIGRATIONS)).get_heads() == [migrate.REVISION]


def test_a_database_opens_again_with_what_was_stored(tmp_path: Path) -> None:
    new_study(open_store(tmp_path))
    assert [study.name for study in studies.all(open_store(tmp_path))] == ["first"]


def test_a_newer_database_is_refused(tmp_path: Path, url: str) -> None:
    new_study(open_store(tmp_path))
    with closing(sqlite3.connect(tmp_path / "nas.db")) as future, future:
        future.execute("UPDATE alembic_version SET version_num = 'next'")
    for use in (Store.open, migrate.upgrade):
        with pytest.raises(InvalidInput, match=r"newer hilnas.*\(revision next") as refused:
            use(url)
        assert refused.value.exit_code == 3


def test_an_older_database_with_studies_asks_for_an_upgrade_which_keeps_a_copy(
    tmp_path: Path, url: str, later: Callable[[], None]
) -> None:
    old, before = open_store(tmp_path), migrate.REVISION
    trials.propose(old, new_study(old).id, [proposal(32)])
    later()
    with pytest.raises(InvalidInput, match="nas db upgrade"):
        Store.open(url)
    done = migrate.upgrade(url)
    assert (done.before, done.after) == (before, "next")
    assert done.backup is not None
    assert "colour" in columns(tmp_path / "nas.db") - columns(done.backup)
    with closing(sqlite3.connect(done.backup)) as copy:
        assert copy.execute("SELECT name FROM study").fetchall() == [("first",)]
    store = open_store(tmp_path)
    assert [trial.number for trial in trials.all(store, studies.get(store, "first").id)] == [0]
    assert migrate.upgrade(url) == migrate.Upgrade("next", "next", None)


def test_a_database_of_the_first_revision_becomes_one_of_the_newest(tmp_path: Path, url: str) -> None:
    new_study(open_store(tmp_path))
    with closing(sqlite3.connect(tmp_path / "nas.db")) as old, old:
        old.execute("UPDATE alembic_version SET version_num = '0.2.0'")
    assert migrate.upgrade(url).after == migrate.REVISION
    with open_store(tmp_path).read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        (definition,) = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'device_event'").one()
    assert "AUTOINCREMENT" in definition and "what VARCHAR(64)" in definition and "ON DELETE CASCADE" in definition


def test_an_older_database_without_studies_is_upgraded_at_once(tmp_path: Path, later: Callable[[], None]) -> None:
    open_store(tmp_path)
    later()
    open_store(tmp_path)
    assert "colour" in columns(tmp_path / "nas.db")


def test_a_failed_upgrade_changes_nothing(tmp_path: Path, url: str, later: Callable[[], None]) -> None:
    new_study(open_store(tmp_path))
    later()
    with (migrate.MIGRATIONS / "versions" / "next.py").open("a") as script:
        script.write("    raise OSError('half-way')\n")
    with pytest.raises(OSError, match="half-way"):
        migrate.upgrade(url)
    assert "colour" not in columns(tmp_path / "nas.db")


def test_what_is_no_database_of_ours_is_refused(tmp_path: Path, url: str) -> None:
    with closing(sqlite3.connect(tmp_path / "nas.db")) as other:
        other.execute("CREATE TABLE recipe (name TEXT)")
    with pytest.raises(InvalidInput, match="something else"):
        Store.open(url)
    (tmp_path / "nas.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(InvalidInput, match="not an SQLite database"):
        Store.open(url)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "mysql://host/name", "nonsense", "postgresql://h/n"]
)
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises((InvalidInput, InfrastructureFailed)):
        Store.open(url)


def test_a_missing_database_is_made_only_if_asked_to(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput, match="no database at"):
        Store.open(url, create=False)
    with pytest.raises(InvalidInput, match="no database at"):
        migrate.upgrade(url)
    assert not (tmp_path / "nas.db").exists()
    sqlite3.connect(tmp_path / "nas.db").close()
    (tmp_path / "nas.db").touch()
    with pytest.raises(InvalidInput, match="no hilnas tables"):
        Store.open(url, create=False)


def test_the_default_is_below_the_home_folder(tmp_path: Path, home: Path) -> None:
    store = Store.open()
    assert (tmp_path / "home" / "hilnas.db").exists()
    assert store.artifacts == tmp_path / "home" / "artifacts"
