"""Twenty faults to a whole farm, each kind at least once; see `benchmarks/fault_campaign.py` for the long version."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "fault_campaign.py"
FAULTS, BEFORE_THE_KILL = 20, 4
LIMIT_S = 840.0


def start(*options: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(CAMPAIGN), *options], stdout=pipe, stderr=pipe, text=True)


def done(state: Path) -> int:
    return state.read_text().count('"kind"') if state.exists() else 0


def test_twenty_faults_make_nothing_false(tmp_path: Path) -> None:
    """Nor does the death of the campaign itself, which then goes on."""
    state = tmp_path / "campaign.jsonl"
    end = time.monotonic() + LIMIT_S
    options = ("--faults", str(FAULTS), "--seed", "1", "--machines", "2", "--longest", "6", "--state", str(state))
    with start(*options) as first:
        while first.poll() is None and done(state) < BEFORE_THE_KILL:
            assert time.monotonic() < end, state.read_text()
            time.sleep(0.2)
        first.kill()
    with start("--resume", str(state)) as second:
        out, progress = second.communicate(timeout=end - time.monotonic())
    assert second.returncode == 0, out + progress
    report = json.loads(out)
    assert report["violations"] == []
    assert sum(report["kinds"].values()) == FAULTS
    assert len(report["kinds"]) >= 18
