"""Opening databases on a server: new, current, older, newer, and not ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from cli_runner import nas
from store_support import add_device, new_study, proposal
from test_store_schema import NEXT

from nas.core.errors import InvalidInput
from nas.infra.store import migrate, studies, trials
from nas.infra.store.models import metadata
from nas.infra.store.store import Store
from tests.support.postgres import Server


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.create("schema")


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes this a later hilnas, with one revision more, from the call on; gives that revision's file."""
    folder = shutil.copytree(migrate.MIGRATIONS, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "versions" / "next.py"
    script.write_text(NEXT.format(head=migrate.REVISION).replace(', recreate="always"', ""))

    def move() -> Path:
        monkeypatch.setattr(migrate, "MIGRATIONS", folder)
        monkeypatch.setattr(migrate, "REVISION", "next")
        return script

    return move


def columns(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT column_name FROM information_schema.columns WHERE table_name = 'study'")
        return {row[0] for row in rows}


def test_a_new_database_is_of_the_newest_revision(url: str) -> None:
    store = Store.open(url)
    with store.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == migrate.REVISION
    store.close()


def test_names_of_agents_fit_after_an_upgrade(url: str) -> None:
    Store.open(url).close()
    with psycopg.connect(url) as connection:
        connection.execute("ALTER TABLE device_event ALTER COLUMN what TYPE varchar(32)")
        connection.execute("UPDATE alembic_version SET version_num = '0.2.0'")
    store = Store.open(url)
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    add_device(store, agent="local-" + "x" * 58)
    store.close()


def test_a_database_without_tables_is_filled_only_if_asked_to(url: str) -> None:
    with pytest.raises(InvalidInput, match="no hilnas tables"):
        Store.open(url, create=False)
    Store.open(url).close()
    Store.open(url, create=False).close()


def test_what_is_no_database_of_ours_is_refused(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE recipe (name TEXT)")
    with pytest.raises(InvalidInput, match="something else"):
        Store.open(url)


def test_a_newer_database_is_refused(url: str) -> None:
    Store.open(url).close()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'next'")
    for use in (Store.open, migrate.upgrade):
        with pytest.raises(InvalidInput, match=r"newer hilnas.*\(revision next"):
            use(url)


def test_an_older_database_with_studies_asks_for_an_upgrade(url: str, later: Callable[[], Path]) -> None:
    old, before = Store.open(url), migrate.REVISION
    trials.propose(old, new_study(old).id, [proposal(32)])
    old.close()
    later()
    with pytest.raises(InvalidInput, match=r"nas db upgrade.*pg_dump"):
        Store.open(url)
    assert migrate.upgrade(url) == migrate.Upgrade(before, "next", None)
    assert "colour" in columns(url)
    store = Store.open(url)
    assert [trial.number for trial in trials.all(store, studies.get(store, "first").id)] == [0]
    store.close()


def test_a_failed_upgrade_changes_nothing(url: str, later: Callable[[], Path]) -> None:
    store = Store.open(url)
    new_study(store)
    store.close()
    with later().open("a") as script:
        script.write("    raise OSError('half-way')\n")
    with pytest.raises(OSError, match="half-way"):
        migrate.upgrade(url)
    assert "colour" not in columns(url)


def test_other_drivers_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"psycopg2.*write postgresql://"):
        Store.open("postgresql+psycopg2://user@host/name")


def test_commands_take_the_url(url: str) -> None:
    assert "no hilnas tables" in nas("study", "list", "--db", url).err
    Store.open(url).close()
    assert nas("study", "list", "--db", url).code == 0
    assert "up to date" in nas("db", "upgrade", "--db", url).err
    checks = {check["name"]: check for check in json.loads(nas("doctor", "--json", "--db", url).out)["checks"]}
    assert checks["database"]["status"] == "ok"
    assert checks["database"]["detail"].startswith("postgresql+psycopg://hilnas@/schema")
