"""A study of retrieval, launched: real agent, database and trainings, a fake runtime; and the real runner's vectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas
from study_lab import WITHOUT_RAY, Lab
from test_retrieval_space import RETRIEVAL, TASKS

from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.variants import Build

LAYOUT = "d64 v256 vectors=16 ffn=swiglu:64 [C3 A4/2 C3]"


@pytest.mark.exhaustive  # one to two minutes
def test_a_launch_ends_with_a_front_of_quality_latency_and_bytes(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab", program=WITHOUT_RAY)
    rungs = [{"name": "only", "tasks": TASKS}]
    few = {
        "protocol": {"screen_repetitions": 2, "confirm_repetitions": 2, "remeasure": None},
        "quality": {**RETRIEVAL["quality"], "rungs": rungs},
        "search": {"proposer": "ehvi", "seeds": 2},
    }
    changes = {key: value for key, value in {**RETRIEVAL, **few}.items() if key != "name"}
    lab.space("finder", **changes)
    report = lab.json_here(*lab.launch("first", "--trials", "3", space="finder"))
    assert report["state"] == "complete" and report["front"]
    assert [objective["metric"] for objective in report["objectives"]] == ["quality", "encoding", "index_bytes"]
    for member in report["front"]:
        width = Layout.parse(member["layout"]).vectors
        assert width in (16, 32) and member["objectives"]["index"] == 2 * 128 * width
    text = lab.run_here("study", "show", "first").out
    assert "vectors=" in text


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT.replace("vectors=16 ", "")])
def test_the_runner_encodes_texts(
    layout: str, llama_build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    done = nas("bench", layout, "--prompt", "32", "--gen", "0", "--reps", "2", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    figures = report["figures"]
    assert figures["encoding"]["value"] > 0 and figures["documents_per_s"]["value"] > 0
    assert figures["ttft"]["value"] is None and report["reps"][0]["decode_ns"] == []
    assert figures["index_bytes"]["value"] == (1024 if "vectors" in layout else None)
