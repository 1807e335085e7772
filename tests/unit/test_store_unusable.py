"""Databases that cannot be used, or read only: damaged ones, those of others, and those of other programs."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from cli_runner import nas
from store_support import new_study, open_store, proposal
from study_support import archived_lines

from nas.core.errors import NasError, StudyBusy, UnknownName
from nas.infra.store import leases, studies, trials
from nas.infra.store.models import event, result, study, trial
from nas.infra.store.store import Store
from nas.search.analysis.record import read_study

NOBODY = 65534
PAGE = 4096


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a study that ran."""
    folder = tmp_path_factory.mktemp("sound")
    archived_lines(folder)
    [file] = folder.glob("*.db")
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file


def read_everything(url: str) -> None:
    store = Store.open(url, create=False)
    try:
        for study in studies.all(store):
            read_study(store, study.name)
    finally:
        store.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_database_is_one_line_that_says_what_to_do(sound: Path, tmp_path: Path, seed: int) -> None:
    """Some pages are overwritten, as of a disk or network file system that lost writes."""
    file = shutil.copy(sound, tmp_path / "nas.db")
    content, chance = bytearray(file.read_bytes()), random.Random(seed)
    for page in chance.sample(range(1, len(content) // PAGE), k=8):
        content[page * PAGE : (page + 1) * PAGE] = chance.choice((chance.randbytes(PAGE), bytes(PAGE)))
    file.write_bytes(content)
    url = f"sqlite:///{file}"
    try:
        read_everything(url)
    except NasError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("command", [("study", "list"), ("study", "show", "study"), ("db", "upgrade"), ("doctor",)])
def test_commands_tell_of_a_damaged_database(sound: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = shutil.copy(sound, tmp_path / "nas.db")
    content = file.read_bytes()
    file.write_bytes(content[:PAGE] + random.Random(0).randbytes(len(content) - PAGE))
    done = nas(*command, "--db", f"sqlite:///{file}")
    text = done.out if command == ("doctor",) else done.err
    [line] = [line for line in text.splitlines() if "is damaged" in line]
    assert f"{file} is damaged (database disk image is malformed): restore a copy" in line and ".recover" in line
    assert done.code == (1 if command == ("doctor",) else 3)
    assert line.startswith("FAIL  database" if command == ("doctor",) else "nas: ")


def test_a_value_that_is_not_json_is_damage(tmp_path: Path) -> None:
    new_study(open_store(tmp_path))
    with closing(sqlite3.connect(tmp_path / "nas.db")) as database, database:
        database.execute("UPDATE study SET space = '{'")
    done = nas("study", "show", "first", "--db", f"sqlite:///{tmp_path}/nas.db")
    assert done.code == 3 and "is damaged (a value is not JSON" in done.err


ODD = ("x", 1 << 62, b"\xff\xfe", "{}")
COLUMNS = [f"{table.name}.{column.name}" for table in (study, trial, event, result) for column in table.columns]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_may_hold_anything(sound: Path, tmp_path: Path, name: str) -> None:
    """What it says is one line, in every command that reads it."""
    table, _, column = name.partition(".")
    for number, value in enumerate(ODD):
        file = shutil.copy(sound, tmp_path / f"{number}.db")
        url = f"sqlite:///{file}"
        with closing(sqlite3.connect(file)) as database, database, suppress(sqlite3.IntegrityError):
            database.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', (value,))
        for command in (("study", "list"), ("study", "show", "study", "--json")):
            done = nas(*command, "--db", url)
            assert done.code in (0, 3, 4) and len(done.err.splitlines()) <= 1, (value, command, done.err)


def test_tables_that_are_missing_are_damage(tmp_path: Path) -> None:
    new_study(open_store(tmp_path))
    with closing(sqlite3.connect(tmp_path / "nas.db")) as database, database:
        database.execute("DROP TABLE event")
    done = nas("study", "show", "first", "--db", f"sqlite:///{tmp_path}/nas.db")
    assert done.code == 3 and "is damaged (no such table: event)" in done.err


@contextmanager
def as_nobody() -> Iterator[None]:
    """Another user's rights; root's would allow everything."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


@pytest.fixture
def of_another(sound: Path) -> Iterator[Path]:
    """A database that this user may read only, in a folder that it may not change either."""
    folder = Path(tempfile.mkdtemp())
    file = shutil.copy(sound, folder / "a 100%#ü.db")
    file.chmod(0o444)
    folder.chmod(0o555)
    try:
        with as_nobody():
            yield file
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_database_that_may_only_be_read_is_read(of_another: Path) -> None:
    url = f"sqlite:///{of_another}"
    read_everything(url)
    for command in (("study", "list"), ("study", "show", "study", "--json"), ("study", "effects", "study")):
        done = nas(*command, "--db", url)
        assert done.code == 0 and done.out, done.err
    done = nas("study", "pause", "study", "--db", url)
    assert done.code == 3 and f"{of_another} may only be read" in done.err
    assert [path.name for path in of_another.parent.iterdir()] == [of_another.name]


def test_what_its_owner_is_writing_is_read_too(of_another: Path) -> None:
    """The log of a database that is open elsewhere has what is not in the file yet."""
    os.seteuid(os.getuid())
    of_another.parent.chmod(0o755)
    of_another.chmod(0o644)
    store = Store.open(f"sqlite:///{of_another}")
    try:
        new_study(store, "newer")
        of_another.parent.chmod(0o555)
        with as_nobody():
            reader = Store.open(f"sqlite:///{of_another}", create=False)
            assert "newer" in [study.name for study in studies.all(reader)]
            reader.close()
    finally:
        store.close()


def test_a_database_that_may_not_even_be_read(of_another: Path) -> None:
    os.seteuid(os.getuid())
    of_another.chmod(0o000)
    with as_nobody():
        done = nas("study", "list", "--db", f"sqlite:///{of_another}")
    assert done.code == 3 and "cannot be opened: check that this user may read" in done.err


OPTUNA = """
CREATE TABLE studies (study_id INTEGER); CREATE TABLE study_directions (a INTEGER);
CREATE TABLE version_info (a INTEGER); CREATE TABLE alembic_version (version_num TEXT);
INSERT INTO alembic_version VALUES ('v3.2.0.a');
"""


@pytest.mark.parametrize(
    ("tables", "owner"),
    [(OPTUNA, "Optuna"), (OPTUNA.replace("studies", "recipes"), "something else"), ("CREATE TABLE x (a)", "something")],
)
def test_databases_of_other_programs_are_called_so(tmp_path: Path, tables: str, owner: str) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.executescript(tables)
    for command in (("study", "list"), ("db", "upgrade")):
        done = nas(*command, "--db", f"sqlite:///{tmp_path}/other.db")
        assert done.code == 3 and f"holds tables of {owner}" in done.err and "install" not in done.err


def test_messages_name_studies(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    study = new_study(store, "phones").id
    lease = leases.acquire(store, study, "me")
    with pytest.raises(StudyBusy, match=r"^study phones is run by me"):
        leases.acquire(store, study, "you")
    with pytest.raises(StudyBusy, match=r"^study phones is run by me"):
        studies.delete(store, study)
    trials.propose(store, study, [proposal(32)], lease=lease)
    with pytest.raises(UnknownName, match="trial of study phones '7'"):
        trials.get(store, study, 7)


def test_a_home_that_no_url_can_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "we?ird"))
    done = nas("study", "list")
    assert done.code == 3 and "NAS_HOME: " in done.err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["sqlite:///x.db?timeout=abc", "postgresql://h:port/n", "sqlite+none:///x", "://", "sqlite"]
)
def test_no_text_is_a_traceback(url: str) -> None:
    assert nas("study", "list", "--db", url).code in (3, 4)


def test_options_of_an_sqlite_url_are_refused(tmp_path: Path) -> None:
    done = nas("study", "list", "--db", f"sqlite:///{tmp_path / 'a.db'}?mode=ro")
    assert done.code == 3 and "--db: an SQLite URL names a file" in done.err
