"""Who may run a study: its lease, taken over from the dead and from nobody else."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from store_support import add_device, key, open_store, proposal, round_of
from study_support import DEVICE, TINY, ScriptedJobs, raw, sample, tiny_space

from nas.core.clock import SystemClock
from nas.core.errors import (
    InfrastructureFailed,
    InvalidInput,
    NasError,
    StudyBusy,
    StudyChanged,
    UnknownName,
    Unsupported,
)
from nas.core.plan import Pair, RoundResult
from nas.core.trial import Event, EventKind
from nas.infra.store import agents, devices, jobs, leases, studies, trials
from nas.infra.store.rows import JobState, Study, StudyLease, StudyState
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, LocalAgent
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from nas.measure.farm.trust import Admissions, SigningKey
from nas.measure.protocol.reference import CALIBRATION_RUNS, CHECK_RUNS
from nas.measure.runtimes import RUNTIMES
from nas.model.text.corpus import CorpusRef
from nas.search.analysis.archive import export_study, import_study
from nas.search.proxy.job import TRAINER_VERSION
from nas.search.study import launch as launch_module
from nas.search.study import ledger as ledger_module
from nas.search.study import opened as opened_module
from nas.search.study.check import installed, support_filter
from nas.search.study.events import CorpusUsed, all_events, notes
from nas.search.study.launch import launch
from nas.search.study.ledger import Ledger
from nas.search.study.opened import LaunchOptions, OpenedStudy, take_lease
from nas.testing.fake_runtime import FakeRuntime
from tests.support.waiting import until


@pytest.fixture
def store(tmp_path: Path) -> Store:
    RUNTIMES.add("fake", FakeRuntime(tmp_path / "fake"))
    return open_store(tmp_path, SystemClock())  # type: ignore[arg-type]


@pytest.fixture
def study(store: Store) -> Study:
    return studies.create(store, "study", tiny_space().model_dump(mode="json"), seed=0, version="0")


def lease(store: Store, study: Study) -> StudyLease:
    return take_lease(store, study, lambda line: None)


def dead_holder() -> str:
    """The holder name of a process that has died."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        holder = leases.new_holder(process.pid)
        process.kill()
    return holder


def hold(store: Store, study: Study, holder: str) -> StudyLease:
    return leases.acquire(store, study.id, holder)


def test_a_study_is_taken_over_from_a_process_that_died(store: Store, study: Study) -> None:
    old = hold(store, study, dead_holder())
    new = lease(store, study)
    assert new.epoch == old.epoch + 1
    with pytest.raises(StudyBusy):
        leases.renew(store, old)


def test_a_zombie_is_dead(store: Store, study: Study) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        hold(store, study, leases.new_holder(process.pid))
        lease(store, study)


def test_a_live_study_is_left_alone(store: Store, study: Study) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        old = hold(store, study, leases.new_holder(process.pid))
        with pytest.raises(StudyBusy, match="run by"):
            lease(store, study)
        leases.renew(store, old)
        process.kill()


def test_another_process_with_the_number_of_a_dead_holder_does_not_hold_the_study(store: Store, study: Study) -> None:
    name, started = leases.new_holder().rsplit("-", 2)[:2]
    hold(store, study, f"{name}-{int(started) + 1}-abcd")
    lease(store, study)


@pytest.mark.parametrize("elsewhere", ["machine", "container"])
def test_of_processes_elsewhere_nothing_is_known(
    store: Store, study: Study, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines may have the same host name, two containers the same kernel, and each has a process 1."""
    holder = dead_holder()
    if elsewhere == "machine":
        read = Path.read_text
        monkeypatch.setattr(
            Path, "read_text", lambda path, **how: "other" if path.name == "boot_id" else read(path, **how)
        )
    else:
        monkeypatch.setattr(Path, "readlink", lambda path: Path("pid:[4026532000]"))
    hold(store, study, holder)
    with pytest.raises(StudyBusy, match=f"run by {holder}"):
        lease(store, study)


def test_of_a_holder_that_an_older_version_named_nothing_is_known(store: Store, study: Study) -> None:
    hold(store, study, f"{socket.gethostname()}:{dead_holder().split(':')[1]}:0123abcd")
    with pytest.raises(StudyBusy):
        lease(store, study)


def test_a_live_study_that_is_paused_is_told_to_go_on(store: Store, study: Study) -> None:
    hold(store, study, "elsewhere:1:abcd")
    studies.set_desired_state(store, study.id, "pause")
    with pytest.raises(StudyBusy, match="it was paused, and now continues"):
        lease(store, study)
    assert studies.get(store, study.id).desired_state == "run"


def test_a_live_study_is_not_told_to_run_where_it_was_told_to_stop(store: Store, study: Study) -> None:
    hold(store, study, "elsewhere:1:abcd")
    studies.set_desired_state(store, study.id, "stop")
    with pytest.raises(StudyBusy):
        lease(store, study)
    assert studies.get(store, study.id).desired_state == "stop"


def test_what_a_dead_process_left_queued_is_taken_back(store: Store, study: Study) -> None:
    add_device(store)
    trials.propose(store, study.id, [proposal(64)])
    trial_job = jobs.enqueue(store, key("ours"), round_of(), device="box", trial=(study.id, 0))
    calibration = jobs.enqueue(store, key("calibration"), round_of(), device="box", trial=(study.id, None))
    others = jobs.enqueue(store, key("others"), round_of(), device="box")
    lease(store, study)
    states = {row.id: job.state for row in (trial_job, calibration, others) if (job := jobs.get(store, row.id))}
    assert states == {trial_job.id: JobState.CANCELLED, calibration.id: JobState.CANCELLED, others.id: JobState.QUEUED}


def ledger(store: Store, study: Study) -> Ledger:
    return Ledger(store, study, lease(store, study), lambda trial, what, payload: None)


@pytest.mark.parametrize("trust", [True, False])
def test_an_imported_study_builds_on_its_results_if_they_are_trusted(
    store: Store, study: Study, tmp_path: Path, trust: bool
) -> None:
    trials.propose(store, study.id, [proposal(64)])
    outcome = {"failed": {"reason": "crash", "message": "signal 11"}}
    ledger(store, study).put(key("measured"), "measure", outcome, 0)
    with (tmp_path / "study.jsonl.gz").open("w+b") as file:
        export_study(store, study.id, file)
        file.seek(0)
        (tmp_path / "elsewhere").mkdir()
        other = open_store(tmp_path / "elsewhere")
        other_ledger = ledger(other, import_study(other, file, trust_results=trust))
    assert other_ledger.result(key("unknown"), 0) is None
    if trust:
        assert other_ledger.result(key("measured"), 0) == outcome
    else:
        with pytest.raises(StudyChanged, match="--trust"):
            other_ledger.result(key("measured"), 0)


def test_a_study_is_kept_while_it_runs_and_free_afterwards(
    store: Store, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_RENEW_S", 0.01)
    study_ledger = ledger(store, study)
    with study_ledger.keep():
        current = leases.current(store, study.id)
        assert current is not None
        until(lambda: (now := leases.current(store, study.id)) is not None and now.expires > current.expires)
        study_ledger.require_lease()
    free = leases.current(store, study.id)
    assert free is not None
    assert free.expires <= time.time()


def test_a_study_that_was_taken_is_noticed(store: Store, study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_RENEW_S", 0.01)
    study_ledger = ledger(store, study)
    with study_ledger.keep():
        current = leases.current(store, study.id)
        assert current is not None
        with store.write():  # between the two, the first lease would be renewed
            leases.release(store, current)
            other_lease = leases.acquire(store, study.id, "elsewhere:1:abcd")

        def lost() -> bool:
            try:
                study_ledger.require_lease()
            except StudyBusy:
                return True
            return False

        until(lost)
        with pytest.raises(StudyBusy):
            study_ledger.set_state(StudyState.RUNNING)
    leases.renew(store, other_lease)


def test_a_database_in_trouble_does_not_lose_the_study(
    store: Store, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_RENEW_S", 0.01)
    events: list[str] = []
    study_ledger = Ledger(store, study, lease(store, study), lambda trial, what, payload: events.append(what))
    calls = []
    renew = leases.renew

    def full(*args: Any) -> StudyLease:
        calls.append(args)
        if len(calls) < 3:
            raise InfrastructureFailed("database or disk is full")
        return renew(*args)

    monkeypatch.setattr(leases, "renew", full)
    with study_ledger.keep():
        until(lambda: len(calls) > 3)
        study_ledger.require_lease()
    assert events == ["lease not renewed"] * 2


def options(**changes: Any) -> LaunchOptions:
    values: dict[str, Any] = {"space": tiny_space(), "study": "study", "trials": None, "base": Path()}
    return LaunchOptions(**values | changes)


def opened(tmp_path: Path, **changes: Any) -> OpenedStudy:
    """Opens the study, of a small corpus, which another launch may open again."""
    (tmp_path / "text.txt").write_text("some text. " * 10_000)
    space = tiny_space(quality=TINY["quality"] | {"corpus": ["text.txt"]})
    chosen = options(space=space, db=f"sqlite:///{tmp_path / 'nas.db'}", base=tmp_path, **changes)
    with OpenedStudy.open(chosen, lambda trial, what, payload: None, lambda line: None) as study:
        return study


@pytest.mark.usefixtures("cached")
def test_a_resumed_study_goes_on_as_it_was_begun(store: Store, tmp_path: Path) -> None:
    assert opened(tmp_path, trials=7).trials == 7
    for count, expected in ((None, 7), (9, 9), (None, 9)):
        assert opened(tmp_path, resume=True, trials=count).trials == expected


@pytest.mark.usefixtures("cached")
def test_a_resumed_study_keeps_what_it_learnt_from(store: Store, tmp_path: Path) -> None:
    for name in ("first", "other"):
        studies.create(store, name, tiny_space().model_dump(mode="json"), seed=0, version="0")
    assert opened(tmp_path, warm_start=("first",)).warm_start == ("first",)
    assert opened(tmp_path, resume=True).warm_start == ("first",)
    with pytest.raises(InvalidInput, match="began with first"):
        opened(tmp_path, resume=True, warm_start=("other",))
    assert studies.get(store, "study").state is StudyState.NEW


@pytest.mark.usefixtures("cached", "store")
def test_a_new_study_takes_the_space_s_number_of_trials(tmp_path: Path) -> None:
    assert opened(tmp_path).trials == tiny_space().search.trials


def launched(tmp_path: Path, text: str = "some text. ", **changes: Any) -> StudyState:
    db = f"sqlite:///{tmp_path / 'nas.db'}"
    (tmp_path / "text.txt").write_text(text * 10_000)
    quality = TINY["quality"] | {"corpus": ["text.txt"]}
    space = tiny_space(**{"quality": quality} | changes.pop("space", {}))
    chosen = options(space=space, db=db, base=tmp_path, **changes)
    return launch(chosen, lambda trial, what, payload: None, lambda line: None)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NAS_HOME", str(tmp_path))


@pytest.mark.usefixtures("cached")
def test_a_changed_space_is_refused_with_the_difference(store: Store, study: Study, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"quality\.corpus.*text\.txt"):
        launched(tmp_path, resume=True)
    assert studies.get(store, "study").state is StudyState.NEW


@pytest.mark.usefixtures("cached")
def test_a_study_that_is_not_there_cannot_be_resumed(store: Store, study: Study, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'study'"):
        launched(tmp_path, resume=True, study="studdy")


@pytest.mark.usefixtures("cached", "store")
def test_a_refused_launch_leaves_no_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_RENEW_S", 0.01)
    with pytest.raises(UnknownName, match="unknown device 'phone'"):
        launched(tmp_path, space={"devices": ["phone"]})
    assert studies.all(open_store(tmp_path, SystemClock())) == []  # type: ignore[arg-type]


@pytest.mark.usefixtures("cached")
def test_a_refused_resumption_says_why_and_keeps_the_study(store: Store, tmp_path: Path) -> None:
    quality = TINY["quality"] | {"corpus": ["text.txt"]}
    space = tiny_space(quality=quality, devices=["phone"])
    study = studies.create(store, "study", space.model_dump(mode="json"), seed=0, version="0")
    with pytest.raises(UnknownName, match="unknown device 'phone'"):
        launched(tmp_path, space={"devices": ["phone"]}, resume=True)
    assert studies.get(store, "study").state is StudyState.FAILED
    last = all_events(store, study.id)[-1]
    payload = {"state": "failed", "reason": "unknown device 'phone'; valid: local"}
    assert last == Event(EventKind.STUDY, payload, None, study.id, last.id, last.at)
    lease(store, study)


def interrupted(tmp_path: Path, **changes: Any) -> NasError:
    """Launches a study whose devices cannot be reached, which shows after a resumed study's inputs are compared."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch_module, "open_farm", unreachable)
        with pytest.raises((StudyChanged, InfrastructureFailed)) as caught:
            launched(tmp_path, **changes)
    return cast(NasError, caught.value)


def unreachable(store: Store) -> NoReturn:
    raise InfrastructureFailed("no agent")


@pytest.mark.usefixtures("cached", "store")
def test_a_changed_corpus_is_refused_unless_the_old_one_is_cached(tmp_path: Path) -> None:
    assert isinstance(interrupted(tmp_path), InfrastructureFailed)
    after = open_store(tmp_path, SystemClock())  # type: ignore[arg-type]
    study = studies.get(after, "study").id
    assert isinstance(interrupted(tmp_path, resume=True, text="other text. "), InfrastructureFailed)
    assert len({used.hash for used in notes(all_events(after, study), CorpusUsed)}) == 1
    before = len(all_events(after, study))
    shutil.rmtree(tmp_path / "cache")
    refused = interrupted(tmp_path, resume=True, text="other text. ")
    assert isinstance(refused, StudyChanged)
    assert re.match(r"corpus: the study began with corpus [0-9a-f]{12}, which is [0-9a-f]{12} now", str(refused))
    assert len(all_events(after, study)) == before


@pytest.mark.usefixtures("cached", "store")
def test_another_version_of_the_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path)
    monkeypatch.setattr(opened_module, "TRAINER_VERSION", TRAINER_VERSION + 1)
    assert isinstance(interrupted(tmp_path, resume=True), StudyChanged)


def test_a_resumed_study_runs_nothing_where_a_device_has_changed(
    store: Store, study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.register_local(store, "local")
    devices.register(store, "local", [DEVICE], boot_id="boot")
    admissions = Admissions(tmp_path, SigningKey.generate(), store.clock)
    monitor = LeaseMonitor(store, JobNotifier(), agent="local-box")
    farm = Farm(store, cast(LocalAgent, None), monitor, admissions)
    calm = [Pair(reference=None, candidate=raw(sample()))] * CALIBRATION_RUNS
    scripted = ScriptedJobs([RoundResult(pairs=calm[:CHECK_RUNS]), RoundResult(pairs=calm[CHECK_RUNS:])])
    monkeypatch.setattr(Farm, "jobs", lambda self, of: scripted)
    chosen = options(space=tiny_space(devices=["box"]))

    def prepare() -> None:
        with (study_ledger := ledger(store, study)).keep(), opened_module._failure_shown(study_ledger):
            prepared = OpenedStudy(chosen, study_ledger, CorpusRef(source="default", hash="0" * 64))
            asyncio.run(prepared.targets(farm, tmp_path / "work", lambda line: None))

    prepare()
    prepare()
    assert len(scripted.calls) == 2
    studies.set_state(store, study.id, StudyState.COMPLETE)
    devices.register(store, "local", [DEVICE.model_copy(update={"energy_counter": "RAPL"})], boot_id="boot")
    with pytest.raises(StudyChanged, match="began with energy counter none, which is RAPL now"):
        prepare()
    assert len(scripted.calls) == 2
    assert studies.get(store, study.id).state is StudyState.COMPLETE


ENERGY = {"metric": "energy_mj_per_token", "workload": "chat"}


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    "part",
    [
        {"objectives": [*TINY["objectives"], {"name": "energy", **ENERGY}]},
        {"budgets": [{**ENERGY, "max": "80mJ"}]},
    ],
)
def test_energy_is_not_asked_of_a_device_without_a_counter(part: dict[str, Any], store: Store, tmp_path: Path) -> None:
    """Before anything is measured: no job was ever queued."""
    add_device(store, "box")
    with pytest.raises(InvalidInput, match="energy_mj_per_token on box: box has no energy counter"):
        launched(tmp_path, space={"devices": ["box"], **part})
    assert jobs.live(open_store(tmp_path, SystemClock())) == []  # type: ignore[arg-type]


def test_a_space_whose_references_no_runtime_carries_is_refused(tmp_path: Path) -> None:
    RUNTIMES.add("fake", FakeRuntime(tmp_path, refused=frozenset({"conv"})))
    with pytest.raises(Unsupported, match=r"references: the published reference does not run on fake: conv blocks"):
        support_filter(tiny_space())
    RUNTIMES.add("fake", FakeRuntime(tmp_path, refused=frozenset({"swa"})))
    assert not list(installed(None)({"runtimes": TINY["runtimes"], "references": {"further": 3}}, None))
    further = {**TINY["references"], "further": {"windows": "d128 v256 ffn=swiglu:320 [C3 W2/1@8 C3]"}}
    problems = list(installed(None)({"runtimes": TINY["runtimes"], "references": further}, None))
    assert problems == [
        (
            ("references", "further", "windows"),
            "the windows reference does not run on fake: swa blocks are not carried by fake",
        )
    ]
