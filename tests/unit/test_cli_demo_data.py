"""Recorded studies: by name, and all of them for an empty dashboard; the doors that beginners find."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import nas
from dashboard_lab import DashboardLab

from nas.infra.store.rows import Role
from nas.search.analysis import archive
from nas.search.analysis.archive import recorded_studies

DOORS = ("nas compare", "nas adapt", "nas launch", "nas agent", "nas demo-data")


@pytest.fixture
def db(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'a.db'}"


def test_a_recorded_study_is_imported_by_its_name(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lfm2").mkdir()  # such as an adapted model's, which is no archive
    assert nas("study", "import", "lfm2", "--db", db).code == 0
    assert "lfm2" in nas("study", "list", "--db", db).out
    wrong = nas("study", "import", "lfm22", "--db", db)
    assert (wrong.code, "recorded studies: " in wrong.err, "lfm2-full" in wrong.err) == (3, True, True)


def test_a_file_comes_before_a_recorded_study(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lfm2").write_text("no archive")
    assert nas("study", "import", "lfm2", "--db", db).code == 3


def test_demo_data_fills_a_database_once(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = dict([next(iter(recorded_studies().items()))])
    monkeypatch.setattr("nas.cli.demo_data.recorded_studies", lambda: one)
    (name,) = one
    assert f"demo-{name}: imported" in nas("demo-data", "--db", db).err
    assert f"demo-{name}: is there already" in nas("demo-data", "--db", db).err
    assert archive._RECORDED.is_dir()


def test_help_and_an_empty_dashboard_show_the_doors(tmp_path: Path) -> None:
    text = nas("--help").out
    assert [door for door in DOORS if door not in text] == []
    lab = DashboardLab(tmp_path)
    page = lab.visitor(Role.READ).page("/studies").text
    lab.process.end()
    assert [door for door in DOORS if door not in page] == []
