"""Benchmarks at sizes where their times mean nothing: what they compare is comparable, and nothing gets lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nas.measure.runtimes.executorch.variants import Build
from nas.measure.runtimes.llama_cpp.variants import Build as LlamaBuild

pytestmark = pytest.mark.timeout(900)  # blocks are lowered

ROOT = Path(__file__).parents[2]
# By default processes compete for jobs on PostgreSQL in test_store_processes.py.
DATABASES = [(), pytest.param(("--postgres",), marks=[pytest.mark.needs("postgresql"), pytest.mark.exhaustive])]


def benchmark(name: str, *options: str) -> dict[str, Any]:
    argv = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_attention_kernels_agree(executorch_build: Build, llama_build: LlamaBuild) -> None:
    """Uneven chunks on one side, two threads, and a number of tokens that neither side's blocks divide."""
    result = benchmark("attention_kernel", "--tokens", "600", "--threads", "1,2", "--pairs", "1", "--steps", "2")
    for row in result["threads"]:
        assert row["difference"] < 1e-3
        assert all(ratio["median"] > 0 for ratio in row["ratio"].values())


@pytest.mark.exhaustive  # by default test_executorch_whole.py holds blocks against whole graphs, with trained weights
def test_blocks_and_whole_graph_of_random_weights_are_the_same(executorch_build: Build) -> None:
    layout = "d64 v128 ffn=swiglu:64 [A2/1+none C3+none]"
    result = benchmark("executorch_blockwise", "--layout", layout, "--prompts", "32,160", "--repetitions", "1")
    assert result["same_logits"]
    assert [row["prompt"] for row in result["prompts"]] == [32, 160]
    assert result["export"]["blocks, all known"]["cpu_s"] < result["export"]["whole"]["cpu_s"]


@pytest.mark.parametrize("database", DATABASES, ids=["sqlite", "postgresql"])
def test_no_job_is_lost_under_the_load_of_agents(database: tuple[str, ...]) -> None:
    """Agents that hold a job for longer than a heartbeat, and more of them than there are threads in the server."""
    load = ("--agents", "20", "--processes", "1", "--job-seconds", "6", "--jobs", "1", "--ramp", "1", "--seconds", "5")
    report = benchmark("farm_load", *load, *database)
    assert report["problems"] == []
    assert report["jobs"]["done"] == report["jobs"]["accepted"] == 20
    assert report["latency_ms"]["heartbeat"]["n"] > 0
    assert report["connections"] == 20
