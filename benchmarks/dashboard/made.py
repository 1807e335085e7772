"""Generates databases with studies of many trials once, and copies them for each run."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.dashboard.candidates import Judge
from benchmarks.dashboard.maker import add_study
from nas.infra.store.store import Store

LIVE = "many-trials"
"""The study that still runs."""

_SMALL_TRIALS = 40


def fill(store: Store, trials: int, small: int, repetitions: int = 1) -> None:
    """Makes `small` studies that have ended, and then the one of `trials` trials that runs."""
    judge = Judge(repetitions)

    def say(written: int) -> None:
        print(f"\r{written} of {trials} trials written", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="hilnas-studies-") as folder:
        file = Path(folder) / "study.jsonl"
        for seed in range(1, small + 1):
            add_study(store, f"small-{seed}", judge, file, trials=_SMALL_TRIALS, seed=seed, running=False)
        add_study(store, LIVE, judge, file, trials=trials, seed=0, running=True, say=say)
    print(file=sys.stderr)


def generated(home: Path, trials: int, small: int, repetitions: int = 1) -> Path:
    """Returns the SQLite file of such studies in the folder `home`; generates it in minutes where it is missing."""
    file = home / f"studies-{trials}-{small}-{repetitions}.db"
    if not file.exists():
        home.mkdir(parents=True, exist_ok=True)
        unfinished = home / f"{file.name}.unfinished"
        for leftover in home.glob(f"{unfinished.name}*"):
            leftover.unlink()
        store = Store.open(f"sqlite:///{unfinished}", artifacts=home / "artifacts")
        fill(store, trials, small, repetitions)
        store.close()  # the last connection takes the write-ahead log into the file
        unfinished.rename(file)
    return file


def copied(file: Path, folder: Path) -> str:
    """Returns the URL of a copy in `folder`, to which trials may be added."""
    shutil.copyfile(file, folder / "hilnas.db")
    return f"sqlite:///{folder / 'hilnas.db'}"
