"""View model of all trials of a study: filtered, sorted, a page at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.search.analysis.axes import PARAMS_TOTAL, AxisView
from nas.search.analysis.snapshot import NONE, STATES, StudySnapshot
from nas.search.study.events import marks
from nas.serve.views.study import Bounds, axis_of, bounds_of, place_of, target_names

ROWS = 50
"""Trials on one page."""
RANK, NUMBER, CHANCE = "rank", "trial", "p_front"
"""What trials can be sorted by, in addition to the keys of axes."""
_LAST = 2**31 - 1


class TrialQuery(BaseModel):
    """Which trials are shown, and in which order: the query of the page's address."""

    state: str | None = Field(None, description="null: any")
    block: str | None = Field(None, description="a kind of block that the layout has; null: any")
    place: str | None = Field(None, description="device and runtime that measured the trial; null: any")
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
        given = self.model_dump(exclude_defaults=True, exclude={"sort", "descending", "start"})
        sort = f"-{self.sort}" if self.descending else self.sort
        texts = {name: "1" if value is True else str(value) for name, value in given.items()}
        return texts | ({"sort": sort} if sort != RANK else {})


class TrialRow(Bounds):
    """A row of the table."""

    trial: int
    name: str = Field(description="'trial 12', or the reference layout's name")
    state: str
    rung: int | None
    reason: str | None
    origin: str
    operator: str | None
    noisy: bool = Field(description="a figure uses refused repetitions")
    place: int | None = Field(description="rank on the front by hypervolume contribution, from 1; null: not on it")
    tied: bool = Field(description="not on the front, but within the noise of a trial on it")
    p_front: float | None = Field(description="share of draws from the noise in which it is on the front")
    star: bool
    tags: list[str]
    note: str
    layout: str


class TrialsView(BaseModel):
    """A page of the table of all trials."""

    study: str
    revision: int
    trials: int = Field(description="number of trials of the study, references included")
    matching: int = Field(description="number of trials that match the query")
    query: TrialQuery
    states: list[str] = Field(description="states of some trial")
    blocks: list[str] = Field(description="kinds of blocks of some layout")
    places: list[str] = Field(description="devices and runtimes")
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
    if not (start.isascii() and start.isdigit() and len(start) < 10 and int(start) <= _LAST):
        raise InvalidInput("is the number of a row, from 0", where="start")
    return TrialQuery(
        state=_one_of(query, "state", STATES),
        block=_one_of(query, "block", [kind for _, kind in study.block_roles if kind != NONE]),
        place=place_of(query.get("place") or None, study.axes),
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
    wanted = trial_query(study, query)
    found = _sorted(study, np.flatnonzero(_matching(study, wanted)), wanted)
    start = min(wanted.start, max(0, len(found) - 1) // ROWS * ROWS)
    columns = _columns(study, wanted)
    seen = set(np.unique(study.table["state"]).tolist())
    present = np.asarray(study.table["blocks"].any(axis=(0, 2))).tolist()
    return TrialsView(
        study=study.name,
        revision=study.revision,
        trials=len(study.table),
        matching=len(found),
        query=wanted.model_copy(update={"start": start}),
        states=[state for code, state in enumerate(STATES) if code in seen],
        blocks=[kind for (_, kind), any_ in zip(study.block_roles, present, strict=True) if any_ and kind != NONE],
        places=target_names(study.axes),
        tags=_tags(study),
        axes=study.axes,
        columns=columns,
        rows=[*_rows(study, found[start : start + ROWS].tolist(), columns)],
        previous=max(0, start - ROWS) if start else None,
        next=start + ROWS if start + ROWS < len(found) else None,
    )


def _tags(study: StudySnapshot) -> list[str]:
    return sorted({tag for mark in marks(study.record.log.notes).values() for tag in mark.tags})


def _one_of(query: Mapping[str, str], name: str, known: list[str] | tuple[str, ...]) -> str | None:
    given = query.get(name) or None
    if given is not None and given not in known:
        raise UnknownName(name, given[:128], known)
    return given


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


def _matching(study: StudySnapshot, wanted: TrialQuery) -> NDArray[np.bool_]:
    """Returns [N] whether a trial matches."""
    table = study.table
    kept = np.ones(len(table), bool)
    if wanted.state is not None:
        kept &= table["state"] == STATES.index(wanted.state)
    if wanted.block is not None:
        index = [kind for _, kind in study.block_roles].index(wanted.block)
        kept &= table["blocks"][:, index].any(axis=1)
    if wanted.place is not None:
        taken = np.array([study.values(axis.key) for axis in study.axes if axis.place == wanted.place])
        kept &= np.isfinite(taken).any(axis=0)
    if wanted.starred or wanted.tag is not None:
        written = marks(study.record.log.notes).values()
        found = [mark.trial for mark in written if mark.star >= wanted.starred and wanted.tag in (None, *mark.tags)]
        kept &= np.isin(np.arange(len(table)), found)
    if wanted.axis is not None:
        values = study.values(wanted.axis)
        kept &= np.isfinite(values)  # a limit is not kept by what is not known
        with np.errstate(invalid="ignore"):
            kept &= (values >= (-math.inf if wanted.low is None else wanted.low)) & (
                values <= (math.inf if wanted.high is None else wanted.high)
            )
    return np.asarray(kept)


def _sorted(study: StudySnapshot, trials: NDArray[np.intp], wanted: TrialQuery) -> NDArray[np.intp]:
    """Returns the trials in order; those without a value last, equal ones by number."""
    if wanted.sort == NUMBER:
        values = np.arange(len(study.table), dtype=np.float64)
    elif wanted.sort in (RANK, CHANCE):
        values = np.full(len(study.table), math.nan)
        for rank, row in enumerate(study.front):
            values[row.trial] = rank if wanted.sort == RANK else math.nan if row.p_front is None else row.p_front
    else:
        values = study.values(wanted.sort)
    keys = values[trials]
    return trials[np.argsort(np.where(np.isnan(keys), math.inf, -keys if wanted.descending else keys), kind="stable")]


def _columns(study: StudySnapshot, wanted: TrialQuery) -> list[AxisView]:
    """Returns the objectives, the parameters, and the axes that the query names."""
    named = {PARAMS_TOTAL, wanted.axis, wanted.sort}
    return [
        axis
        for axis in study.axes
        if axis.objective or axis.key in named or (axis.place is not None and axis.place == wanted.place)
    ]


def _rows(study: StudySnapshot, trials: list[int], columns: list[AxisView]) -> Iterator[TrialRow]:
    placed = {row.trial: (rank, row) for rank, row in enumerate(study.front, 1)}
    references = {record.trial.number: name for name, record in study.record.references.items()}
    written = marks(study.record.log.notes)
    known = bounds_of(study, trials, [axis.key for axis in columns])
    for number, bounds in zip(trials, known, strict=True):
        record = study.records[number]
        status = record.trial.status
        rank, row = placed.get(number, (None, None))
        mark = written.get(number)
        yield TrialRow(
            trial=number,
            name=f"{references[number]} reference" if number in references else f"trial {number}",
            state=status.state.value,
            rung=status.rung,
            reason=status.reason,
            origin=record.trial.origin,
            operator=record.trial.operator,
            noisy=record.noisy,
            place=rank if row is not None and row.on else None,
            tied=row is not None and not row.on,
            p_front=row.p_front if row is not None else 0.0 if number in study.counted else None,
            star=bool(mark and mark.star),
            tags=list(mark.tags) if mark else [],
            note=mark.text if mark else "",
            layout=record.layout.format(),
            **bounds,
        )
