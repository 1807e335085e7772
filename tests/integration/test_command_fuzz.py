"""A small, fixed part of the cases of `benchmarks/command_fuzz.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


def test_no_hostile_argument_file_or_environment_shows_a_traceback() -> None:
    command = [sys.executable, "-m", "benchmarks.command_fuzz", "--every", "60"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [outcome for outcome in outcomes if outcome["fault"]] == []
    assert done.returncode == 0 and len(outcomes) > 60
    assert {outcome["code"] for outcome in outcomes} >= {0, 2, 3}
