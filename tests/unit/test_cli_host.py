"""Commands about this machine: doctor, db, export."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from cli_runner import nas

from nas.cli import doctor
from nas.cli.doctor import Finding, worst
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.store.store import Store

SMALL = "d256 v512 ffn=swiglu:512 [C3 A4/2]"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NAS_DB", raising=False)
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "home"


def _doctor(*args: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = nas("doctor", "--json", *args)
    return done.code, {check["name"]: check for check in json.loads(done.out)["checks"]}


def test_doctor_finds_the_missing_build_and_names_its_remedy() -> None:
    code, found = _doctor()
    assert code == 1
    assert found["llama.cpp"]["status"] == "failure"
    assert "nas runtime build llama.cpp" in found["llama.cpp"]["fix"]
    assert found["home"]["status"] == found["cache"]["status"] == "ok"


def test_doctor_looks_at_executorch_and_does_not_insist_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = _doctor()
    assert found["executorch"]["status"] == "ok" and "torchao" in found["executorch"]["detail"]
    assert found["et-runner"]["status"] == "warning"
    assert found["et-runner"]["fix"] == "run `nas runtime build executorch`"
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "torchao" else version(name))
    _, found = _doctor()
    assert found["executorch"]["status"] == "warning"
    assert "torchao 0.1 instead of 0." in found["executorch"]["detail"]

    def missing(name: str) -> str:
        if name == "executorch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    _, found = _doctor()
    assert (found["executorch"]["status"], found["executorch"]["detail"]) == ("warning", "not installed: executorch")
    assert "hilnas[executorch]" in found["executorch"]["fix"]
    assert "et-runner" not in found


def test_everything_that_is_not_ok_has_a_remedy() -> None:
    _, found = _doctor()
    for check in found.values():
        assert (check["fix"] is None) == (check["status"] == "ok"), check


def test_text_has_a_line_for_every_check() -> None:
    done = nas("doctor")
    _, found = _doctor()
    assert [line.split()[1] for line in done.out.splitlines() if "fix:" not in line] == list(found)


def test_doctor_sees_a_folder_that_cannot_be_written(home: Path) -> None:
    home.write_text("a file where a folder should be")
    _, found = _doctor()
    assert found["home"]["status"] == "failure"
    assert "NAS_HOME" in found["home"]["fix"]


def test_doctor_sees_a_file_that_is_no_database(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    other.write_text("not a database at all, but long enough to be read as one " * 10)
    _, found = _doctor("--db", f"sqlite:///{other}")
    assert found["database"]["status"] == "failure"


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FREE_DISK_GB", 1e9)
    _, found = _doctor()
    assert found["disk"]["status"] == "warning"


def test_worst_status_counts() -> None:
    assert worst([]) == "ok"
    assert worst([Finding("a", "warning", ""), Finding("b", "failure", ""), Finding("c", "ok", "")]) == "failure"


def test_db_upgrade_needs_a_database_and_leaves_a_current_one_alone(home: Path) -> None:
    assert nas("db", "upgrade").code == 3
    Store.open().close()
    before = (home / "hilnas.db").read_bytes()
    done = nas("db", "upgrade", "--json")
    assert done.code == 0
    assert json.loads(done.out)["backup"] is None
    assert (home / "hilnas.db").read_bytes() == before


def test_export_writes_the_file_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    written = json.loads(nas("export", SMALL, "-o", str(path), "--json").out)
    assert path.stat().st_size == written["size"]
    assert path.read_bytes()[:4] == b"GGUF"
    assert written["layout"] == SMALL
    assert written["quantisation"] == "q4_0"


def test_export_reads_a_layout_from_stdin_and_refuses_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    assert nas("export", "-", "-o", str(path), "-q", "f16", stdin=SMALL + "\n").code == 0
    for args in (["d256 what", "-o", str(path)], [SMALL, "-o", str(path), "-r", "lama.cpp"]):
        assert nas("export", *args).code == 3


def test_export_refuses_a_whole_graph_where_there_is_none_and_weights_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "small"
    whole = nas("export", SMALL, "-o", str(path), "--whole", "512")
    assert whole.code == 3 and "files of llama.cpp can be used in apps without it" in whole.err
    sinks = nas(
        "export", "d64 v128 ffn=swiglu:64 [W2/1@8(sink=1)]", "-o", str(path), "-r", "executorch", "--whole", "64"
    )
    assert sinks.code == 3 and "no attention sinks" in sinks.err
    missing = nas("export", SMALL, "-o", str(path), "--checkpoint", str(tmp_path / "none"))
    assert missing.code == 3 and "none" in missing.err
    assert not path.exists()


def test_export_of_trained_weights_names_them(tmp_path: Path) -> None:
    from nas.testing.planted_faults import checkpoint

    layout = Layout.parse(SMALL)
    trained = checkpoint(layout, tmp_path / "weights")
    options = ("-o", str(tmp_path / "file"), "-q", "f16", "--checkpoint", str(trained.path), "--json")
    written = json.loads(nas("export", SMALL, *options).out)
    assert written["weights"] == trained.describe()


def test_published_names_are_layouts() -> None:
    from nas.cli.options import read_layout

    assert read_layout("LFM2-350M").format() == LFM2["LFM2-350M"]
