"""Results of runs: a folder with one small file per run, so that a campaign can be interrupted at any time.

A finished campaign is packed into one file, a line of JSON per run, compressed.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.search.problems import Problem
from benchmarks.search.reference import long_search
from benchmarks.search.runs import run
from nas.core.durable import write_durably

REFERENCE = "reference"
_DECIMALS = 6


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
            write_durably(path, json.dumps(data | {"corner": corner}).encode())
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


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """Reads all results of a folder, or of a file that `pack` wrote."""
    if path.is_dir():
        return {_key(file.stem): json.loads(file.read_text()) for file in sorted(path.glob("*.json"))}
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {_key(row.pop("run")): row for row in rows}


def pack(folder: Path, path: Path, names: Mapping[str, str]) -> int:
    """Writes all results of a folder into one file, coordinates to six decimals; returns their number."""
    results = read(folder)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        for key, data in results.items():
            named = key._replace(engine=names.get(key.engine, key.engine))
            points = [point and [round(value, _DECIMALS) for value in point] for point in data["points"]]
            line = json.dumps({"run": Path(named.file).stem, **data, "points": points}, separators=(",", ":"))
            file.write(f"{line}\n".encode())
    return len(results)


def _key(stem: str) -> Key:
    problem, engine, workers, seed = stem.split(".")
    return Key(problem, engine, int(workers[1:]), int(seed))
