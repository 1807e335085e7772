"""A small, fixed part of the cases of `benchmarks/model_fuzz.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


def test_no_odd_configuration_or_chat_template_shows_a_traceback() -> None:
    command = [sys.executable, "-m", "benchmarks.model_fuzz", "--every", "40"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [outcome for outcome in outcomes if outcome["result"] == "fault"] == []
    assert done.returncode == 0 and len(outcomes) > 250, done.stderr
    assert {outcome["result"] for outcome in outcomes} == {"read", "refused"}
