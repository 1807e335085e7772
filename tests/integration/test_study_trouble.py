"""Errors of a launch: one line, the right exit code, and nothing is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from study_lab import SPACE, Lab

from nas.core.layout import Layout
from nas.infra.store import studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "lab")


def refused(lab: Lab, code: int, *arguments: str) -> str:
    """Runs a command that must end with `code` and print nothing; returns its error, a single line."""
    result = lab.run_here(*arguments, code=code)
    assert result.out == ""
    (line,) = [line for line in result.err.splitlines() if line.startswith("nas: ")]
    return line


def test_a_database_of_a_newer_version_is_left_alone(lab: Lab) -> None:
    database = lab.home / "hilnas.db"
    Store.open(f"sqlite:///{database}").close()
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = database.read_bytes()
    assert "newer" in refused(lab, 3, *lab.launch("study"))
    assert database.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(lab: Lab) -> None:
    lab.home.mkdir()
    (lab.home / "hilnas.db").write_text("my diary " * 1000)
    assert "is not an SQLite database" in refused(lab, 3, *lab.launch("study"))
    assert (lab.home / "hilnas.db").read_text().startswith("my diary")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("missing.txt", None, "no such file or folder"), ("binary.txt", b"\xff" * 99_999, "is not UTF-8 text")],
)
def test_a_corpus_that_cannot_be_read_is_named(lab: Lab, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (lab.folder / name).write_bytes(content)
    lab.space(quality=SPACE["quality"] | {"corpus": [name]})
    line = refused(lab, 3, *lab.launch("study"))
    assert str(lab.folder / name) in line
    assert message in line
    assert not (lab.home / "hilnas.db").exists()


def test_a_device_that_nobody_registered_is_named_and_no_study_is_left(lab: Lab) -> None:
    lab.space(devices=["pixel"])
    assert "unknown device 'pixel'" in refused(lab, 3, *lab.launch("study"))
    assert not (lab.home / "hilnas.db").exists()


def test_a_runtime_that_is_not_there_is_named(lab: Lab) -> None:
    lab.space(runtimes=[{"name": "fakee", "quantisation": "q4_0"}])
    assert "unknown runtime 'fakee'; did you mean 'fake'?" in lab.run_here(*lab.launch("study"), code=3).err


def test_a_reference_whose_runner_prints_garbage_ends_the_study(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab", faults={Layout.parse(SPACE["references"]["attention"]).id: "garbage"})
    line = refused(lab, 1, *lab.launch("study", "--trials", "2"))
    assert "the attention reference failed" in line
    assert "no report" in line
    store = lab.store()
    assert studies.get(store, "study").state is StudyState.FAILED
    store.close()
