"""Adaptations whose library is trained by Ray's workers: the files of one process, also after kills."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from adapt_lab import LONG, adaptation

from benchmarks.adapt import hashes, tiny_lab
from nas.measure.devices.host_lock import HostLock, host_lock_folder

LIMIT_S = 400.0
PROGRAM = """
import sys
from pathlib import Path
import torch
from adapt_lab import LONG, adaptation
from nas.train.adapt.parallel import Workers
from nas.model.nn.fit import Worker

lab, folder = map(Path, sys.argv[1:3])
workers = Workers.of_cluster(sys.argv[3]) if len(sys.argv) > 3 else Workers.local(2)
worker = Worker(torch.device("cpu"), lambda line: print(line, flush=True))
adaptation(lab, folder / "out", folder / "library", worker, settings=LONG, workers=workers).run()
"""

pytestmark = pytest.mark.timeout(900)  # Ray takes its time to start, the more so beside other tests


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NAS_CACHE", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return tiny_lab(tmp_path / "lab")


@pytest.fixture
def calm(lab: Path, tmp_path: Path) -> dict[str, str]:
    """Files of an adaptation in this process."""
    adaptation(lab, tmp_path / "calm/out", tmp_path / "calm/library", settings=LONG).run()
    return hashes(tmp_path / "calm")


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def output(run: subprocess.Popen[str]) -> str:
    """What a run that ends well has printed."""
    printed, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, printed
    return printed


def lost(depth: int) -> str:
    """Pattern of the line that says that the worker of a depth is replaced."""
    return rf"^depth {depth}: a worker died.*; trying again$"


@contextmanager
def training(
    library: Path, run: subprocess.Popen[str], *, below: int | None = None, of: int | None = None
) -> Iterator[tuple[psutil.Process, int]]:
    """A process of `run`, or below another one, that trains a depth, `of` or any, and the depth; all wait meanwhile."""
    root = psutil.Process(below or run.pid)
    lock = re.compile(rf"{re.escape(str(library))}/\.\w+-(\d+)\.lock")
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert run.poll() is None, output(run)
        # Trainings stop at their next step for whoever measures.
        with HostLock(host_lock_folder()).exclusive(LIMIT_S):
            for process in root.children(recursive=True):
                with suppress(psutil.Error):
                    for file in process.open_files():
                        if (held := lock.fullmatch(file.path)) and of in (None, int(held[1])):
                            yield process, int(held[1])
                            return
        time.sleep(0.02)
    raise AssertionError("nothing was trained")


@pytest.mark.exhaustive  # minutes; by default test_compute_cluster.py loses a node of trainings
def test_a_worker_is_killed_then_the_command(lab: Path, calm: dict[str, str], tmp_path: Path) -> None:
    library = tmp_path / "run/library"
    run = start(lab, tmp_path / "run")
    try:
        with training(library, run) as (worker, depth):
            worker.kill()
            worker.wait(LIMIT_S)
        with training(library, run, of=depth) as (worker, _):
            run.kill()
            worker.wait(LIMIT_S)
        assert re.search(lost(depth), run.communicate()[0], re.MULTILINE)
        done = {path.name: path.stat().st_ino for path in library.glob("blocks/*.safetensors")}
        run = start(lab, tmp_path / "run")
        assert "trying again" not in output(run)
    finally:
        run.kill()
    assert hashes(tmp_path / "run") == calm
    assert done.items() <= {path.name: path.stat().st_ino for path in library.glob("blocks/*.safetensors")}.items()


@pytest.mark.exhaustive  # minutes; by default test_compute_cluster.py loses a node of trainings
def test_a_node_of_a_cluster_is_lost(lab: Path, calm: dict[str, str], tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        run = start(lab, tmp_path / "run", cluster.address)
        (raylet,) = node.all_processes["raylet"]
        try:
            with training(tmp_path / "run/library", run, below=raylet.process.pid) as (_, depth):
                cluster.remove_node(node, allow_graceful=False)
            assert re.search(lost(depth), output(run), re.MULTILINE)
        finally:
            run.kill()
    finally:
        cluster.shutdown()
    assert hashes(tmp_path / "run") == calm
