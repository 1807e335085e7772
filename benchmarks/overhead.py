"""Overhead of a candidate beyond timed inference and training steps, from the record of a finished study.

    python benchmarks/overhead.py STUDY [--db URL] > result.json

Wall time of a candidate = device time of its rounds + seconds of its export, training and gate stages, each measured
where the work ran. Timed work = prompt and decode of every repetition, the reference's and the refused ones included,
and the training's own steps. Waiting for a free worker or device is neither: it is the search running in parallel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from typing import Any

from nas.core.measurement import Measurement
from nas.infra.store import results, studies, trials
from nas.infra.store.store import Store


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("study")
    arguments.add_argument("--db")
    options = arguments.parse_args()
    store = Store.open(options.db, create=False)
    study = studies.get(store, options.study).id
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    served = (
        (trial.number, row)
        for trial in trials.all(store, study)
        for row in results.of_trial(store, study, trial.number)
    )
    for number, row in served:
        value = row.payload.get("value")
        if value is not None:
            spent[number][f"{row.stage}_s"] += row.payload.get("seconds", row.seconds)
            spent[number]["timed_s"] += _timed(row.stage, value)
    rows = [_row(store, study, number, parts) for number, parts in sorted(spent.items())]
    finished = [row["overhead"] for row in rows if row["state"] == "complete"]
    summary = {
        "study": options.study,
        "overhead_all": _share(rows),
        "overhead_complete_median": statistics.median(finished) if finished else None,
        "candidates": rows,
    }
    json.dump(summary, sys.stdout, indent=1)
    print()


def _timed(stage: str, value: dict[str, Any]) -> float:
    if stage == "train":
        return float(value["seconds"])
    if stage != "measure":
        return 0.0
    samples = [each for rep in Measurement.model_validate(value).repetitions for each in (rep.sample, rep.reference)]
    times = (
        sample.ttft_ms + sum(sample.decode_ns) / 1e6 + sample.info.get("warmup_ms", 0.0) for sample in samples if sample
    )
    return sum(times) / 1e3


def _row(store: Store, study: int, number: int, parts: dict[str, float]) -> dict[str, Any]:
    wall = sum(seconds for name, seconds in parts.items() if name != "timed_s")
    state = trials.get(store, study, number).status.state.value
    return {"trial": number, "state": state, "wall_s": wall, "overhead": 1 - parts["timed_s"] / wall, **parts}


def _share(rows: list[dict[str, Any]]) -> float:
    return 1 - sum(row["timed_s"] for row in rows) / sum(row["wall_s"] for row in rows)


if __name__ == "__main__":
    main()
