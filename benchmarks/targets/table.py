"""The recorded table of a study of targets, and the logarithms of its figures.

A figure is a time as `nas.measure.protocol.estimator` gives it: the ratio to the reference model that took turns, times
that model's calibration. That is one number for a target, so comparisons within a target are of ratios alone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def rounds(self) -> list[int]:
        """Numbers of the rounds that have every layout on every target."""
        full = len(self.layouts) * len(self.targets)
        numbers = [row["round"] for row in self.rows]
        return [number for number in sorted(set(numbers)) if numbers.count(number) == full]

    def logs(self, figure: str) -> Array:
        """Returns [R, L, T] logarithms of a figure over the full rounds; "latency" is TTFT + gen x decode_p50."""
        rounds, names = self.rounds, [target.name for target in self.targets]
        values = np.full((len(rounds), len(self.layouts), len(names)), np.nan)
        for row in self.rows:
            if row["round"] in rounds:
                place = rounds.index(row["round"]), row["layout"], names.index(row["target"])
                values[place] = _latency(row) if figure == "latency" else row[figure]
        assert not np.isnan(values).any(), "a full round has every measurement once"
        logs: Array = np.log(values)
        return logs


def _latency(row: dict[str, Any]) -> float:
    return float(row["ttft"] + workload(1).gen * row["decode_p50"])


def noise(logs: Array) -> Array:
    """Returns [T] standard deviations of one measurement: between rounds, over all layouts of a target."""
    spread: Array = np.sqrt(logs.var(axis=0, ddof=1).mean(axis=0))
    return spread


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
