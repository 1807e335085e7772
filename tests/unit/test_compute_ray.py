"""What trainings ask a cluster for, and what they take along to a host that shares nothing with this one."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.model.text.corpus import MIN_BYTES, packed, refer
from nas.search.compute import ray, worker
from nas.search.compute.ray import (
    ClusterCompute,
    Node,
    RayCompute,
    Request,
    _connect,
    checkpoints_of,
    collect_remote_training,
    corpus_of,
    jobs_of,
    run_remote_training,
)
from nas.search.proxy.job import CHECKPOINT, STABLE, WEIGHTS, LmRun, TrainJob, weights_file

SMALL, BIG = Node(cpus=4, gpus=0), Node(cpus=8, gpus=2)


def test_trainings_share_the_gpus_that_there_are() -> None:
    assert Request.of([SMALL, SMALL], None) == Request(0.0)
    assert Request(0.0).slots([SMALL, BIG]) == 12
    even = Request.of([SMALL, BIG], None)
    assert (even, even.fits(SMALL), even.fits(BIG)) == (Request(0.25), 0, 8)
    assert Request.of([Node(cpus=2, gpus=8)], None) == Request(1.0)
    third = Request.of([Node(cpus=3, gpus=1)], None)
    assert third.fits(Node(cpus=3, gpus=1)) == 3


def test_what_is_asked_for_counts() -> None:
    assert Request.of([BIG], 0).slots([BIG, SMALL]) == 12
    assert Request.of([BIG], 0.5).slots([BIG, SMALL]) == 4
    assert Request.of([BIG], 2).slots([BIG]) == 1
    assert Request.of([BIG], 4).slots([BIG]) == 0
    for gpus in (1.5, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidInput, match="whole number"):
            Request.of([BIG], gpus)


def test_few_trainings_fill_the_cluster() -> None:
    assert Request.of_few([BIG, SMALL], 16) == Request(1.0)
    assert Request.of_few([SMALL, SMALL], 3) == Request(0.0, cpus=2)
    assert Request.of_few([SMALL, SMALL], 1) == Request(0.0, cpus=4), "of one node"
    assert Request.of_few([SMALL], 16) == Request(0.0, cpus=1)
    assert Request(0.0, cpus=3).slots([SMALL, BIG]) == 3
    assert str(Request(0.5, cpus=2)) == "2 CPU slots and 0.5 GPUs"


def test_the_launch_must_run_on_a_node() -> None:
    with pytest.raises(InvalidInput, match="must be a node"):
        ClusterCompute("ray://head:10001")


def test_a_node_that_is_late_is_the_machines_fault() -> None:
    """Ray has no class for that."""

    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    with pytest.raises(InfrastructureFailed, match=r"Ray did not start.*timed out"):
        _connect(SimpleNamespace(init=init), "local")


@pytest.mark.parametrize("late", [2, 9])
def test_a_local_ray_that_is_late_is_started_again(late: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts, ends = [], []
    (tmp_path / "session").mkdir()

    def init(**options: Any) -> SimpleNamespace:
        starts.append(os.environ["HILNAS_RAY"])
        if len(starts) <= late:
            raise Exception("The current node timed out during startup.")
        return SimpleNamespace(address_info={"session_dir": str(tmp_path / "session")})

    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}]
    fake = SimpleNamespace(init=init, shutdown=lambda: ends.append(None), nodes=lambda: nodes)
    monkeypatch.setattr(ray, "_import_ray", lambda: fake)
    if late > 4:
        with pytest.raises(InfrastructureFailed):
            RayCompute(2)
    else:
        with RayCompute(2) as compute:
            assert compute.workers == 2
        assert not (tmp_path / "session").exists()
    assert len(starts) == len(set(starts)) == len(ends) == min(late + 1, 4)


def test_a_study_does_not_fail_at_its_end_where_orphans_of_ray_are_killed_slowly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = SimpleNamespace(address_info={"session_dir": str(tmp_path / "session")})
    fake = SimpleNamespace(init=lambda **_: init, shutdown=lambda: None, nodes=list)
    monkeypatch.setattr(ray, "_import_ray", lambda: fake)
    monkeypatch.setattr(ray, "_REAPER_S", 0.0)
    with RayCompute(2) as compute:
        pass
    assert compute._reaper.wait(60) == 0


@pytest.mark.parametrize("cause", [OSError(28, "No space left on device"), InfrastructureFailed("the disk is full")])
def test_a_node_whose_disk_is_full_is_no_bug(cause: Exception) -> None:
    error = exceptions.RayTaskError("work", "its traceback", cause, proctitle="work", ip="127.0.0.1")
    future: Future[Any] = Future()
    future.set_exception(error.as_instanceof_cause())
    fake = SimpleNamespace(exceptions=exceptions, cancel=lambda *_, **options: None)
    with pytest.raises(InfrastructureFailed) as failed:
        asyncio.run(ray._result(fake, SimpleNamespace(future=lambda: future)))
    assert str(failed.value) == f"a node of the cluster failed: {cause}"


def test_shared_memory_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root is not stopped by permissions
    with pytest.raises(InfrastructureFailed, match="mount a tmpfs"):
        RayCompute(2)


@pytest.mark.parametrize("problem", [MemoryError("no room"), RuntimeError("can't allocate memory: no room")])
def test_a_worker_without_memory_is_no_bug(problem: Exception, tmp_path: Path) -> None:
    @worker.under_host_lock
    def work(spec: worker.Spec, share: worker.Share) -> None:
        raise problem

    assert work({"lock": str(tmp_path)})["infrastructure"] == f"too little memory: {problem}"


class Host:
    """A machine with a home and a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.cache, self._patch = folder / "home", folder / "cache", monkeypatch

    def enter(self) -> None:
        self._patch.setenv("NAS_HOME", str(self.home))
        self._patch.setenv("NAS_CACHE", str(self.cache))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Host, Host]:
    host, peer = Host(tmp_path / "here", monkeypatch), Host(tmp_path / "there", monkeypatch)
    host.enter()
    return host, peer


def spec_of(steps: int, host: Host, folder: Path, resume_from: str | None = None) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_bytes(b"abcdefghijklmnop" * (MIN_BYTES // 16))
    job = TrainJob(
        layout=Layout.parse("d32 v256 ffn=swiglu:64 [C3 A2/1]").to_json(),
        run=LmRun(corpus=refer(["text.txt"], folder), length=16, eval_bytes=256),
        steps=steps, batch=2, lr=0.01, warmup=0, weight_decay=0, clip=1, ema=0.5, seed=0, resume_from=resume_from,
    )  # fmt: skip
    return {
        "jobs": [job.model_dump(mode="json")],
        "checkpoints": str(host.home / "work" / "checkpoints"),
        "lock": str(folder / "lock"),
    }


def value_of(outcome: dict[str, Any]) -> Any:
    """The result of the only seed."""
    (of_seed,) = outcome["value"].values()
    return of_seed["value"]


def outcome_elsewhere(spec: dict[str, Any], hosts: tuple[Host, Host]) -> dict[str, Any]:
    """The outcome of a training on the other host, not yet brought home."""
    host, peer = hosts
    corpus = corpus_of(spec)
    assert corpus is not None
    checkpoints, text = checkpoints_of(spec), packed(corpus)
    peer.enter()
    outcome = run_remote_training(spec, checkpoints, text)
    host.enter()
    return outcome


def elsewhere(spec: dict[str, Any], hosts: tuple[Host, Host]) -> dict[str, Any]:
    """A training on the other host, brought home."""
    return collect_remote_training(spec, outcome_elsewhere(spec, hosts))


def test_a_training_elsewhere_is_a_training_at_home(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    host, peer = hosts
    short = spec_of(4, host, tmp_path)
    first = jobs_of(short)[0].key
    long = spec_of(8, host, tmp_path, resume_from=first)
    (tmp_path / "text.txt").unlink()  # the other host has no such file
    outcomes = [elsewhere(short, hosts), elsewhere(long, hosts)]
    for spec, outcome in zip((short, long), outcomes, strict=True):
        weights = weights_file(Path(spec["checkpoints"]), value_of(outcome)["key"])
        assert all(weights.with_name(name).is_file() for name in (WEIGHTS, CHECKPOINT, STABLE))
        assert "files" not in outcome
    assert not list((peer.home / "work" / "elsewhere").iterdir())
    shutil.rmtree(host.home)
    at_home = [worker.train(spec) for spec in (short, long)]
    for one, other in zip(outcomes, at_home, strict=True):
        for name in ("key", "scores", "curve", "weights_sha256"):
            assert value_of(one)[name] == value_of(other)[name]


def test_the_checkpoint_travels(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    host, _ = hosts
    short = spec_of(4, host, tmp_path)
    assert checkpoints_of(short) == {}
    first = value_of(elsewhere(short, hosts))["key"]
    long = spec_of(8, host, tmp_path, resume_from=first)
    assert checkpoints_of(long).keys() == {f"{first}/{STABLE}"}


def test_a_node_removes_checkpoints_of_trainings_that_ended_elsewhere(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    folder = hosts[1].home / "work" / "elsewhere"
    for name, days in (("old", 8), ("begun again", 8), ("new", 6)):
        file = folder / name / "key" / CHECKPOINT
        file.parent.mkdir(parents=True)
        file.touch()
        for path in (file, file.parent, file.parent.parent):
            os.utime(path, (time.time() - days * 86400,) * 2)
    (folder / "begun again" / "key" / CHECKPOINT).touch()
    elsewhere(spec_of(2, hosts[0], tmp_path), hosts)
    assert {path.name for path in folder.iterdir()} == {"begun again", "new"}


def test_damaged_weights_are_not_taken(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    spec = spec_of(2, hosts[0], tmp_path)
    outcome = outcome_elsewhere(spec, hosts)
    outcome["files"][f"{jobs_of(spec)[0].key}/{WEIGHTS}"] += b"!"
    with pytest.raises(InfrastructureFailed, match="damaged"):
        collect_remote_training(spec, outcome)


def test_files_that_cannot_be_written_here_are_no_defect(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    spec = spec_of(2, hosts[0], tmp_path)
    outcome = outcome_elsewhere(spec, hosts)
    (hosts[0].home / "work").mkdir(parents=True)
    Path(spec["checkpoints"]).touch()
    with pytest.raises(InfrastructureFailed, match=r"cannot write .*checkpoints"):
        collect_remote_training(spec, outcome)


def test_what_a_mix_of_a_library_does_not_write_is_not_missed(
    hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(2, hosts[0], tmp_path)
    value = {jobs_of(spec)[0].key: {"value": {"weights_sha256": ""}}}
    monkeypatch.setattr("nas.search.compute.ray.train", lambda spec: {"value": value})
    assert elsewhere(spec, hosts) == {"value": value}


def test_a_candidate_s_failure_comes_home_as_it_is(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    spec = spec_of(30, hosts[0], tmp_path)
    spec["jobs"][0] |= {"lr": 1e30}
    (outcome,) = elsewhere(spec, hosts)["value"].values()
    assert outcome["failed"]["reason"] == "diverged"
