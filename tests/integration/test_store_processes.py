"""One database, several processes: nothing is counted twice, and a killed process leaves nothing half-done."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nas.core.canonical import content_hash
from nas.core.device import Device
from nas.core.plan import Plan, PlanFile, Round, Runner
from nas.core.trial import TrialState, derive
from nas.infra.store import agents, artifacts, devices, jobs, outcomes, results, studies, trials
from nas.infra.store.rows import JobState
from nas.infra.store.store import Store
from nas.search.study.events import all_events
from tests.support.postgres import Server

WORKER = Path(__file__).with_name("store_worker.py")


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'nas.db'}"
    server: Server = request.getfixturevalue("postgres")
    return server.create("processes")


@pytest.fixture
def start(url: str, tmp_path: Path) -> Start:
    def start(what: str, worker: int, number: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, str(WORKER), url, str(tmp_path / "artifacts"), what, str(worker), str(number)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[Store]:
    """A store with a study."""
    store = Store.open(url, artifacts=tmp_path / "artifacts")
    studies.create(store, "shared", {"name": "tiny"}, seed=0, version="0")
    yield store
    store.close()


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def assert_consistent(store: Store) -> None:
    """Every trial is whole: number, events, status, result and file."""
    rows = trials.all(store, 1)
    assert [trial.number for trial in rows] == list(range(len(rows)))
    log = all_events(store, 1)
    for trial in rows:
        assert trial.status == derive(event for event in log if event.trial == trial.number)
        assert trial.status.state is TrialState.EXPORTED
        assert [result.result_key for result in results.of_trial(store, 1, trial.number)] == [trial.layout_id]
    for artifact in artifacts.all(store):
        artifacts.verify(store, artifact.sha256)
    assert len(artifacts.all(store)) == len(rows)
    if store.engine.dialect.name == "sqlite":
        with closing(sqlite3.connect(str(store.engine.url.database))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_four_writers_number_trials_without_gaps(store: Store, start: Start) -> None:
    finish([start("propose", worker, 40) for worker in range(1, 5)])
    assert_consistent(store)
    shared, private = 8, 32
    assert len(trials.all(store, 1)) == shared + 4 * private


def test_a_new_database_is_built_once_by_whoever_comes_first(url: str, start: Start) -> None:
    finish([start("propose", worker) for worker in range(4)])
    store = Store.open(url, create=False)
    assert studies.all(store) == []
    store.close()


def test_no_job_is_done_twice(store: Store, start: Start) -> None:
    agents.register_local(store, "local")
    boxes = [
        Device(id=f"dev{n}", model="m", cpu="c", target="x86_64-linux", cores=1, memory_mb=1, os="o") for n in range(2)
    ]
    devices.register(store, "local", boxes, boot_id="b")
    runner = Runner(runtime="f", build="b", target="t", files={"r": PlanFile(sha256="0" * 64, size=1)}, main="r")
    round = Round(candidate=Plan(runner=runner, inputs={}, args=(), deadline_s=1), repetitions=1)
    queued = [jobs.enqueue(store, content_hash(n), round, device=f"dev{n % 2}").id for n in range(60)]
    lines = [line.split() for output in finish([start("claim", n) for n in range(4)]) for line in output.splitlines()]
    rows = [jobs.get(store, id) for id in queued]
    assert Counter(line[0] for line in lines) == Counter(row.id for row in rows if row and row.state is JobState.DONE)
    assert max(Counter((device, epoch) for _, device, epoch in lines).values()) == 1
    for row in rows:
        assert row is not None
        # One that the processes took from each other more than once waits for its next attempt, or failed.
        assert row.state is JobState.DONE or len(outcomes.attempts_of_key(store, row.result_key)) > 1, row


def test_killed_writers_leave_a_consistent_database(store: Store, start: Start) -> None:
    for number in range(6):
        process = start("forever", number + 1, number)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            before = len(trials.all(store, 1))
            while len(trials.all(store, 1)) < before + 2 + number:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert_consistent(store)
    # At most what was being written when it was killed is left over, and is swept up once it is old.
    hashes = {artifact.sha256 for artifact in artifacts.all(store)}
    spare = [path for path in store.artifacts.glob("*/*") if path.parent.name + path.name not in hashes]
    assert len(spare) <= 6
    assert artifacts.collect(store, 1 << 30).freed_bytes == 0
