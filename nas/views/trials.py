"""View models of a study's trials among each other: the list of all, filtered and sorted, and where one of them is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nas.analysis.axes import PARAMS_TOTAL, AxisView
from nas.analysis.snapshot import NO_RUNG, NONE, STATES, StudySnapshot, rounded
from nas.core.errors import UnknownName
from nas.views.layout import align, differs

ROWS = 100
"""Trials of a page."""
NEIGHBOURS = 5
_NEAR = 24
"""Trials with the most similar shares of blocks, whose layers are compared one by one."""
_MOST_PAGES = 10**6

Mask = NDArray[np.bool_]


class TrialsQuery(BaseModel):
    """What is shown, from the address of the page; an empty text is the default."""

    model_config = ConfigDict(extra="ignore")

    state: str = Field("", max_length=40, description="a state, or 'front'; empty: any")
    block: str = Field("", max_length=80, description="kind of block that the layout has; empty: any")
    axis: str = Field("", max_length=200, description="key of the axis of `low` and `high`; empty: no limits")
    low: float | None = Field(None, allow_inf_nan=False, description="least value on `axis`, in its unit")
    high: float | None = Field(None, allow_inf_nan=False, description="greatest value on `axis`, in its unit")
    sort: str = Field("trial", max_length=200, description="'trial', 'state', 'p_front' or the key of an axis")
    order: Literal["up", "down"] = "up"
    page: int = Field(1, ge=1, le=_MOST_PAGES)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value != ""} if isinstance(data, Mapping) else data


class TrialRow(BaseModel):
    """A trial."""

    trial: int
    reference: str | None = Field(description="name of the reference layout; null: a candidate")
    state: str
    rung: int | None
    origin: str
    operator: str | None
    reason: str | None
    on: bool = Field(description="whether it is on the front")
    p_front: float | None = Field(description="share of draws from the noise in which it is on the front")
    values: dict[str, float | None] = Field(description="shown axis -> value in its unit; null if not known")
    layout: str


class TrialsView(BaseModel):
    """A page of trials."""

    study: str
    revision: int
    query: TrialsQuery
    states: dict[str, int] = Field(description="state -> trials, references included")
    kinds: list[str] = Field(description="kinds of blocks that some layout has, mixers first")
    axes: list[AxisView] = Field(description="all axes, to filter by and to sort by")
    shown: list[str] = Field(description="keys of the axes that have a column")
    total: int
    found: int = Field(description="trials that pass the filters")
    pages: int
    rows: list[TrialRow]


class NeighbourView(BaseModel):
    """A trial with a similar layout."""

    trial: int
    name: str
    state: str
    differs: int = Field(description="layers that differ, or that one of the two lacks")
    layout: str


class StandingView(BaseModel):
    """Where a trial is among the others."""

    place: int | None = Field(description="on the front, by hypervolume contribution, from 1; null: not on it")
    front: int = Field(description="trials on the front")
    p_front: float | None = Field(description="share of draws from the noise in which it is on the front")
    ties: list[int] = Field(description="trials that differ from it significantly on no objective")
    previous: int | None
    next: int | None
    neighbours: list[NeighbourView] = Field(description="the most similar layouts, nearest first")


def trials_view(study: StudySnapshot, query: TrialsQuery) -> TrialsView:
    """Returns a page of the trials that pass the filters; a page after the last one is the last one.

    Raises:
        UnknownName: no such state, kind of block or axis.
    """
    kinds = _kinds(study)
    known = [axis.key for axis in study.axes]
    keep = _in_state(study, query.state) & _with_block(study, kinds, query.block)
    if query.axis:
        values = study.values(_checked("axis", query.axis, known))
        keep &= np.isfinite(values)
        keep &= (query.low is None) | (values >= (query.low or 0.0))
        keep &= (query.high is None) | (values <= (query.high or 0.0))
    found = np.flatnonzero(keep)
    keys = _sort_keys(study, query.sort)[found]
    order = np.argsort(-keys if query.order == "down" else keys, kind="stable")  # NaN: last in both
    pages = max(1, -(-len(found) // ROWS))
    number = min(query.page, pages)
    numbers = found[order][(number - 1) * ROWS : number * ROWS].tolist()
    shown = [axis.key for axis in study.axes if axis.objective or axis.key == PARAMS_TOTAL]
    if query.axis and query.axis not in shown:
        shown.append(query.axis)
    counts = np.bincount(study.table["state"], minlength=len(STATES)).tolist()
    return TrialsView(
        study=study.name,
        revision=study.revision,
        query=query.model_copy(update={"page": number}),
        states={state: count for state, count in zip(STATES, counts, strict=True) if count},
        kinds=list(kinds),
        axes=study.axes,
        shown=shown,
        total=len(study.table),
        found=len(found),
        pages=pages,
        rows=_rows(study, numbers, shown),
    )


def standing_view(study: StudySnapshot, number: int) -> StandingView:
    """Returns where a trial of the study is among the others."""
    places = {row.trial: place for place, row in enumerate(study.front, 1) if row.on}
    row = next((row for row in study.front if row.trial == number), None)
    return StandingView(
        place=places.get(number),
        front=len(places),
        p_front=row.p_front if row else None,
        ties=[*row.ties] if row else [],
        previous=number - 1 if number - 1 in study.records else None,
        next=number + 1 if number + 1 in study.records else None,
        neighbours=_neighbours(study, number),
    )


def _neighbours(study: StudySnapshot, number: int) -> list[NeighbourView]:
    shares = study.table["blocks"].reshape(len(study.table), -1)
    apart = np.abs(shares - shares[number]).sum(axis=1)
    near = [each for each in np.argsort(apart, kind="stable")[: _NEAR + 1].tolist() if each != number]
    names = {record.trial.number: f"{name} reference" for name, record in study.record.references.items()}
    own, found = study.records[number].layout, []
    for each in near:
        record = study.records[each]
        pair = (own, record.layout)
        found.append(
            NeighbourView(
                trial=each,
                name=names.get(each, f"trial {each}"),
                state=record.trial.status.state.value,
                differs=sum(differs(pair, aligned) for aligned in align(pair)),
                layout=record.layout.format(),
            )
        )
    return sorted(found, key=lambda each: (each.differs, each.trial))[:NEIGHBOURS]


def _rows(study: StudySnapshot, numbers: list[int], shown: list[str]) -> list[TrialRow]:
    references = {record.trial.number: name for name, record in study.record.references.items()}
    front = {row.trial: row for row in study.front}
    columns = {key: rounded(study.values(key)[numbers]).tolist() for key in shown}
    rows = []
    for index, number in enumerate(numbers):
        trial, placed = study.records[number].trial, front.get(number)
        values = {key: column[index] for key, column in columns.items()}
        rows.append(
            TrialRow(
                trial=number,
                reference=references.get(number),
                state=trial.status.state.value,
                rung=None if (rung := int(study.table["rung"][number])) == NO_RUNG else rung,
                origin=trial.origin,
                operator=trial.operator,
                reason=trial.status.reason,
                on=placed is not None and placed.on,
                p_front=None if placed is None else placed.p_front,
                values={key: None if value != value else value for key, value in values.items()},
                layout=study.records[number].layout.format(),
            )
        )
    return rows


def _kinds(study: StudySnapshot) -> Mapping[str, int]:
    """Returns kind -> column of `blocks`, of the kinds that some layout has."""
    present: Mask = np.asarray(study.table["blocks"].any(axis=(0, 2)))
    return {kind: i for i, (_, kind) in enumerate(study.block_roles) if present[i] and kind != NONE}


def _in_state(study: StudySnapshot, state: str) -> Mask:
    if not state:
        return np.ones(len(study.table), bool)
    if state == "front":
        return np.isin(np.arange(len(study.table)), [*study.course.front])
    return np.asarray(study.table["state"] == STATES.index(_checked("state", state, ["front", *STATES])))


def _with_block(study: StudySnapshot, kinds: Mapping[str, int], kind: str) -> Mask:
    if not kind:
        return np.ones(len(study.table), bool)
    return np.asarray(study.table["blocks"][:, kinds[_checked("kind of block", kind, list(kinds))]].any(axis=1))


def _sort_keys(study: StudySnapshot, sort: str) -> NDArray[np.float64]:
    if sort == "trial":
        return np.arange(len(study.table), dtype=np.float64)
    if sort == "state":
        alphabetic = np.argsort(np.argsort(STATES))
        return np.asarray(alphabetic[study.table["state"]], np.float64)
    if sort == "p_front":
        chances = np.full(len(study.table), np.nan)
        for row in study.front:
            chances[row.trial] = np.nan if row.p_front is None else row.p_front
        return chances
    known = ["trial", "state", "p_front", *(axis.key for axis in study.axes)]
    return study.values(_checked("column", sort, known))


def _checked(what: str, name: str, known: list[str]) -> str:
    if name not in known:
        raise UnknownName(what, name, known)
    return name
