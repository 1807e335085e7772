"""View model of all trials of a study: filtered, sorted, a page at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nas.core.errors import InvalidInput, UnknownName
from nas.search.analysis.axes import PARAMS_TOTAL, AxisView
from nas.search.analysis.snapshot import NONE, STATES, StudySnapshot
from nas.serve.views.base import Bounds, Standing, TrialView, View, bounds_fields, standing_fields, trial_fields
from nas.serve.views.study import axis_of, target_names, target_of

ROWS = 50
"""Trials on one page."""
RANK = "rank"
"""Sorts trials by their position on the front."""
NUMBER = "trial"
"""Sorts them by number."""
CHANCE = "p_front"
"""Sorts them by the chance that they are on the front."""


class TrialQuery(View):
    """Which trials are shown, and in which order: the query of the page's address."""

    state: str | None = Field(None, description="null: any")
    block: str | None = Field(None, description="a kind of block that the layout has; null: any")
    target: str | None = Field(
        None, serialization_alias="place", description="device and runtime that measured the trial; null: any"
    )
    starred: bool = Field(False, description="only trials with a star")
    tag: str | None = Field(None, description="a tag that the trial has; null: any")
    axis: str | None = Field(None, description="key of the axis that `low` and `high` limit")
    low: float | None = None
    high: float | None = None
    sort: str = Field(RANK, description="'rank', 'trial', 'p_front', or the key of an axis")
    descending: bool = False
    start: int = Field(0, description="number of the page's first row, from 0")

    def fields(self) -> dict[str, str]:
        """Returns the query as fields of an address, without the start; defaults are left out."""
        values = self.model_dump(exclude_defaults=True, exclude={"sort", "descending", "start"})
        sort = f"-{self.sort}" if self.descending else self.sort
        texts = {name: "1" if value is True else str(value) for name, value in values.items()}
        return texts | ({"sort": sort} if sort != RANK else {})


class TrialRow(Bounds, Standing, TrialView):
    """A row of the table."""

    layout: str


class TrialsView(View):
    """A page of the table of all trials."""

    study: str
    revision: int
    trials: int = Field(description="number of trials of the study, references included")
    matching: int = Field(description="number of trials that match the query")
    query: TrialQuery
    states: list[str] = Field(description="states of some trial")
    blocks: list[str] = Field(description="kinds of blocks of some layout")
    targets: list[str] = Field(serialization_alias="places", description="devices and runtimes")
    tags: list[str] = Field(description="tags of some trial")
    axes: list[AxisView] = Field(description="all axes of the study")
    columns: list[AxisView] = Field(description="axes with a column")
    rows: list[TrialRow]
    previous: int | None = Field(description="`start` of the page before; null on the first one")
    next: int | None = Field(description="`start` of the next page; null on the last one")


def trial_query(study: StudySnapshot, query: Mapping[str, str]) -> TrialQuery:
    """Parses the query of an address; unknown and empty fields are ignored.

    Raises:
        InvalidInput: a number is malformed, or a limit has no axis.
        UnknownName: no such state, kind of block, device and runtime, or axis.
    """
    sort = query.get("sort") or RANK
    key = sort.removeprefix("-")
    low, high = (_number(query, name) for name in ("low", "high"))
    axis = query.get("axis") or None
    if axis is None and (low is not None or high is not None):
        raise InvalidInput("name the figure that is limited", where="axis")
    start = query.get("start") or "0"
    if not (start.isascii() and start.isdigit() and len(start) < 10):
        raise InvalidInput("is the number of a row, from 0", where="start")
    return TrialQuery(
        state=_one_of(query, "state", STATES),
        block=_one_of(query, "block", [kind for _, kind in study.block_roles if kind != NONE]),
        target=target_of(query.get("place") or None, study.axes),
        starred=query.get("starred") == "1",
        tag=_one_of(query, "tag", _tags(study)),
        axis=axis and axis_of(axis, study.axes),
        low=low,
        high=high,
        sort=key if key in (RANK, NUMBER, CHANCE) else axis_of(key, study.axes),
        descending=sort != key,
        start=int(start),
    )


def trials_view(study: StudySnapshot, query: Mapping[str, str]) -> TrialsView:
    """Returns a page of the trials that match a query.

    Args:
        study: the snapshot.
        query: of the page's address, see `trial_query`.

    Raises:
        InvalidInput: the query is malformed.
        UnknownName: the query names something that the study does not have.
    """
    parsed = trial_query(study, query)
    numbers = _sorted(study, np.flatnonzero(_matching(study, parsed)), parsed)
    start = min(parsed.start, max(0, len(numbers) - 1) // ROWS * ROWS)
    columns = _columns(study, parsed)
    codes = set(np.unique(study.table["state"]).tolist())
    present = np.asarray(study.table["blocks"].any(axis=(0, 2))).tolist()
    return TrialsView(
        study=study.name,
        revision=study.revision,
        trials=len(study.table),
        matching=len(numbers),
        query=parsed.model_copy(update={"start": start}),
        states=[state for code, state in enumerate(STATES) if code in codes],
        blocks=[kind for (_, kind), any_ in zip(study.block_roles, present, strict=True) if any_ and kind != NONE],
        targets=target_names(study.axes),
        tags=_tags(study),
        axes=study.axes,
        columns=columns,
        rows=[*_rows(study, numbers[start : start + ROWS].tolist(), columns)],
        previous=max(0, start - ROWS) if start else None,
        next=start + ROWS if start + ROWS < len(numbers) else None,
    )


def _tags(study: StudySnapshot) -> list[str]:
    return sorted({tag for mark in study.marks.values() for tag in mark.tags})


def _one_of(query: Mapping[str, str], name: str, options: Sequence[str]) -> str | None:
    value = query.get(name) or None
    if value is not None and value not in options:
        raise UnknownName(name, value[:128], options)
    return value


def _number(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInput(f"is a number, not {text[:128]!r}", where=name)
    return value


def _matching(study: StudySnapshot, query: TrialQuery) -> NDArray[np.bool_]:
    """Returns [N] whether a trial matches."""
    table = study.table
    matches = np.ones(len(table), bool)
    if query.state is not None:
        matches &= table["state"] == STATES.index(query.state)
    if query.block is not None:
        index = [kind for _, kind in study.block_roles].index(query.block)
        matches &= table["blocks"][:, index].any(axis=1)
    if query.target is not None:
        measured = np.array([study.values(axis.key) for axis in study.axes if axis.target == query.target])
        matches &= np.isfinite(measured).any(axis=0)
    if query.starred or query.tag is not None:
        marked = [
            mark.trial
            for mark in study.marks.values()
            if mark.star >= query.starred and query.tag in (None, *mark.tags)
        ]
        matches &= np.isin(np.arange(len(table)), marked)
    if query.axis is not None:
        values = study.values(query.axis)
        matches &= np.isfinite(values)  # an unknown value is in no range
        with np.errstate(invalid="ignore"):
            matches &= (values >= (-math.inf if query.low is None else query.low)) & (
                values <= (math.inf if query.high is None else query.high)
            )
    return np.asarray(matches)


def _sorted(study: StudySnapshot, trials: NDArray[np.intp], query: TrialQuery) -> NDArray[np.intp]:
    """Returns the trials in order; those without a value last, equal ones by number."""
    if query.sort == NUMBER:
        values = np.arange(len(study.table), dtype=np.float64)
    elif query.sort in (RANK, CHANCE):
        values = np.full(len(study.table), math.nan)
        for trial in study.counted if query.sort == CHANCE else study.front_positions:
            chance = study.chances.get(trial, 0.0)
            number = study.front_positions[trial][0] if query.sort == RANK else chance
            values[trial] = math.nan if number is None else number
    else:
        values = study.values(query.sort)
    keys = values[trials]
    return trials[np.argsort(np.where(np.isnan(keys), math.inf, -keys if query.descending else keys), kind="stable")]


def _columns(study: StudySnapshot, query: TrialQuery) -> list[AxisView]:
    """Returns the objectives, the parameters, and the axes that the query names."""
    named = {PARAMS_TOTAL, query.axis, query.sort}
    return [
        axis
        for axis in study.axes
        if axis.objective or axis.key in named or (axis.target is not None and axis.target == query.target)
    ]


def _rows(study: StudySnapshot, trials: list[int], columns: list[AxisView]) -> Iterator[TrialRow]:
    for number, bounds in zip(trials, bounds_fields(study, trials, [axis.key for axis in columns]), strict=True):
        fields = trial_fields(study, number)
        if number in study.reference_names:
            fields["name"] += " reference"
        layout = study.records[number].layout.format()
        yield TrialRow(layout=layout, **fields, **standing_fields(study, number), **bounds)
