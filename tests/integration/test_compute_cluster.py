"""A study on a Ray cluster of two nodes, which share no folder, one of which is lost while it trains."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study_lab import LIMIT_S, SPACE, Lab, finish

from nas.core.layout import Layout
from nas.infra.store import outcomes, results, studies, trials
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.model.text.corpus import refer
from nas.search.compute import worker
from nas.search.proxy.job import WEIGHTS, TrainJob, weights_file
from nas.search.proxy.ladder import rung_jobs
from nas.search.spaces import load_space

QUALITY = SPACE["quality"] | {
    "rungs": [
        {"name": "first", "lm_steps": 30, "keep": 1},
        {"name": "second", "lm_steps": 60},
    ]
}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path / "lab")
    lab.space(quality=QUALITY, protocol=SPACE["protocol"] | {"remeasure": None})
    return lab


@pytest.fixture
def cluster(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head node with one CPU slot. The fake runtime tells by the environment where it is installed."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name, value in lab.environment.items():
        if name.startswith("HILNAS_FAKE"):
            monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": 100 << 20,
        # Workers that have loaded torch stay, as on our own Ray, and a node that is gone is noticed sooner.
        "_system_config": {"idle_worker_killing_time_threshold_ms": 60_000, "health_check_period_ms": 500},
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


@pytest.mark.timeout(900)  # Ray takes its time to start, the more so beside other tests
def test_a_node_is_lost_while_it_trains(
    cluster: Any, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"NAS_HOME": str(tmp_path / "there"), "NAS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20, env_vars=variables)
    with lab.start(*lab.launch("far", "--trials", "1", "--ray-address", cluster.address)) as launch:
        try:
            lost = _kill_while_it_trains(launch, cluster, node, tmp_path / "there" / "work" / "elsewhere")
            finish(launch)
        finally:
            launch.kill()
    store = lab.store()
    study = studies.get(store, "far")
    assert study.state is StudyState.COMPLETE
    rows = trials.all(store, study.id)
    assert len(rows) == 3
    assert {row.status.state.value for row in rows} <= {"complete", "stopped", "infeasible"}
    assert [attempt.stage for attempt in outcomes.attempts_of_key(store, lost)] == ["train"]
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "third"))
    _check_results(store, study.id, lost, lab.folder / "tiny.yaml", tmp_path)


def _kill_while_it_trains(launch: subprocess.Popen[str], cluster: Any, node: Any, folder: Path) -> str:
    """Kills the node in the middle of a training, once another has come home from it; returns its key."""
    trainings: set[str] = set()
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if launch.poll() is not None:
            finish(launch)  # says why it ended
        keys = {path.name for path in folder.glob("*")}
        trainings |= keys
        if keys and trainings - keys:
            # Trainings stop at their next step for whoever measures, so that this one is neither done nor between two.
            with HostLock(host_lock_folder()).exclusive(LIMIT_S):
                inside = [key for key in keys if _at_work(folder / key)]
                if inside:
                    cluster.remove_node(node, allow_graceful=False)
                    return inside[0]
        time.sleep(0.02)
    raise AssertionError("the second node did not train")


def _at_work(place: Path) -> bool:
    return place.is_dir() and not (place / place.name / WEIGHTS).exists()


def _check_results(store: Store, study: int, lost: str, path: Path, folder: Path) -> None:
    """All trainings came home, and the one that was lost has the numbers that it has on any host."""
    space = load_space(str(path))
    trained = {
        row.result_key: row.payload["value"]
        for trial in trials.all(store, study)
        for row in results.of_trial(store, study, trial.number)
        if row.stage == "train"
    }
    home = path.parent / "home"
    for value in trained.values():
        assert weights_file(home / "work" / "checkpoints", value["key"]).is_file()
    corpus = refer(space.quality.corpus, path.parent)
    jobs: list[TrainJob] = [
        job
        for row in trials.all(store, study)
        for rung in range(len(space.quality.rungs))
        for job in rung_jobs(space.quality, rung, Layout.from_json(row.layout), corpus)
    ]
    (job,) = {job.key: job for job in jobs if job.key == lost}.values()
    spec = {"jobs": [job.model_dump(mode="json")], "checkpoints": str(folder / "again"), "lock": str(folder / "lock")}
    again = worker.train(spec)["value"][lost]["value"]
    assert {name: again[name] for name in ("scores", "weights_sha256")} == {
        name: trained[lost][name] for name in ("scores", "weights_sha256")
    }
