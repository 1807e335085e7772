"""The recorded table of a study of targets, and the logarithms of its figures.

A figure is a time as `nas.measure.protocol.estimator` gives it: the ratio to the reference model that took turns, times
that model's calibration. That is one number for a target, so comparisons within a target are of ratios alone.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.targets import quality
from benchmarks.targets.measuring import Target, read_rows, workload
from nas.core.durable import write_durably
from nas.core.layout import Layout

RECORDED = Path("benchmarks/recorded/targets.json.gz")
Array = NDArray[np.float64]
_SAMPLES = ("ttft", "decode_p50", "peak_rss")
_LEAST_DEVIATIONS = 12


@dataclass(frozen=True)
class Table:
    """Everything that a study of targets measured.

    Args:
        machine: processor and what it was measured with.
        layouts: LFM2's pattern first.
        targets: of the machine.
        rows: measurements, as `Bench` writes them.
        scores: of each layout's proxy, by seed; none of layouts that were not trained.
    """

    machine: dict[str, Any]
    layouts: list[Layout]
    targets: list[Target]
    rows: list[dict[str, Any]]
    scores: list[list[float]]

    def times(self, figure: str) -> Times:
        """Returns a figure of the layouts that have one on every target; "latency" is TTFT + gen x decode_p50."""
        names = [target.name for target in self.targets]
        cells: dict[tuple[int, int], list[float]] = {}
        for row in self.rows:
            value = _latency(row) if figure == "latency" else row[figure]
            if value is not None:
                cells.setdefault((row["layout"], names.index(row["target"])), []).append(math.log(value))
        places = [
            layout
            for layout in range(len(self.layouts))
            if all((layout, target) in cells for target in range(len(names)))
        ]
        values = [[cells[layout, target] for target in range(len(names))] for layout in places]
        means = np.array([[np.mean(logs) for logs in row] for row in values])
        counts = np.array([[len(logs) for logs in row] for row in values], float)
        pools = [
            np.array(
                [
                    (log - np.mean(row[target])) * math.sqrt(len(row[target]) / (len(row[target]) - 1))
                    for row in values
                    for log in row[target]
                    if len(row[target]) > 1
                ]
            )
            for target in range(len(names))
        ]
        twins = [(place, names.index(target.repeats)) for place, target in enumerate(self.targets) if target.repeats]
        if any(len(pool) < _LEAST_DEVIATIONS for pool in pools):
            # Of one round, two equal targets tell the noise of a run; the others are taken to have as much.
            alike = [(means[:, a] - means[:, b]) / math.sqrt(2) for a, b in twins]
            assert alike, "a table of one round needs a target that was measured twice"
            pools = [np.concatenate([*alike, *(-away for away in alike)])] * len(names)
        return Times([self.layouts[place] for place in places], places, means, counts, pools)


@dataclass(frozen=True)
class Times:
    """One figure of some layouts on all targets.

    Args:
        layouts: those that were measured on every target.
        places: their numbers in the table.
        means: [L, T] of the logarithms over rounds.
        counts: [L, T] measurements.
        pools: of each target, deviations of single measurements from what they measure, in logarithms.
    """

    layouts: list[Layout]
    places: list[int]
    means: Array
    counts: Array
    pools: list[Array]

    @property
    def noise(self) -> Array:
        """[T] standard deviations of one measurement."""
        return np.array([float(np.sqrt(np.mean(pool**2))) for pool in self.pools])

    @property
    def deviations(self) -> Array:
        """[L, T] standard deviations of the means."""
        deviations: Array = self.noise / np.sqrt(self.counts)
        return deviations

    def of(self, targets: Sequence[int]) -> Times:
        """Returns the times on some targets alone."""
        pools = [self.pools[target] for target in targets]
        return replace(self, means=self.means[:, targets], counts=self.counts[:, targets], pools=pools)

    def draws(self, count: int, seed: int = 0) -> Array:
        """Returns [count, L, T] means as they might have been, with deviations drawn from the pools."""
        rng = np.random.default_rng(seed)
        drawn = np.repeat(self.means[None], count, axis=0)
        for target, pool in enumerate(self.pools):
            for layout, runs in enumerate(self.counts[:, target].astype(int)):
                drawn[:, layout, target] += rng.choice(pool, size=(count, runs)).mean(axis=1)
        return drawn


def _latency(row: dict[str, Any]) -> float | None:
    if row["ttft"] is None or row["decode_p50"] is None:
        return None
    return float(row["ttft"] + workload(1).gen * row["decode_p50"])


def collect(folder: Path, layouts: Sequence[Layout], machine: dict[str, Any], path: Path) -> Table:
    """Writes what a folder holds to `path`."""
    targets = [Target(**row) for row in json.loads((folder / "targets.json").read_text())]
    scores = quality.scores(layouts, folder / "trained.jsonl")
    table = Table(machine, list(layouts), targets, read_rows(folder), scores)
    content = {
        "v": 1,
        "machine": machine,
        "layouts": [layout.format() for layout in layouts],
        "targets": [vars(target) for target in targets],
        "rows": [[row[name] for name in _COLUMNS] for row in table.rows],
        "scores": scores,
    }
    text = json.dumps(content | {"columns": _COLUMNS}).encode()
    write_durably(path, gzip.compress(text, mtime=0))
    return table


_COLUMNS = ("layout", "target", "round", *_SAMPLES, "foreign_cpu", "drift", "seconds")


def load(path: Path = RECORDED) -> Table:
    """Returns a recorded table."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    return Table(
        content["machine"],
        [Layout.parse(text) for text in content["layouts"]],
        [Target(**row) for row in content["targets"]],
        [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]],
        content["scores"],
    )
