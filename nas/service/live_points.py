"""What viewers get of a live study: columns of the rows that changed, the front, and the course of the hypervolume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from nas.core.metrics import METRICS
from nas.core.scoring import places
from nas.core.space import Objective, SearchSpace
from nas.service.live_course import Step
from nas.service.live_study import LiveStudy
from nas.service.live_table import NO_RUNG, ORIGINS, STATES, UNKNOWN

_DIGITS = 6
"""Behind the point: finer than any figure, in its unit, is known."""
_NORMAL_95 = 1.96

Numbers = list[float | None]


class AxisColumns(BaseModel):
    """An objective of the trials that are told; null where it is not known."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    value: list[float] = Field(description="in the axis' unit")
    low: list[float] = Field(description="lower end of the value's 95 % interval")
    high: list[float]
    coordinate: list[float] = Field(description="minimised: what dominance and hypervolume are of")


class AxisView(BaseModel):
    """What an axis is of."""

    name: str
    metric: str
    unit: str = Field(description="'x' for a ratio to the published reference, over several devices or runtimes")
    direction: str
    transform: str
    reference: float | None = Field(description="the reference point's coordinate; null until it is fixed")


class CourseView(BaseModel):
    """The steps in which the hypervolume grew, in columns."""

    trial: list[int]
    complete: list[int] = Field(description="trials that had come to count by then")
    at: list[float] = Field(description="seconds since the epoch")
    device_seconds: list[float] = Field(description="of the study's own measurements until then")
    hypervolume: list[float]


class Points(BaseModel):
    """A study's trials that changed since a revision, a column for each of their properties."""

    study: int = Field(description="id; where it is another one, the study was made anew: begin at revision 0")
    name: str
    state: str
    revision: int = Field(description="to be asked for next")
    trials: int = Field(description="how many the study has")
    trial: list[int]
    status: list[str]
    origin: list[str]
    rung: list[int | None]
    feasible: list[bool | None] = Field(description="whether the device gate found the budgets kept; null: not known")
    noisy: list[bool]
    layout: list[str] = Field(description="the first digits of the layout's id")
    axes: list[AxisView]
    columns: list[AxisColumns] = Field(description="of each of `axes`")
    front: list[int] = Field(description="all trials on the front, by number")
    hypervolume: float | None
    device_seconds: float
    course: CourseView | None = Field(description="whole; null where it is as it was")


def points(study: LiveStudy, since: int = 0) -> Points:
    """What changed behind the revision `since`; everything for 0."""
    with study.lock:
        rows = study.table.rows
        told = np.flatnonzero(rows["changed"] > since) if study.judged <= since else np.arange(len(rows))
        return Points(
            study=study.id,
            name=study.name,
            state=study.state.value,
            revision=study.revision,
            trials=len(rows),
            trial=told.tolist(),
            status=_decoded(rows["state"][told], STATES),
            origin=_decoded(rows["origin"][told], ORIGINS),
            rung=_nullable(rows["rung"][told], NO_RUNG),
            feasible=[
                None if code is None else bool(code) for code in _nullable(study.table.feasible()[told], UNKNOWN)
            ],
            noisy=rows["noisy"][told].tolist(),
            layout=[id.decode() for id in rows["layout_id"][told].tolist()],
            axes=axes(study.space, study.corner),
            columns=_columns(study.space, rows["axes"][told]),
            front=study.course.front,
            hypervolume=study.course.hypervolume,
            device_seconds=study.device_seconds.total,
            course=course(study) if study.course_changed > since else None,
        )


def axes(space: SearchSpace, corner: Sequence[float] | None) -> list[AxisView]:
    """The space's objectives."""
    return [_axis(space, each, corner[i] if corner else None) for i, each in enumerate(space.objectives)]


def course(study: LiveStudy) -> CourseView:
    """How the hypervolume grew; the study's lock is held."""
    steps = study.course.steps
    by_name = (
        dict(zip(Step._fields, zip(*steps, strict=True), strict=True)) if steps else dict.fromkeys(Step._fields, ())
    )
    spent = study.device_seconds.until([step.at for step in steps]).tolist()
    return CourseView(**by_name, device_seconds=spent)


def _axis(space: SearchSpace, objective: Objective, reference: float | None) -> AxisView:
    metric = METRICS[objective.metric]
    ratio = metric.source != "proxy" and len(places(space, objective)) > 1
    return AxisView(
        name=objective.name,
        metric=objective.metric,
        unit="x" if ratio else metric.unit,
        direction="min" if ratio else metric.direction,
        transform=metric.transform,
        reference=reference,
    )


def _columns(space: SearchSpace, numbers: NDArray[np.float64]) -> list[AxisColumns]:
    told = []
    for index, objective in enumerate(space.objectives):
        value, coordinate, sd = numbers[:, index].T
        half = _NORMAL_95 * sd
        if METRICS[objective.metric].transform == "log":
            low, high = value * np.exp(-half), value * np.exp(half)
        else:
            low, high = value - half, value + half
        rounded = [np.round(column, _DIGITS).tolist() for column in (value, low, high, coordinate)]
        told.append(AxisColumns(value=rounded[0], low=rounded[1], high=rounded[2], coordinate=rounded[3]))
    return told


def _decoded(codes: NDArray[np.uint8], names: Sequence[str]) -> list[str]:
    return [names[code] for code in codes.tolist()]


def _nullable(codes: NDArray[Any], null: int) -> list[int | None]:
    return [None if code == null else code for code in codes.tolist()]
