"""Runs the fuzz tests of archives, of the API and of the pages for much longer than CI does.

    python benchmarks/fuzz.py --results benchmarks/recorded/fuzz.json --seconds 500 [--seeds 20]

The tests make files and requests with Hypothesis and assert that none is answered 5xx, that imports are refused with
the line or shown on every page, and that answers are as documented. Each unit is one test file with one seed. Finished
units are kept in the results and skipped, so that the command can be repeated until all are done. Prints the totals;
exit code 1 if a unit failed, whose output goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """What is fuzzed.

    Args:
        tests: file or test, below the root of the repository.
        examples: of each test and seed; fewer where a test has no more that differ.
    """

    tests: str
    examples: int


PARTS = {
    "archives": Part("tests/unit/test_analysis_archive.py::test_any_file_is_refused_or_shown_on_every_page", 125),
    "API": Part("tests/unit/test_api_fuzz.py", 20),
    "pages": Part("tests/unit/test_dashboard_fuzz.py", 20),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON file of finished units")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no unit after this time")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; repeatable")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    done: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for seed in range(options.seeds):
        for name in options.part or PARTS:
            unit = f"{name}, seed {seed}"
            if unit in done or time.monotonic() > until:
                continue
            done[unit] = _run(PARTS[name], seed)
            options.results.write_text(json.dumps(done, indent=1) + "\n")
    totals = {
        name: {
            "examples": sum(unit["examples"] for unit in found),
            "failed": sum(unit["failed"] for unit in found),
            "seconds": round(sum(unit["seconds"] for unit in found)),
        }
        for name in PARTS
        if (found := [unit for key, unit in done.items() if key.startswith(f"{name}, ")])
    }
    print(json.dumps(totals, indent=1))
    return any(total["failed"] for total in totals.values())


def _run(part: Part, seed: int) -> dict[str, Any]:
    """Runs one unit; returns how many examples its passed tests had at most, and how many tests failed."""
    begun = time.monotonic()
    argv = ["pytest", "-q", "-p", "no:cacheprovider", "--timeout=0", part.tests]
    argv.append(f"--hypothesis-seed={seed}")
    environment = os.environ | {"HILNAS_FUZZ": str(part.examples)}
    ended = subprocess.run(
        [sys.executable, "-m", *argv], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode not in (0, 1):
        raise SystemExit(ended.stdout + ended.stderr)
    if ended.returncode:
        print(ended.stdout, file=sys.stderr)
    passed, failed = (_count(word, ended.stdout) for word in ("passed", "failed"))
    seconds = round(time.monotonic() - begun, 1)
    return {"examples": part.examples * passed, "failed": failed, "seconds": seconds}


def _count(word: str, text: str) -> int:
    found = re.search(rf"(\d+) {word}", text)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
