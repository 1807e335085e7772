"""A recipe from text to chat that is killed at random moments ends with the same weights and files, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.post_training import parsed, run_kills


@pytest.mark.exhaustive  # by default test_posttrain_sft.py ends runs in its own process, at given steps
def test_three_kills_give_the_same_weights(tmp_path: Path) -> None:
    small = ["--train", "60", "--test", "10", "--questions", "8", "--epochs", "2", "--kills", "3"]
    report = run_kills(parsed(["kills", "--state", str(tmp_path), *small]))
    assert report["equal"] and sum(run["killed"] for run in report["runs"]) == 3
    files = report["files"]
    assert sum(name.startswith("training/") for name in files) == 4 and "gguf/chat-seed0-Q4_0.gguf" in files
