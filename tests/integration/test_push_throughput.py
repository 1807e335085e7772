"""The benchmark of pushing, at a size where its speeds mean nothing: every way works, and what arrives is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("devices")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "push_throughput.py"


def test_every_way_copies_and_is_compared() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--mb", "3", "--pairs", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    for way in ("ssh", "adb", "adb server"):
        (pair,) = result[way]["pairs"]
        assert all(pair[name] > 0 for name in ("ours", "theirs", "push", "ours/theirs", "push/theirs"))
    assert result["adb"]["tool"].startswith("Debian's adb 34")
