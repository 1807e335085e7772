"""An adaptation that is killed at random moments ends with the same child, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.adapt import run_kills


@pytest.mark.exhaustive  # by default test_adapt_adapt.py ends runs in its own process, at random steps
def test_three_kills_give_the_same_files(tmp_path: Path) -> None:
    run_kills(tmp_path, kills=3, seed=0)
    report = json.loads((tmp_path / "kills.json").read_bytes())
    assert report["equal"]
    assert sum(run["killed"] for run in report["runs"]) == 3
    files = report["files"]
    assert "out/child.safetensors" in files and "out/files/gguf/child-F16.gguf" in files
    assert sum(name.startswith("library/blocks/") for name in files) >= 10
