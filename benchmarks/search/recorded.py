"""Recorded studies as tables: every layout that was tried, whatever became of it, as the proposer was told it.

A table is made of reports (`nas study export -f json`), of which it keeps what replaying and drawing want: some 400
bytes a layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nas.core.layout import Layout
from nas.search import Observation

Row = Mapping[str, Any]
Recorded = Mapping[str, Any]
"""A recorded study: the report's keys below, and others that its makers add."""

_STUDY_KEYS = ("study", "state", "seed", "version", "reference_point", "elapsed_s")
_DIGITS = 6


@dataclass(frozen=True)
class Table:
    """What was seen of each layout in one study or several of one space.

    Args:
        space: name of the space.
        studies: names.
        told: of each layout that ended.
        references: of the reference layouts, which every study knows from its start.
        reference_point: objective -> the worst coordinate of the studies' own points, so that none loses a layout.
    """

    space: str
    studies: tuple[str, ...]
    told: Mapping[Layout, Observation]
    references: tuple[Observation, ...]
    reference_point: Mapping[str, float]


def recorded(report: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The part of a report that a table keeps."""
    kept = {key: report[key] for key in _STUDY_KEYS}
    rows = [{name: value for name, value in row.items() if value is not None} for row in report["told"]]
    return rounded(kept | more | {"space": report["space"]["name"], "told": rows})  # type: ignore[no-any-return]


def load(path: Path) -> list[Recorded]:
    """The studies of a file: of `write`, or the one of a report."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return list(found["studies"]) if "studies" in found else [recorded(found)]


def write(studies: Iterable[Recorded], path: Path) -> None:
    """Writes a file that `load` reads, with a line for each layout, at once or not at all."""
    parts = []
    for study in studies:
        head = json.dumps({key: value for key, value in study.items() if key != "told"}, sort_keys=True)
        rows = ",\n".join(json.dumps(row, sort_keys=True, separators=(",", ":")) for row in study["told"])
        parts.append(f'{head[:-1]}, "told": [\n{rows}\n]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text('{"studies": [\n' + ",\n".join(parts) + "\n]}\n", encoding="utf-8")
    partial.replace(path)


def table(studies: Iterable[Recorded]) -> Table:
    """The studies of one space as one table; of a layout that several tried, it holds what went furthest."""
    kept = list(studies)
    told: dict[Layout, Observation] = {}
    references: dict[Layout, Observation] = {}
    for row in (row for study in kept for row in study["told"]):
        seen = observation(row)
        if row["origin"] == "reference":
            references.setdefault(seen.layout, seen)
        elif counts(row) and _reach(seen) > _reach(told.get(seen.layout)):
            told[seen.layout] = seen
    point = worst_point(kept)
    names = tuple(study["study"] for study in kept)
    return Table(kept[0]["space"], names, told, tuple(references.values()), point)


def worst_point(studies: Iterable[Recorded]) -> dict[str, float]:
    """Objective -> the worst of the studies' reference points; of equal spaces they differ by noise alone."""
    points = [study["reference_point"] for study in studies if study["reference_point"] is not None]
    return {name: max(point[name] for point in points) for name in points[0]}


def observation(row: Row) -> Observation:
    """A row as proposers are told it."""
    figures = row["objectives"], row["constraints"], row.get("rung"), row.get("noise", {})
    return Observation(Layout.parse(row["layout"]), row["status"], *figures)


def counts(row: Row) -> bool:
    """Whether the trial ended, by itself and without noise."""
    return row["status"] != "running" and not row["noisy"]


def rounded(value: Any) -> Any:
    """Floats at six significant digits, wherever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value


def _reach(seen: Observation | None) -> tuple[int, int]:
    if seen is None:
        return (-1, -1)
    return (int(seen.status == "complete"), -1 if seen.rung is None else seen.rung)
