"""What version 0.1.0 left behind opens, resumes and shows the same numbers.

`tests/data/0.1.0` was written by that version: a database with one complete study and one whose process died half-way,
an archive, the JSON and CSV that its commands printed, a family with a trained member and one whose training was
interrupted, and result keys of the packaged spaces.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from pretrain_lab import SETTINGS, run_here
from study_support import TINY, Bed, tiny_space

from nas.core.family import TRAINING, MemberTraining, read_record
from nas.core.plan import PlanFile, Runner
from nas.measure.reference import export_key, gate_key, measure_key
from nas.pretrain import member_training as pretrain
from nas.pretrain.member_training import train_member
from nas.pretrain.next_token import PretrainingRequest
from nas.proxy.corpus import CorpusRef
from nas.proxy.ladder import rung_jobs
from nas.release.options import FileOptions
from nas.runtimes import RUNTIMES
from nas.search_spaces import load_space
from nas.store.rows import StudyState
from nas.store.store import Store
from nas.study.ledger import Ledger
from nas.testing.fake_runtime import FakeRuntime

DATA = Path(__file__).resolve().parents[1] / "data" / "0.1.0"
BUILD = "26ba4b78ffedb77c8c295cca72c2a7cff1bdc7f473f338239cce667645c09b91"
"""Of the fake runner, in the recorded result keys."""


class RecordedRuntime(FakeRuntime):
    """The fake runtime under the build id of the recording."""

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        return super().runner(target, features, patched, libc).model_copy(update={"build": BUILD})


def read(name: str) -> str:
    return gzip.decompress((DATA / f"{name}.gz").read_bytes()).decode()


def approx(value: Any) -> Any:
    """`value` with every float replaced by an approximate one."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-9, abs=1e-12)
    if isinstance(value, Mapping):
        return {key: approx(each) for key, each in value.items()}
    return [approx(each) for each in value] if isinstance(value, list) else value


SINCE_0_1_0 = {"reason", "resume"}
"""Fields of studies that the JSON of 0.1.0 lacks."""


def without_new_fields(printed: Any) -> Any:
    """What a command of 0.1.0 would have printed; it called a study whose process is gone running."""
    if "studies" in printed:
        return {"studies": [without_new_fields(each) for each in printed["studies"]]}
    known = {key: value for key, value in printed.items() if key not in SINCE_0_1_0}
    return known | ({"state": "running"} if known.get("state") == "interrupted" else {})


def same(printed: str, name: str) -> None:
    """Compares what a command printed with what that of 0.1.0 did."""
    assert without_new_fields(json.loads(printed)) == approx(json.loads(read(f"expected/{name}.json")))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`$NAS_HOME` with the recorded database and families."""
    folder = tmp_path / "home"
    shutil.copytree(DATA / "artifacts", folder / "artifacts")
    sql = read("hilnas.sql").replace("/home/someone/hilnas", str(tmp_path))
    with sqlite3.connect(folder / "hilnas.db") as database:
        database.executescript(sql)
    for path in {Path(found) for found in re.findall(r'"weights":"(/[^"]+)"', sql)}:
        path.parent.mkdir(parents=True)
        path.write_text(path.parent.name)  # what the recorded trainings left: their keys
    monkeypatch.setenv("NAS_HOME", str(folder))
    RUNTIMES.add("fake", RecordedRuntime(tmp_path / "fake"))
    return folder


def run(*args: str) -> str:
    done = nas(*args)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("command", ["list", "show study", "front study", "trials study", "show half", "trials half"])
def test_commands_print_the_same_json(home: Path, command: str) -> None:
    same(run("study", *command.split(), "--json"), f"study-{command.replace(' ', '-')}")


def test_exports_are_the_same(home: Path, tmp_path: Path) -> None:
    for kind in ("json", "csv"):
        run("study", "export", "study", "--format", kind, "-o", str(tmp_path / kind))
    same((tmp_path / "json").read_text(), "study-export")
    assert (tmp_path / "csv").read_text().splitlines() == read("expected/study-export.csv").splitlines()


def test_an_archive_is_imported_with_the_same_front(home: Path, tmp_path: Path) -> None:
    (tmp_path / "archive").write_text(read("study-archive.jsonl"))
    run("study", "import", str(tmp_path / "archive"), "--name", "again")
    front = json.loads(run("study", "front", "again", "--json"))["front"]
    recorded = json.loads(read("expected/study-front-study.json"))["front"]
    assert [each["layout_id"] for each in front] == [each["layout_id"] for each in recorded]
    assert [each["objectives"] for each in front] == approx([each["objectives"] for each in recorded])


def bed(home: Path, tmp_path: Path, name: str, seed: int) -> Bed:
    """A study of the recorded database, to be run in this process."""
    store = Store.open(f"sqlite:///{home}/hilnas.db", artifacts=home / "artifacts")
    (tmp_path / "bed").mkdir(exist_ok=True)
    made = Bed(store, tmp_path / "bed", tiny_space(search=TINY["search"] | {"seed": seed}), RecordedRuntime(tmp_path))
    ledger = made.ledger
    made.ledger = lambda kind=Ledger, _=name: ledger(kind, name)  # type: ignore[method-assign]
    return made


def test_a_study_whose_process_died_is_resumed(home: Path, tmp_path: Path) -> None:
    assert bed(home, tmp_path, "half", seed=5).run(trials=8) is StudyState.COMPLETE
    found = json.loads(run("study", "trials", "half", "--json"))["trials"]
    recorded = json.loads(read("expected/half-resumed-trials.json"))["trials"]
    assert [(each["layout"], each["state"], each["rung"]) for each in found] == [
        (each["layout"], each["state"], each["rung"]) for each in recorded
    ]


def test_a_study_of_the_same_layouts_uses_the_recorded_results(home: Path, tmp_path: Path) -> None:
    again = bed(home, tmp_path, "again", seed=0)

    def never(stage: str, spec: Mapping[str, Any]) -> None:
        raise AssertionError(f"{stage} was run, although its result is stored")

    again.compute.fail = never
    assert again.run(trials=2) is StudyState.COMPLETE  # the references and heuristic layouts, which depend on nothing
    assert not again.jobs.done


def test_result_keys_are_the_recorded_ones() -> None:
    found = {}
    corpus = CorpusRef(source="default", hash="0" * 64)
    for name in ("lfm2-demo", "lfm2-mixed-demo", "lfm2-two-runtimes-demo", "lfm2"):
        space = load_space(name)
        for reference, layout in space.references.layouts().items():
            for rung in range(len(space.quality.rungs)):
                for number, job in enumerate(rung_jobs(space.quality, rung, layout, corpus)):
                    found[f"{name}/{reference}/train/{rung}/{number}"] = job.key
            for spec in space.runtimes:
                key = export_key(layout, RUNTIMES[spec.name], spec.quantisation, "random:0")
                found[f"{name}/{reference}/export/{spec.name}"] = key
                files = {"runner": PlanFile(sha256="c" * 64, size=1)}
                runner = Runner(runtime=spec.name, build="b" * 64, target="x86_64-linux", files=files, main="runner")
                for workload, sizes in space.workloads.items():
                    key = measure_key("a" * 64, runner, "box", sizes, 5, space.protocol, 1.5, False)
                    found[f"{name}/{reference}/measure/{spec.name}/{workload}"] = key
        found[f"{name}/gate"] = gate_key("a" * 64, "b" * 64)
    assert found == json.loads((DATA / "keys.json").read_text())


def test_a_family_is_shown(home: Path) -> None:
    shutil.copytree(DATA / "family" / "trained", home / "families" / "old")
    found = json.loads(run("family", "show", "old", "--json"))
    recorded = json.loads((DATA / "family" / "show.json").read_text())
    assert found["family"] == approx(recorded["family"])
    assert found["members"][0]["training"] == approx(recorded["members"][0]["training"])


def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DATA / "family" / "interrupted", home / "families" / "old")
    shutil.copytree(DATA / "family" / "corpus", tmp_path / "corpus")
    shutil.copy(DATA / "family" / "tokenizer.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrain, "run_workers", run_here)
    said: list[str] = []
    request = PretrainingRequest(
        (Path("corpus"),), SETTINGS, tokenizer=Path("tokenizer.json"), workers=1, files=FileOptions(gguf=())
    )
    made = train_member("old", "0.024M", request, said.append)
    recorded = read_record(DATA / "family" / "trained" / "0.024M" / TRAINING, MemberTraining)
    assert recorded is not None
    assert any("from step 24" in line for line in said)
    # Other processors round otherwise.
    assert made.held_out == pytest.approx(recorded.held_out, rel=1e-3)
    assert made.curve[-1] == pytest.approx(recorded.curve[-1], rel=1e-3)
    assert (made.steps, made.tokens) == (recorded.steps, recorded.tokens)
