"""Twenty faults to a whole farm, each kind once; see `benchmarks/fault_campaign.py` for the long version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "fault_campaign.py"
FAULTS = 20


def campaign(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CAMPAIGN), *options], capture_output=True, text=True, timeout=540)


def test_twenty_faults_make_nothing_false(tmp_path: Path) -> None:
    state = tmp_path / "campaign.jsonl"
    options = ("--faults", str(FAULTS), "--seed", "1", "--machines", "2", "--longest", "6", "--state", str(state))
    ended = campaign(*options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["violations"] == []
    assert sum(report["kinds"].values()) == FAULTS
    assert len(report["kinds"]) >= 18
