"""A live study as files to take away: all trials as CSV, and the front as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from nas.core.layout import Layout
from nas.service.live_axes import STRUCTURE, AxisView
from nas.service.live_points import (
    FrontEntry,
    ReferenceEntry,
    front_entries,
    read_layouts,
    reference_entries,
    rounded,
    values,
)
from nas.service.live_study import LiveStudy
from nas.service.live_table import NO_RUNG, ORIGINS, STATES, UNKNOWN
from nas.store import columns
from nas.store.store import Store

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings that spreadsheets take for formulas, or that hide one."""
_TRIALS_PER_READ = 1000

Cell = str | int | float | None


class FrontFile(BaseModel):
    """The front with all axes."""

    study: str
    revision: int
    hypervolume: float | None
    axes: list[AxisView]
    front: list[FrontEntry]
    references: list[ReferenceEntry]


def front_file(study: LiveStudy) -> FrontFile:
    """The front of a study."""
    read_layouts(study, STRUCTURE)
    with study.lock:
        keys = [axis.key for axis in study.axes]
        return FrontFile(
            study=study.name,
            revision=study.revision,
            hypervolume=study.course.hypervolume,
            axes=study.axes,
            front=front_entries(study, keys),
            references=reference_entries(study, keys),
        )


def trials_csv(store: Store, study: LiveStudy) -> Iterator[str]:
    """The lines of all trials, as they are when the first is asked for; a bounded number at a time.

    Texts are such that no spreadsheet takes them for a formula.

    Raises:
        BeingRead: the layouts are not known yet.
    """
    read_layouts(study, STRUCTURE)
    return _lines(store, study)


def _lines(store: Store, study: LiveStudy) -> Iterator[str]:
    with study.lock:
        keys = [axis.key for axis in study.axes]
        units = [axis.unit for axis in study.axes]
        rows, feasible = study.table.rows.copy(), study.table.feasible()
        numbers = [rounded(values(study, key)).copy() for key in keys]
        front = {row.trial: row for row in study.front()}
    fixed = (
        "trial",
        "state",
        "origin",
        "rung",
        "feasible",
        "noisy",
        "on_front",
        "p_front",
        "operator",
        "reason",
        "layout",
    )
    yield _line([*fixed, *(f"{key} [{unit}]" if unit else key for key, unit in zip(keys, units, strict=True))])
    for start in range(0, len(rows), _TRIALS_PER_READ):
        some = range(start, min(len(rows), start + _TRIALS_PER_READ))
        lines = []
        for row in columns.layouts(store, study.id, some):
            i, placed = row.number, front.get(row.number)
            told: list[Cell] = [
                i,
                STATES[rows["state"][i]],
                ORIGINS[rows["origin"][i]],
                None if rows["rung"][i] == NO_RUNG else int(rows["rung"][i]),
                None if feasible[i] == UNKNOWN else int(feasible[i]),
                int(rows["noisy"][i]),
                int(placed is not None and placed.on),
                None if placed is None else placed.p_front,
                row.operator,
                row.reason,
                Layout.from_json(row.layout).format(),
            ]
            lines.append(_line([*told, *(float(column[i]) for column in numbers)]))
        yield "".join(lines)


def harmless(text: str) -> str:
    """A text that a spreadsheet shows and does not calculate."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _line(cells: Sequence[Cell]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([_written(cell) for cell in cells])
    return file.getvalue()


def _written(cell: Cell) -> Cell:
    if isinstance(cell, float) and cell != cell:
        return None
    return harmless(cell) if isinstance(cell, str) else cell
