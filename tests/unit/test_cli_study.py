"""`nas study`, on a real database."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from cli_runner import nas

from nas.cli.study_view import report_fields
from nas.core.layout import Layout
from nas.core.trial import EventKind
from nas.infra.store import leases, studies, trials
from nas.infra.store.rows import NewTrial
from nas.infra.store.store import Store
from nas.search.proposers.ehvi import EhviSearch
from nas.search.spaces import load_space
from nas.serve.api.submissions import Submission, SubmissionFolder

LAYOUTS = ("d512 v8192 ffn=swiglu:1536 [C3*5 A8/4]", "d512 v8192 ffn=swiglu:1536 [C3*4 A8/4*2]")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, home: Path) -> Iterator[Store]:
    """The default database, with a study `first` of two trials, one of them failed."""
    store = Store.open()
    space = load_space("lfm2-demo").model_dump(mode="json")
    study = studies.create(store, "first", space, seed=0, version="0")
    layouts = [Layout.parse(text) for text in LAYOUTS]
    record = {"engine": EhviSearch.engine}
    trials.propose(store, study.id, [NewTrial(layout.to_json(), layout.id, record=record) for layout in layouts])
    trials.add_event(store, study.id, 1, EventKind.FAILED, {"reason": "crash"})
    yield store
    store.close()


def test_list() -> None:
    (row,) = json.loads(nas("study", "list", "--json").out)["studies"]
    assert (row["study"], row["space"], row["trials"], row["state"]) == ("first", "lfm2-demo", 2, "new")
    assert nas("study", "list").out.splitlines() == [
        "study\tspace\tstate\ttrials\treason",
        "first\tlfm2-demo\tnew\t2\t",
    ]


def test_the_list_is_filtered() -> None:
    assert len(nas("study", "list", "--text", "FIR", "--space", "lfm2-demo", "--state", "new").out.splitlines()) == 2
    for options in (("--text", "x"), ("--space", "lfm2"), ("--state", "failed")):
        assert nas("study", "list", *options).out.splitlines() == ["study\tspace\tstate\ttrials\treason"]


def test_trials_and_their_states() -> None:
    rows = json.loads(nas("study", "trials", "first", "--json").out)["trials"]
    assert [row["layout"] for row in rows] == list(LAYOUTS)
    assert [row["state"] for row in rows] == ["proposed", "failed"]
    assert all(row["params_total"] and row["quality"] is None for row in rows), "with figures, as from a coordinator"
    (failed,) = json.loads(nas("study", "trials", "first", "--state", "failed", "--json").out)["trials"]
    assert (failed["trial"], failed["reason"]) == (1, "crash")
    assert len(nas("study", "trials", "first").out.splitlines()) == 3


def test_effects_and_why_there_are_no_slices() -> None:
    outcome = nas("study", "effects", "first")
    assert outcome.out.splitlines() == [
        "knob\ttried\tquality\tlatency [%]\tmemory [%]",
        "conv layers\t4 to 5\tnot known\tnot known\tnot known",
        "gqa layers\t1 to 2\tnot known\tnot known\tnot known",
    ]
    assert "no slices: they need a front" in outcome.err
    assert json.loads(nas("study", "effects", "first", "--json").out)["slices"] == []


def test_mirror_for_optuna(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    assert "first: 1 trial copied" in nas("study", "mirror", "first", "--optuna", url).err
    assert "other: 1 trial copied" in nas("study", "mirror", "first", "--optuna", url, "--name", "other").err
    (trial,) = optuna.load_study(study_name="first", storage=url).trials
    assert (trial.state.name, trial.user_attrs["reason"]) == ("FAIL", "crash")
    refused = nas("study", "mirror", "first", "--optuna", "sqlite://")
    assert refused.code == 3 and "must be a file" in refused.err


def test_show_and_front_of_a_study_that_has_just_begun(tmp_path: Path) -> None:
    report = json.loads(nas("study", "show", "first", "--json").out)
    assert (report["study"], report["hypervolume"], report["front"]) == ("first", None, [])
    assert dict(report_fields(report))["hypervolume"] == "not known until the references are measured"
    assert dict(report_fields(report | {"hypervolume": 0.0}))["hypervolume"] == "none: no trial is on the front"
    assert report["trials"]["failed"] == 1
    assert "until the references are measured" in nas("study", "show", "first").out
    done = nas("study", "front", "first", "--picture", str(tmp_path / "pictures"))
    assert done.out.splitlines()[0].startswith("trial\tquality\tlatency [ms]\tmemory [MB]")
    assert (tmp_path / "pictures" / "front.svg").exists()


def test_unknown_study_offers_the_nearest() -> None:
    for command in ("show", "front", "trials", "pause"):
        done = nas("study", command, "frist")
        assert done.code == 3
        assert "'first'" in done.err


def test_pause_and_stop_set_the_desired_state(store: Store) -> None:
    for command in ("pause", "stop"):
        assert nas("study", command, "first").code == 0
        assert studies.get(store, "first").desired_state == command


def test_delete_asks_first(store: Store) -> None:
    assert nas("study", "delete", "first", stdin="n\n").code == 1
    assert studies.get(store, "first")
    assert nas("study", "delete", "first", "--yes").code == 0
    assert studies.all(store) == []


def test_a_deleted_study_is_no_submission_any_more(home: Path) -> None:
    folder = SubmissionFolder(home / "studies" / "first")
    submission = Submission(study="first", space="lfm2-demo", space_sha256="0", submitted_by="laptop", submitted=1.0)
    folder.create(submission, "name: lfm2-demo")
    assert nas("study", "delete", "first", "--yes").code == 0
    assert folder.read() is None
    folder.create(submission, "name: lfm2-demo")
    lock = folder.lock()
    assert lock is not None
    with lock:  # as of the process of a study of another database
        folder.forget()
    assert folder.read() == submission


def test_export_and_import_give_the_same_trials(tmp_path: Path) -> None:
    path = tmp_path / "first.jsonl"
    assert nas("study", "export", "first", "-o", str(path)).code == 0
    assert list(tmp_path.glob(".*partial")) == []
    assert nas("study", "import", str(path), "--name", "second").code == 0
    first, second = (json.loads(nas("study", "trials", name, "--json").out)["trials"] for name in ("first", "second"))
    for row in (*first, *second):
        del row["updated"]
    assert first == second


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    for args in (
        ("export", "first", "-o", str(tmp_path / "x.csv"), "--form-factor", "Phone"),
        ("hardware", "first", "--results", str(tmp_path / "x.parquet"), "--from", "second"),
    ):
        done = nas("study", *args)
        assert done.code == 3 and f"{args[-2]}: " in done.err
    assert list(tmp_path.glob("x.*")) == []


def test_export_as_a_report_and_as_a_table(tmp_path: Path) -> None:
    report, table = tmp_path / "first.json", tmp_path / "first.csv"
    assert nas("study", "export", "first", "-o", str(report), "--format", "json").code == 0
    assert json.loads(report.read_text()) == json.loads(nas("study", "show", "first", "--json").out)
    assert nas("study", "export", "first", "-o", str(table), "-f", "csv").code == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["trial"], row["state"], row["layout"]) for row in rows] == [
        ("0", "proposed", LAYOUTS[0]),
        ("1", "failed", LAYOUTS[1]),
    ]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("t.csv", b"trial,"), ("t.PARQUET", b"PAR1"), ("t.json", b"{"), ("t.jsonl.gz", b"\x1f\x8b"), ("t", b"\x1f\x8b")],
)
def test_the_ending_of_an_exported_file_says_its_format(tmp_path: Path, name: str, begins: bytes) -> None:
    assert nas("study", "export", "first", "-o", str(tmp_path / name)).code == 0
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_replay_names_the_proposals_that_differ() -> None:
    done = nas("study", "replay", "first", "--json")
    assert done.code == 1
    replay = json.loads(done.out)
    assert replay["proposals"] == 2
    # Nobody proposed these layouts: the test wrote them.
    assert [line.split(":")[0] for line in replay["differences"]] == ["trial 0", "trial 1"]


def test_import_rejects_other_files(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"format": "something else"}\n')
    assert nas("study", "import", str(path)).code == 3
    for content, problem in (("a,b\n", "an archive of a study is what"), ('{"format": "hil', "it is not complete")):
        path.write_text(content)
        done = nas("study", "import", str(path))
        assert (done.code, f"{path}:1: " in done.err, problem in done.err) == (3, True, True), done.err
    assert nas("study", "import", str(tmp_path / "missing")).code == 3


def test_gc_keeps_within_the_limit_that_is_given(tmp_path: Path) -> None:
    file = tmp_path / "cache/quantised/key/model-Q4_0.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(1_000_001))
    done = json.loads(nas("gc", "--keep", "1MB", "--json").out)
    assert done == {
        "artifacts": 0, "agent_cache": 0, "checkpoints": 0, "programs": 0, "library": 0, "types": 1_000_001,
        "artifacts_kept": 0,
    }  # fmt: skip
    assert nas("gc", "--keep", "2x").code == 3
    assert nas("gc", "--keep", "5ms").code == 3


def test_gc_keeps_checkpoints_that_a_training_may_use(store: Store, home: Path) -> None:
    hours = {"recent": 0.5, "used": 2, "unused": 3, "oldest": 4}
    for name, age in hours.items():
        folder = home / "work/checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "last.pt").write_bytes(bytes(1_000_000))
        os.utime(folder, (0, time.time() - 3600 * age))

    def removed(keep: str) -> tuple[int, set[str]]:
        done = json.loads(nas("gc", "--keep", keep, "--json").out)
        return done["checkpoints"], {folder.name for folder in (home / "work/checkpoints").iterdir()}

    study = studies.get(store, "first")
    lease = leases.acquire(store, study.id, leases.new_holder())
    assert removed("2MB") == (0, set(hours)), "a study runs"
    leases.release(store, lease)
    assert removed("2MB") == (2_000_000, {"recent", "used"})
    assert removed("0MB") == (1_000_000, {"recent"}), "a study of another database may run"


def test_gc_passes_over_checkpoints_that_change_meanwhile(store: Store, home: Path) -> None:
    folder = home / "work/checkpoints/changing"
    folder.mkdir(parents=True)
    (folder / "renamed.pt").symlink_to("nowhere")  # listed, and not there when its size is read
    os.utime(folder, (0, time.time() - 7200))
    done = nas("gc", "--keep", "0MB", "--json")
    assert done.code == 0 and json.loads(done.out)["checkpoints"] == 0 and folder.is_dir(), done.err


def test_a_missing_database_is_an_error(tmp_path: Path) -> None:
    done = nas("study", "list", "--db", f"sqlite:///{tmp_path / 'none.db'}")
    assert done.code == 3
    assert "none.db" in done.err
