"""A folder of results: one small file per run, so that a campaign can be interrupted at any time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.search.problems import Problem
from benchmarks.search.reference import long_search
from benchmarks.search.runs import run

REFERENCE = "reference"


class Key(NamedTuple):
    """One run of a campaign; `engine` may be `REFERENCE`."""

    problem: str
    engine: str
    workers: int
    seed: int

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.problem}.{self.engine}.q{self.workers}.{self.seed}.json"


def fill(folder: Path, keys: list[Key], evaluations: int, reference: int, seconds: float, say: Any) -> bool:
    """Runs what is missing, until `seconds` of CPU time are spent; returns whether all results exist.

    Several processes may fill one folder in parallel: each run is made by one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for key in keys:
        path = folder / key.file
        with claimed(path) as mine:
            if not mine:
                continue
            if os.times().user > seconds:
                return False
            problem = Problem(key.problem, key.seed)
            if key.engine == REFERENCE:
                data: dict[str, Any] = {"points": long_search(problem, reference), "evaluations": reference}
            else:
                data = run(problem, key.engine, evaluations, key.workers).to_json()
            corner = [problem.reference_point[name] for name in problem.axes]
            fresh = path.with_suffix(f".{os.getpid()}.tmp")
            fresh.write_text(json.dumps(data | {"corner": corner}))
            fresh.replace(path)
            say(f"{key.file} {data.get('cpu', 0.0):.3f} s a proposal")
    return all((folder / key.file).exists() for key in keys)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Yields whether this process may write `path`: it is missing, and no other live process has claimed it."""
    if path.exists():
        yield False
        return
    claim = path.with_suffix(".claim")
    with claim.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield not path.exists()
        finally:
            claim.unlink(missing_ok=True)


def read(folder: Path) -> dict[Key, dict[str, Any]]:
    """Reads all results of a folder."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        problem, engine, workers, seed = path.stem.split(".")
        found[Key(problem, engine, int(workers[1:]), int(seed))] = json.loads(path.read_text())
    return found
