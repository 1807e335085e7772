"""Parts of several view models: intervals, a study's progress, a trial, and where it is relative to the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from nas.core.metrics import METRICS
from nas.core.stats import Z95
from nas.search.analysis.axes import only_key
from nas.search.analysis.snapshot import StudySnapshot, rounded


class View(BaseModel):
    """A view model. JSON has the aliases of its fields."""

    model_config = ConfigDict(frozen=True, serialize_by_alias=True)


class Interval(View):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


class Bounds(View):
    """Values and 95 % intervals by axis; null if not known."""

    values: dict[str, float | None]
    low: dict[str, float | None]
    high: dict[str, float | None]


class Moment(NamedTuple):
    """Hypervolume after so many complete trials."""

    complete: int
    hypervolume: float


class StudyProgress(View):
    """The state and progress of a study, as the list of studies and the study's page show it."""

    name: str
    space: str
    state: str
    reason: str | None = Field(None, description="why it failed or was interrupted")
    resume: str | None = Field(None, description="the command that continues it where it was launched")
    desired_state: str
    created: float = Field(description="seconds since the epoch")
    requested: int | None = Field(
        None,
        serialization_alias="wanted",
        description="requested trials, references not counted; null if it was never launched",
    )
    expected: int | None = Field(None, description="trials with which the search ends; once it has, those proposed")
    proposed: int = 0
    ended: int = 0
    states: dict[str, int] = Field({}, description="state -> trials, references not counted")
    front: int = Field(0, description="trials on the front")
    curve: list[Moment] = Field([], serialization_alias="course", description="hypervolume over complete trials")
    device_seconds: float = Field(0.0, description="of the study's own measurements")


class TrialView(View):
    """A trial, with what people wrote about it."""

    trial: int
    name: str = Field(description="'trial 12', or the reference layout's name")
    state: str
    rung: int | None
    reason: str | None
    origin: str
    operator: str | None
    star: bool
    tags: tuple[str, ...]
    note: str


class Standing(View):
    """Where a trial is relative to the front."""

    position: int | None = Field(
        serialization_alias="place", description="on the front by hypervolume contribution, from 1; null: not on it"
    )
    tied: bool = Field(description="not on the front, but within the noise of a trial on it")
    p_front: float | None = Field(description="share of draws from the noise in which it is on the front")
    gain: float | None = Field(description="share of the hypervolume that it alone adds; null where not on the front")


def trial_fields(study: StudySnapshot, number: int) -> dict[str, Any]:
    """Returns the fields of the `TrialView` of a trial."""
    record, mark = study.records[number], study.marks.get(number)
    status = record.trial.status
    return {
        "trial": number,
        "name": study.reference_names.get(number, f"trial {number}"),
        "state": status.state.value,
        "rung": status.rung,
        "reason": status.reason,
        "origin": record.trial.origin,
        "operator": record.trial.operator,
        "star": mark is not None and mark.star,
        "tags": mark.tags if mark else (),
        "note": mark.text if mark else "",
    }


def standing_fields(study: StudySnapshot, number: int) -> dict[str, Any]:
    """Returns the fields of the `Standing` of a trial; `p_front` is null unless the trial counts for the front."""
    position, row = study.front_positions.get(number, (0, None))
    if row is None:
        chance = study.chances.get(number, 0.0) if number in study.counted else None
        return {"position": None, "tied": False, "p_front": chance, "gain": None}
    volume = study.curve.hypervolume
    return {
        "position": position if row.on else None,
        "tied": not row.on,
        "p_front": row.p_front,
        "gain": row.hv_contribution / volume if row.on and volume else None,
    }


def objective_value(study: StudySnapshot, index: int, coordinate: float) -> float:
    """Returns a coordinate of an objective in its unit."""
    objective = study.space.objectives[index]
    metric, key = METRICS[objective.metric], only_key(study.space, objective)
    if metric.source == "proxy":
        return 0.0 - coordinate
    figure = (study.record.published or {}).get(key, {}).get(objective.metric) if key else None
    if figure is None or figure.value is None:
        return math.exp(coordinate)
    return figure.value * math.exp(coordinate if metric.direction == "min" else -coordinate)


def bounds_fields(study: StudySnapshot, trials: Sequence[int], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the fields of the `Bounds` of each of a few trials."""
    axes, objectives = [axis.key for axis in study.axes], len(study.space.objectives)
    figures = [study.records[trial].figures if study.further else {} for trial in trials]
    rows: list[dict[str, Any]] = [{"values": {}, "low": {}, "high": {}} for _ in trials]
    for key in keys:
        index, values = axes.index(key), rounded(study.values(key)[[*trials]]).tolist()
        bounds: Sequence[tuple[float | None, float | None]] = [(None, None)] * len(trials)
        if index < objectives:
            bounds = _objective_intervals(study, trials, index)
        elif index < objectives + len(study.further):
            measured = study.further[index - objectives]
            of_trials = [by_key.get(measured.key, {}).get(measured.metric) for by_key in figures]
            bounds = [(None, None) if figure is None else (figure.low, figure.high) for figure in of_trials]
        for row, value, (low, high) in zip(rows, values, bounds, strict=True):
            for name, number in (("values", value), ("low", low), ("high", high)):
                row[name][key] = None if number is None or number != number else number
    return rows


def _objective_intervals(study: StudySnapshot, trials: Sequence[int], index: int) -> list[tuple[float, float]]:
    value, _, _, sd = study.table["axes"][[*trials], index].T
    half = Z95 * sd
    if METRICS[study.space.objectives[index].metric].transform == "log":
        low, high = value * np.exp(-half), value * np.exp(half)
    else:
        low, high = value - half, value + half
    return [*zip(rounded(low).tolist(), rounded(high).tolist(), strict=True)]
