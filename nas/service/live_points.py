"""What viewers get of a live study: columns of the rows that changed, the front, and the course of the hypervolume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from nas.core.errors import UnknownName
from nas.core.metrics import METRICS
from nas.service.live_axes import STRUCTURE, AxisView
from nas.service.live_course import Step
from nas.service.live_study import LiveStudy
from nas.service.live_table import NO_RUNG, ORIGINS, STATES, UNKNOWN

_DIGITS = 6
"""That count: finer than any figure is known."""
_MOST_BEHIND = 22
"""Digits behind the point: greater powers of ten are no exact numbers."""
_NORMAL_95 = 1.96

Numbers = list[float | None]
Some = slice | NDArray[np.intp]
Floats = NDArray[np.float64]


class Told(BaseModel):
    """Trials, a column for each of their properties."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    trial: list[int]
    status: list[int] = Field(description="places in `statuses`")
    statuses: tuple[str, ...] = STATES
    origin: list[int] = Field(description="places in `origins`")
    origins: tuple[str, ...] = ORIGINS
    rung: list[int | None]
    feasible: list[int | None] = Field(description="1 or 0: the device gate found the budgets kept; null: not known")
    noisy: list[int] = Field(description="1: a figure rests on refused repetitions; such trials are on no front")
    values: dict[str, list[float]] = Field(description="axis -> values in its unit; null where one is not known")


class Bounds(BaseModel):
    """Values and 95 % intervals by axis; null where one is not known, or there is none."""

    values: dict[str, float | None]
    low: dict[str, float | None]
    high: dict[str, float | None]


class FrontEntry(Bounds):
    """A trial on the front, or tied with one that is."""

    trial: int
    on: bool = Field(description="on the front itself")
    p_front: float | None = Field(description="share of draws from the noise that have it on the front")
    hv_contribution: float
    ties: tuple[int, ...] = Field(description="trials that no objective tells apart from it")
    layout: str


class ReferenceEntry(Bounds):
    """A reference layout."""

    name: str
    trial: int


class CourseView(BaseModel):
    """The steps in which the hypervolume grew, in columns."""

    trial: list[int]
    complete: list[int] = Field(description="trials that had come to count by then")
    at: list[float] = Field(description="seconds since the epoch")
    device_seconds: list[float] = Field(description="of the study's own measurements until then")
    hypervolume: list[float]


class Points(BaseModel):
    """A study's trials that changed since a revision, and its front."""

    study: int = Field(description="id; where it is another one, the study was made anew: begin at revision 0")
    name: str
    state: str
    revision: int = Field(description="to be asked for next")
    trials: int = Field(description="how many the study has")
    axes: list[AxisView] = Field(description="all that can be asked for")
    told: Told
    front: list[FrontEntry] | None = Field(
        description="all of it, best first, with the objectives and the axes asked for; null where it is as it was"
    )
    references: list[ReferenceEntry]
    hypervolume: float | None
    device_seconds: float
    course: CourseView | None = Field(description="whole; null where it is as it was")


def points(study: LiveStudy, since: int = 0, axes: Sequence[str] = ()) -> Points:
    """What changed behind the revision `since`; everything for 0.

    Args:
        study: refreshed.
        since: a revision.
        axes: keys of the axes whose values are told; none: the objectives.

    Raises:
        UnknownName: the study has no such axis.
    """
    read_layouts(study, axes)
    with study.lock:
        changed = study.table.rows["changed"]
        told = np.arange(len(changed)) if study.judged > since else np.flatnonzero(changed > since)
        keys = _keys(study, axes)
        return _points(study, since, keys, _told(study, told, keys))


def points_json(study: LiveStudy, since: int = 0, axes: Sequence[str] = ()) -> bytes:
    """`points` as JSON; where all trials are told, nearly all of the text was written before."""
    read_layouts(study, axes)
    with study.lock:
        if 0 < since >= study.judged:
            return points(study, since, axes).model_dump_json().encode()
        keys = _keys(study, axes)
        rest = _points(study, since, keys, _told(study, np.arange(0), keys)).model_dump_json(exclude={"told"})
        return b"".join([rest[:-1].encode(), b',"told":', _all_told(study, keys), b"}"])


def _points(study: LiveStudy, since: int, keys: Sequence[str], told: Told) -> Points:
    front_keys = list(dict.fromkeys([*_keys(study, ()), *keys]))
    return Points(
        study=study.id,
        name=study.name,
        state=study.state.value,
        revision=study.revision,
        trials=len(study.table),
        axes=study.axes,
        told=told,
        front=front_entries(study, front_keys) if study.counted_changed > since or not since else None,
        references=reference_entries(study, front_keys),
        hypervolume=study.course.hypervolume,
        device_seconds=study.device_seconds.total,
        course=course(study) if study.course_changed > since else None,
    )


def read_layouts(study: LiveStudy, keys: Iterable[str]) -> None:
    """Reads the layouts where an axis needs them; not under the study's lock, for it may take long.

    Raises:
        BeingRead: it takes longer than a request waits.
    """
    if not set(STRUCTURE).isdisjoint(keys):
        study.read_layouts()


def front_entries(study: LiveStudy, keys: Sequence[str], most: int | None = None) -> list[FrontEntry]:
    """The front, best first, and what is tied with it, at most so many; the study's lock is held."""
    rows = study.front()[:most]
    trials = [row.trial for row in rows]
    bounds = _bounds(study, trials, keys)
    layouts = study.details.texts(trials)
    return [
        FrontEntry(**row._asdict(), layout=layouts[row.trial], **told) for row, told in zip(rows, bounds, strict=True)
    ]


def reference_entries(study: LiveStudy, keys: Sequence[str]) -> list[ReferenceEntry]:
    """The reference layouts that have been proposed; the study's lock is held."""
    found = study.references()
    told = _bounds(study, list(found.values()), keys)
    return [
        ReferenceEntry(name=name, trial=trial, **bounds)
        for (name, trial), bounds in zip(found.items(), told, strict=True)
    ]


def values(study: LiveStudy, key: str) -> Floats:
    """[N] an axis' value of every trial, in its unit, NaN where it is not known; the study's lock is held."""
    index = [axis.key for axis in study.axes].index(key)
    if key in STRUCTURE:
        return study.structure.column(key, len(study.table))
    objectives = len(study.space.objectives)
    rows = study.table.rows
    return np.asarray(rows["axes"][:, index, 0] if index < objectives else rows["further"][:, index - objectives])


def course(study: LiveStudy) -> CourseView:
    """How the hypervolume grew; the study's lock is held."""
    steps = study.course.steps
    by_name = (
        dict(zip(Step._fields, zip(*steps, strict=True), strict=True)) if steps else dict.fromkeys(Step._fields, ())
    )
    spent = study.device_seconds.until([step.at for step in steps]).tolist()
    return CourseView(**by_name, device_seconds=spent)


def _keys(study: LiveStudy, axes: Sequence[str]) -> list[str]:
    """The axes' keys, each once; those of the objectives for none."""
    known = [axis.key for axis in study.axes]
    for key in axes:
        if key not in known:
            raise UnknownName(f"axis of study {study.name}", key[:128], known)
    return list(dict.fromkeys(axes)) or [axis.key for axis in study.axes if axis.objective]


def _told(study: LiveStudy, told: NDArray[np.intp], keys: Sequence[str]) -> Told:
    plain = {name: column(told) for name, column in _columns(study).items()}
    return Told(**plain, values={key: _numbers(study, key, told) for key in keys})


def _numbers(study: LiveStudy, key: str, some: Some) -> list[float]:
    numbers: list[float] = rounded(values(study, key)[some]).tolist()
    return numbers


def _all_told(study: LiveStudy, keys: Sequence[str]) -> bytes:
    """`Told` of all trials, as JSON."""
    texts, size = study.texts, len(study.table)
    numbers = {key: texts.column(f"values {key}", size, partial(_numbers, study, key)) for key in keys}
    plain = {name: texts.column(name, size, column) for name, column in _columns(study).items()}
    names = {"statuses": to_json(STATES), "origins": to_json(ORIGINS)}
    return _object({**plain, **names, "values": _object(numbers)})


def _object(parts: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(to_json(name) + b":" + text for name, text in parts.items()) + b"}"


def _columns(study: LiveStudy) -> dict[str, Callable[[Some], list[Any]]]:
    """Fields of `Told` that are columns -> their values in some rows."""
    rows, feasible = study.table.rows, study.table.feasible()
    return {
        "trial": lambda some: np.arange(len(rows))[some].tolist(),
        "status": lambda some: rows["state"][some].tolist(),
        "origin": lambda some: rows["origin"][some].tolist(),
        "rung": lambda some: _nullable(rows["rung"][some], NO_RUNG),
        "feasible": lambda some: _nullable(feasible[some], UNKNOWN),
        "noisy": lambda some: rows["noisy"][some].astype(int).tolist(),
    }


def _bounds(study: LiveStudy, trials: Sequence[int], keys: Sequence[str]) -> list[dict[str, Any]]:
    """`Bounds` of each of a few trials."""
    intervals = study.details.intervals(trials, study.table)
    known = [axis.key for axis in study.axes]
    objectives = len(study.space.objectives)
    told: list[dict[str, Any]] = [{"values": {}, "low": {}, "high": {}} for _ in trials]
    for key in keys:
        index, column = known.index(key), rounded(values(study, key)[list(trials)]).tolist()
        lows, highs = _objective_interval(study, trials, index) if index < objectives else ([], [])
        for i, trial in enumerate(trials):
            low = high = None
            if index < objectives:
                low, high = lows[i], highs[i]
            elif key not in STRUCTURE:
                low, high = intervals[trial][index - objectives]
            for name, number in (("values", column[i]), ("low", low), ("high", high)):
                told[i][name][key] = None if number is None or number != number else number
    return told


def _objective_interval(study: LiveStudy, trials: Sequence[int], index: int) -> tuple[list[float], list[float]]:
    value, _, sd = study.table.rows["axes"][list(trials), index].T
    half = _NORMAL_95 * sd
    if METRICS[study.space.objectives[index].metric].transform == "log":
        low, high = value * np.exp(-half), value * np.exp(half)
    else:
        low, high = value - half, value + half
    return rounded(low).tolist(), rounded(high).tolist()


def rounded(numbers: Floats) -> Floats:
    """The numbers with so many digits that count; NaN stays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.nan_to_num(_DIGITS - 1 - np.floor(np.log10(np.abs(numbers))), nan=0.0, posinf=0.0, neginf=0.0)
    digits = np.minimum(digits, _MOST_BEHIND)
    # Powers of ten above 1 are exact, those below are not: only then is the result the nearest number to the decimal.
    scale, large = 10.0 ** np.abs(digits), digits < 0
    return np.asarray(np.where(large, np.round(numbers / scale) * scale, np.round(numbers * scale) / scale))


def _nullable(codes: NDArray[Any], null: int) -> list[int | None]:
    return [None if code == null else code for code in codes.tolist()]
