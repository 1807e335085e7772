"""What version 0.1.0 left behind opens, resumes and shows the same numbers.

`tests/data/0.1.0` was written by that version: a database with one complete study and one whose process died half-way,
an archive, the JSON and CSV that its commands printed, a family with a trained member and one whose training was
interrupted, and result keys of the packaged spaces.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import sqlite3
from collections.abc import Collection, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from pretrain_lab import SETTINGS, run_here
from study_support import TINY, Bed, tiny_space

from nas.core.errors import InvalidInput
from nas.core.family import TRAINING, MemberTraining, read_record
from nas.core.measurement import ReferenceTimes
from nas.core.plan import PlanFile, Runner
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.reference import export_key, gate_key, measure_key
from nas.measure.runtimes import RUNTIMES
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.ladder import rung_jobs
from nas.search.spaces import load_space
from nas.search.study.launch import LaunchOptions, launch
from nas.search.study.ledger import Ledger
from nas.testing.fake_runtime import FakeRuntime
from nas.train.pretrain import member_training as pretrain
from nas.train.pretrain.member_training import train_member
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.release.options import FileOptions

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


def as_recorded(found: Any, recorded: Any) -> Any:
    """`found` without the keys that 0.1.0 did not print; it called a study whose process is gone running."""
    if (found, recorded) == ("interrupted", "running"):
        return recorded
    if isinstance(found, dict) and isinstance(recorded, dict):
        return {key: as_recorded(each, recorded[key]) for key, each in found.items() if key in recorded}
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        return [as_recorded(each, before) for each, before in zip(found, recorded, strict=True)]
    return found


def without(recorded: Any, *names: str) -> Any:
    """`recorded` without keys that are not printed any more, or otherwise."""
    if isinstance(recorded, dict):
        interval = ("low", "high") if "hypervolume" in recorded else ()  # that of a hypervolume is another estimate now
        return {key: without(each, *names) for key, each in recorded.items() if key not in (*names, *interval)}
    return [without(each, *names) for each in recorded] if isinstance(recorded, list) else recorded


def same(printed: str, name: str) -> None:
    """Compares what a command printed with what that of 0.1.0 did; it may print more."""
    recorded = json.loads(read(f"expected/{name}.json"))
    recorded = without(recorded, "decided_by_median", "proxy_id")  # proxies are narrowed otherwise now
    assert as_recorded(json.loads(printed), recorded) == approx(recorded)


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
    texts = (tmp_path / "csv").read_text(), read("expected/study-export.csv")
    rows, recorded = (list(csv.DictReader(StringIO(text))) for text in texts)
    assert [{name: row[name] for name in recorded[0]} for row in rows] == recorded  # columns may be added


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


def launched(
    home: Path, tmp_path: Path, name: str, seed: int, trials: int | None = None
) -> tuple[StudyState, list[str]]:
    """`nas launch --resume` of a study of the recorded database, without Ray."""
    said: list[str] = []
    options = LaunchOptions(
        space=tiny_space(search=TINY["search"] | {"seed": seed}), study=name, trials=trials, base=tmp_path, resume=True,
        db=f"sqlite:///{home}/hilnas.db",
    )  # fmt: skip
    return launch(options, lambda snapshot: None, lambda trial, what, payload: None, said.append), said


def test_an_unfinished_study_of_the_first_protocol_is_refused_and_a_finished_one_has_nothing_to_do(
    home: Path, tmp_path: Path
) -> None:
    refusal = r"--resume: study '{}' began under version 1 of the measurement protocol.*--warm-start {}"
    with pytest.raises(InvalidInput, match=refusal.format("half", "half")):
        launched(home, tmp_path, "half", seed=5)
    assert launched(home, tmp_path, "study", seed=0) == (StudyState.COMPLETE, ["study is complete"])
    with pytest.raises(InvalidInput, match=refusal.format("study", "study")):
        launched(home, tmp_path, "study", seed=0, trials=1000)


def test_a_study_of_the_same_layouts_measures_and_trains_anew_and_uses_all_other_recorded_results(
    home: Path, tmp_path: Path
) -> None:
    again = bed(home, tmp_path, "again", seed=0)

    def never(stage: str, spec: Mapping[str, Any]) -> None:
        of_new_weights = stage in {"train", "check_equivalence"} or "path" in spec["weights"]
        assert of_new_weights, f"{stage} was run, although its result is stored"

    again.compute.fail = never
    assert again.run(trials=2) is StudyState.COMPLETE  # the references and heuristic layouts, which depend on nothing
    assert again.jobs.done


def test_result_keys_are_the_recorded_ones_but_of_measurements_trainings_and_gates() -> None:
    found, changed = {}, {}
    corpus = CorpusRef(source="default", hash="0" * 64)
    for name in ("lfm2-demo", "lfm2-mixed-demo", "lfm2-two-runtimes-demo", "lfm2"):
        space = load_space(name)
        for reference, layout in space.references.layouts().items():
            for rung in range(len(space.quality.rungs)):
                for number, job in enumerate(rung_jobs(space.quality, rung, layout, corpus)):
                    changed[f"{name}/{reference}/train/{rung}/{number}"] = job.key
            for spec in space.runtimes:
                key = export_key(layout, RUNTIMES[spec.name], spec.quantisation, "random:0")
                found[f"{name}/{reference}/export/{spec.name}"] = key
                files = {"runner": PlanFile(sha256="c" * 64, size=1)}
                runner = Runner(runtime=spec.name, build="b" * 64, target="x86_64-linux", files=files, main="runner")
                times = ReferenceTimes(ttft_ms=1.5, decode_ms=0.1, run_ms=3.0)
                for workload, sizes in space.workloads.items():
                    key = measure_key("a" * 64, runner, "box", sizes, 5, space.protocol, times)
                    changed[f"{name}/{reference}/measure/{spec.name}/{workload}"] = key
        changed[f"{name}/gate"] = gate_key("a" * 64, "b" * 64)
    recorded = json.loads((DATA / "keys.json").read_text())
    assert found == {name: key for name, key in recorded.items() if "/export/" in name}
    assert changed and not set(changed.values()) & set(recorded.values()), (
        "they are of another protocol, trainer or gate"
    )


def test_a_family_is_shown(home: Path) -> None:
    shutil.copytree(DATA / "family" / "trained", home / "families" / "old")
    found = json.loads(run("family", "show", "old", "--json"))
    recorded = json.loads((DATA / "family" / "show.json").read_text())
    assert found["family"] == approx(recorded["family"])
    assert found["members"][0]["training"] == approx(recorded["members"][0]["training"])


def test_an_interrupted_training_of_the_first_trainer_begins_anew(
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
    assert any("from step 0" in line for line in said), "start values have changed since"
    assert (made.steps, made.tokens) == (recorded.steps, recorded.tokens)
