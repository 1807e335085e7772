"""Six processes of a search are killed at random; see `benchmarks/kill_campaign.py` for the long version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from service_lab import SPACE, Lab

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "kill_campaign.py"


def test_killed_processes_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab", run_s=0.1)
    quality = SPACE["quality"] | {"corpus": [str(lab.folder / "alphabet.txt")]}
    options = {"--space": lab.space("killed", quality=quality), "--kills": 6, "--trials": 3, "--seed": 1, "--pause": 2}
    arguments = [str(part) for option in options.items() for part in option]
    ended = subprocess.run(
        [sys.executable, str(CAMPAIGN), *arguments], env=lab.environment, capture_output=True, text=True, timeout=560
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["problems"] == []
    assert sum(report["kills"].values()) == 6
    assert report["kills"]["launch"] >= 1
