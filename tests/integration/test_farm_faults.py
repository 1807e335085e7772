"""Faults to a whole farm; see `benchmarks/fault_campaign.py` for the long version.

Six of other kinds each by default, twenty-four that are of every kind with HILNAS_TEST_ALL. What the farm does about
lost agents, expired leases and late results is also in tests/unit/test_farm_*.py and test_store_jobs_machine.py, links
that break in test_farm_devices.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("devices")]

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "fault_campaign.py"
LIMIT_S = 840.0


def start(*options: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(CAMPAIGN), *options], stdout=pipe, stderr=pipe, text=True)


def done(state: Path) -> int:
    return state.read_text().count('"kind"') if state.exists() else 0


@pytest.mark.parametrize(
    ("database", "faults", "kinds", "before_the_kill"),
    [
        ("sqlite", 6, 6, 2),
        pytest.param("sqlite", 24, 23, 4, marks=pytest.mark.exhaustive),
        pytest.param("postgresql", 24, 23, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_faults_corrupt_nothing(tmp_path: Path, database: str, faults: int, kinds: int, before_the_kill: int) -> None:
    """Nor does a kill of the campaign itself, which is then resumed."""
    state = tmp_path / "campaign.jsonl"
    end = time.monotonic() + LIMIT_S
    options = ("--faults", str(faults), "--seed", "3", "--machines", "2", "--longest", "6", "--state", str(state))
    options += ("--database", database)
    with start(*options) as first:
        while first.poll() is None and done(state) < before_the_kill:
            assert time.monotonic() < end, state.read_text()
            time.sleep(0.2)
        first.kill()
    with start("--resume", str(state)) as second:
        out, progress = second.communicate(timeout=end - time.monotonic())
    assert second.returncode == 0, out + progress
    report = json.loads(out)
    assert report["violations"] == []
    assert sum(report["kinds"].values()) == faults
    assert len(report["kinds"]) >= kinds
