"""Processes of a search are killed at random; see `benchmarks/kill_campaign.py` for the long version.

Two in studies of one trial by default, six in studies of three with HILNAS_TEST_ALL. That a study survives a kill at
any write to its database is also in tests/unit/test_study_orchestrator.py, a killed training in test_proxy_kill.py, a
killed agent in test_farm_agent.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "kill_campaign.py"


@pytest.mark.parametrize(("kills", "trials"), [(2, 1), pytest.param(6, 3, marks=pytest.mark.exhaustive)])
def test_killed_processes_lose_nothing_and_repeat_nothing(tmp_path: Path, kills: int, trials: int) -> None:
    options = {"--kills": kills, "--trials": trials, "--seed": 2, "--pause": 2}
    arguments = [str(part) for option in options.items() for part in option]
    argv = [sys.executable, str(CAMPAIGN), "--fake", *arguments]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert sum(report["kills"].values()) == kills
    assert kills < 6 or report["kills"]["launch"] >= 1
