"""Compares estimators of device times on the recorded runs: error against the calm figure, and coverage of intervals.

    python -m benchmarks.noise.report [--folder benchmarks/noise/recorded] [--repetitions 10] [--json]

A figure is one estimate from the runs of a layout in one unit and the reference run before each. Its error is the
logarithm of figure / the same estimator's figure from all calm runs of that layout. Per condition, over layouts and
units and in per cent: `rms` of the errors, `bias` their mean, `spread` their standard deviation within a layout.
`--repetitions` below 10 takes the first runs of each unit.

An estimator is a statistic over runs, and a correction for the speed of the machine by the reference runs:

    wall, cpu     time of the clock, or processor time of the runner
    median, q25, min, low3   statistic over runs; low3 is the mean of the lowest third
    +each         each run is divided by (its reference run's whole time / the calm one): the protocol before this one
    +ratio        the figure is multiplied by (the calm statistic of the reference / the one here)
    +half         the same with the square root of that ratio
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.noise.record import CONDITIONS, FOLDER, REFERENCE, THREADS

Array = NDArray[np.float64]
METRICS = ("ttft", "decode_p50")
STATISTICS = {
    "median": np.median,
    "q25": lambda values: np.quantile(values, 0.25),
    "min": np.min,
    "low3": lambda values: np.mean(np.sort(values)[: max(1, math.ceil(len(values) / 3))]),
}
CLOCKS = ("wall", "cpu")
CORRECTIONS = ("", "+ratio", "+half")
OLD = "wall median+each"


@dataclass(frozen=True)
class Runs:
    """Runs of one layout, and the reference run before each: (clock, metric) -> ms; `total` is all timed work."""

    times: Mapping[tuple[str, str], Array]
    reference: Mapping[tuple[str, str], Array]
    reference_total: Array
    foreign_cpu: Array

    def first(self, count: int) -> Runs:
        """Returns the first `count` runs."""
        return Runs(
            {key: values[:count] for key, values in self.times.items()},
            {key: values[:count] for key, values in self.reference.items()},
            self.reference_total[:count],
            self.foreign_cpu[:count],
        )


@dataclass(frozen=True)
class Cell:
    """All units of one condition: (layout, block) -> runs."""

    runtime: str
    threads: int
    condition: str
    units: Mapping[tuple[int, int], Runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = list(read(options.folder))
    table = errors_table(cells, options.repetitions)
    if options.json:
        print(json.dumps(table))
        return
    for threads, metric in itertools.product(THREADS, METRICS):
        rows = [row for row in table if row["threads"] == threads and row["metric"] == metric]
        conditions = [name for name in CONDITIONS if any(row["condition"] == name for row in rows)]
        print(f"\n{metric}, {threads} thread{'s' * (threads > 1)}: rms error (bias) in per cent\n")
        print("| estimator | " + " | ".join(conditions) + " |\n" + "|---" * (len(conditions) + 1) + "|")
        for name in dict.fromkeys(row["estimator"] for row in rows):
            shown = {
                row["condition"]: f"{row['rms']:.1f} ({row['bias']:+.1f})" for row in rows if row["estimator"] == name
            }
            print(f"| {name} | " + " | ".join(shown[condition] for condition in conditions) + " |")


def read(folder: Path) -> Iterator[Cell]:
    """Returns the recorded cells."""
    units: dict[tuple[str, int, str], dict[tuple[int, int], Runs]] = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl.gz")):
        condition, runtime, threads, block = path.name.removesuffix(".jsonl.gz").rsplit("-", 3)
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        pairs: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        reference = None
        for row in rows:
            if row["layout"] == REFERENCE:
                reference = row
            else:
                pairs[row["layout"]].append((reference, row))
        for layout, both in pairs.items():
            units[runtime, int(threads), condition][layout, int(block)] = Runs(
                _times([row for _, row in both]),
                _times([row for row, _ in both]),
                np.array([row["ttft_us"] / 1e3 + sum(row["decode_us"]) / 1e3 for row, _ in both]),
                np.array([row["foreign_cpu"] for _, row in both]),
            )
    for (runtime, count, condition), found in units.items():
        yield Cell(runtime, count, condition, found)


def _times(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Array]:
    return {
        ("wall", "ttft"): np.array([row["ttft_us"] for row in rows]) / 1e3,
        ("cpu", "ttft"): np.array([row["ttft_cpu_us"] for row in rows]) / 1e3,
        ("wall", "decode_p50"): np.array([np.median(row["decode_us"]) for row in rows]) / 1e3,
        ("cpu", "decode_p50"): np.array([np.median(row["decode_cpu_us"]) for row in rows]) / 1e3,
    }


def pooled(units: Iterable[Runs]) -> Runs:
    """Returns the runs of several units as one."""
    all_units = list(units)
    first = all_units[0]
    return Runs(
        {key: np.concatenate([each.times[key] for each in all_units]) for key in first.times},
        {key: np.concatenate([each.reference[key] for each in all_units]) for key in first.reference},
        np.concatenate([each.reference_total for each in all_units]),
        np.concatenate([each.foreign_cpu for each in all_units]),
    )


def estimators() -> list[str]:
    """Returns the names of all estimators."""
    plain = [
        f"{clock} {name}{correction}" for clock, name, correction in itertools.product(CLOCKS, STATISTICS, CORRECTIONS)
    ]
    return [OLD, *plain]


def estimate(name: str, runs: Runs, calm: Runs, metric: str) -> float:
    """Returns the logarithm of a figure in ms; `calm` are all calm runs of the same layout."""
    if name == OLD:
        drift = runs.reference_total / np.median(calm.reference_total)
        return float(np.log(np.median(runs.times["wall", metric] / drift)))
    clock, rest = name.split(" ")
    statistic, plus, correction = rest.partition("+")
    compute = STATISTICS[statistic]
    value = float(np.log(compute(runs.times[clock, metric])))
    if plus:
        slower = float(np.log(compute(runs.reference[clock, metric]) / compute(calm.reference[clock, metric])))
        value -= slower * (0.5 if correction == "half" else 1.0)
    return value


def errors(cell: Cell, calm: Cell, name: str, metric: str, repetitions: int) -> dict[tuple[int, int], float]:
    """Returns (layout, block) -> error of an estimator."""
    found = {}
    for (layout, block), runs in cell.units.items():
        all_calm = pooled(each for (other, _), each in calm.units.items() if other == layout)
        truth = estimate(name, all_calm, all_calm, metric)
        found[layout, block] = estimate(name, runs.first(repetitions), all_calm, metric) - truth
    return found


def errors_table(cells: Sequence[Cell], repetitions: int) -> list[dict[str, Any]]:
    """Returns one row for each metric, number of threads, condition and estimator, over both runtimes."""
    known = {(cell.runtime, cell.threads, cell.condition): cell for cell in cells}
    table = []
    for threads, metric, name, condition in itertools.product(THREADS, METRICS, estimators(), CONDITIONS):
        found: list[float] = []
        within: list[float] = []
        for runtime in sorted({cell.runtime for cell in cells}):
            cell, calm = known.get((runtime, threads, condition)), known.get((runtime, threads, "calm"))
            if cell is None or calm is None:
                continue
            by_unit = errors(cell, calm, name, metric, repetitions)
            found += by_unit.values()
            for layout in {layout for layout, _ in by_unit}:
                own = [error for (other, _), error in by_unit.items() if other == layout]
                if len(own) > 1:
                    within.append(float(np.var(own, ddof=1)))
        if found:
            table.append(
                {
                    "threads": threads, "metric": metric, "estimator": name, "condition": condition,
                    "rms": 100 * math.sqrt(float(np.mean(np.square(found)))), "bias": 100 * float(np.mean(found)),
                    "spread": 100 * math.sqrt(float(np.mean(within))) if within else None, "figures": len(found),
                }
            )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
