"""Recorded studies as tables: the last observation of every layout that was tried.

A table is made of reports (`nas study export -f json`), of which it keeps what replays and plots need: some 400 bytes
per layout.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.search.proposers import Observation

Row = Mapping[str, Any]
Recorded = Mapping[str, Any]
"""A recorded study: the report's keys below, and others that its makers add."""

_STUDY_KEYS = ("study", "state", "seed", "version", "reference_point", "elapsed_s")
_DIGITS = 6


@dataclass(frozen=True)
class Table:
    """Observations of one study or several of one space.

    Args:
        space: name of the space.
        studies: names.
        observations: of each layout that ended.
        references: observations of the reference layouts, which every study has from its start.
        reference_point: objective -> the worst coordinate of the studies' own points, so that none loses a layout.
    """

    space: str
    studies: tuple[str, ...]
    observations: Mapping[Layout, Observation]
    references: tuple[Observation, ...]
    reference_point: Mapping[str, float]


def recorded(report: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the part of a report that a table keeps."""
    head = {key: report[key] for key in _STUDY_KEYS}
    rows = [{name: value for name, value in row.items() if value is not None} for row in report["told"]]
    return rounded(head | more | {"space": report["space"]["name"], "told": rows})  # type: ignore[no-any-return]


def load(path: Path) -> list[Recorded]:
    """Reads the studies of a file that `write` wrote, or of a report; `.gz` files are compressed."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return list(content["studies"]) if "studies" in content else [recorded(content)]


def write(studies: Iterable[Recorded], path: Path) -> None:
    """Atomically writes a file that `load` reads, with a line for each layout."""
    parts = []
    for study in studies:
        head = json.dumps({key: value for key, value in study.items() if key != "told"}, sort_keys=True)
        rows = ",\n".join(json.dumps(row, sort_keys=True, separators=(",", ":")) for row in study["told"])
        parts.append(f'{head[:-1]}, "told": [\n{rows}\n]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    data = ('{"studies": [\n' + ",\n".join(parts) + "\n]}\n").encode()
    write_durably(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def table(studies: Iterable[Recorded]) -> Table:
    """Returns the studies of one space as one table; of a layout in several, the observation of the highest rung."""
    tables = list(studies)
    observations: dict[Layout, Observation] = {}
    references: dict[Layout, Observation] = {}
    for row in (row for study in tables for row in study["told"]):
        outcome = observation(row)
        if row["origin"] == "reference":
            references.setdefault(outcome.layout, outcome)
        elif row["status"] != "running" and _reach(outcome) > _reach(observations.get(outcome.layout)):
            observations[outcome.layout] = outcome
    point = worst_point(tables)
    names = tuple(study["study"] for study in tables)
    return Table(tables[0]["space"], names, observations, tuple(references.values()), point)


def worst_point(studies: Iterable[Recorded]) -> dict[str, float]:
    """Returns objective -> the worst of the studies' reference points, which differ by noise."""
    points = [study["reference_point"] for study in studies if study["reference_point"] is not None]
    return {name: max(point[name] for point in points) for name in points[0]}


def observation(row: Row) -> Observation:
    """Returns a row as an observation."""
    figures = row["objectives"], row["constraints"], row.get("rung"), row.get("noise", {})
    return Observation(Layout.parse(row["layout"]), row["status"], *figures)


def rounded(value: Any) -> Any:
    """Rounds all nested floats to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def _reach(outcome: Observation | None) -> tuple[int, int]:
    if outcome is None:
        return (-1, -1)
    return (int(outcome.status == "complete"), -1 if outcome.rung is None else outcome.rung)
