"""View models of studies: the list, one study, its plots' data, its front as a file, and a page's query.

They are made from snapshots and a few short queries. Pages render them, and their JSON twins return them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.core.metrics import METRICS
from nas.core.space import SearchSpace
from nas.core.stats import Z95
from nas.core.trial import TERMINAL
from nas.infra.store import listings as pages
from nas.infra.store import studies
from nas.infra.store.listings import StudyFilter, StudySummary
from nas.infra.store.rows import JobState, StudyState
from nas.infra.store.store import Store
from nas.search.analysis.agreement import RankCorrelation, rank_correlation
from nas.search.analysis.axes import KV_BYTES, PARAMS_TOTAL, AxisView, only_key
from nas.search.analysis.effects import Effects, effects, features
from nas.search.analysis.headline import Headline, headline
from nas.search.analysis.history import Step, VolumeView, ended, expected_gain
from nas.search.analysis.record import readable
from nas.search.analysis.reliability import QualityReliability, quality_reliability
from nas.search.analysis.report import NoiseSummary, noise_summary, time_left
from nas.search.analysis.slices import Slice, study_slices
from nas.search.analysis.snapshot import NO_RUNG, ORIGINS, STATES, UNKNOWN, Snapshots, StudySnapshot, rounded
from nas.search.proposers.sampling import Sampler
from nas.search.study.estimate import Estimate
from nas.serve.api.submissions import SubmissionState, SubmittedStudies

PANELS = (1, 2, 3)
"""Numbers of the panels."""
PAGE = 20
"""Studies on one page of the list: no more than `Snapshots` keeps in memory."""
MOST_RANKED, MOST_ACTIVE = 50, 50
"""Rows of the ranked list, and of the queue."""
_MOMENTS = 60
"""Points of a sparkline."""
_MOST_FITTED = 2000
"""Trials that effects of knobs are fitted to."""
_MOST_SLICES, MOST_FITTED_NOW = 4, 500
"""Knobs with slices, and trials of the largest study whose model is fitted for them: larger ones take too long."""
_DRAWS = 100
"""Random layouts of a space: a second of work, and a share is known to 5 percent (standard error, at most)."""


class Moment(NamedTuple):
    """Hypervolume after so many complete trials."""

    complete: int
    hypervolume: float


class StudyLine(BaseModel):
    """A row of the list."""

    name: str
    space: str
    state: str
    reason: str | None = Field(None, description="why it failed or was interrupted")
    resume: str | None = Field(None, description="the command that continues it where it was launched")
    desired_state: str
    created: float = Field(description="seconds since the epoch")
    wanted: int | None = Field(description="requested trials, references not counted; null if it was never launched")
    expected: int | None = Field(description="trials with which the search ends: those that were proposed once it has")
    proposed: int
    ended: int
    states: dict[str, int] = Field(description="state -> trials, references not counted")
    front: int = Field(description="trials on the front")
    hypervolume: float | None = Field(description="null until the reference point is fixed")
    course: list[Moment] = Field(description="of the hypervolume; includes the last moment")
    device_seconds: float = Field(description="of the study's own measurements")
    problem: str | None = Field(None, description="why only its name is known")
    submitted_by: str | None = Field(None, description="name of the API token; null: it was launched on this host")


class WaitingLine(BaseModel):
    """A submitted study that has not begun, or that ended before it began."""

    model_config = ConfigDict(from_attributes=True)

    study: str
    space: str
    submitted: float = Field(description="seconds since the epoch")
    submitted_by: str
    state: SubmissionState
    message: str | None


class StudiesView(BaseModel):
    """A page of the list."""

    studies: list[StudyLine]
    next: int | None = Field(description="`before` of the next page; null on the last one")
    waiting: list[WaitingLine] = Field(description="on the first page only")
    wanted: StudyFilter = Field(StudyFilter(), description="what the listed studies match")


class PanelView(BaseModel):
    """One panel: the keys of its axes."""

    number: int
    x: str
    y: str


class RangeView(BaseModel):
    """A brushed range of an axis, in its unit."""

    key: str
    low: float
    high: float


class PageState(BaseModel):
    """The state of a page, from its query; missing fields have their defaults."""

    panels: list[PanelView]
    log: list[str] = Field(description="axes with a logarithmic scale")
    infeasible: bool = Field(description="whether trials that break a budget are shown")
    incomplete: bool = Field(description="whether stopped and running trials are shown")
    far: bool = Field(description="whether axes reach to what is far from the front")
    place: str | None = Field(description="device and runtime whose figures are shown; null: per axis")
    pick: list[RangeView]


class TrialColumns(BaseModel):
    """Trials, a column for each of their properties."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    trial: list[int]
    status: list[int] = Field(description="indices of `statuses`")
    statuses: tuple[str, ...] = STATES
    origin: list[int] = Field(description="indices of `origins`")
    origins: tuple[str, ...] = ORIGINS
    rung: list[int | None]
    feasible: list[int | None] = Field(description="1: the budgets are kept; 0: not; null: not known")
    noisy: list[int] = Field(description="1: a figure uses refused repetitions; such trials are not on the front")
    values: dict[str, list[float]] = Field(description="axis -> values in its unit; null if not known")


class Bounds(BaseModel):
    """Values and 95 % intervals by axis; null if not known."""

    values: dict[str, float | None]
    low: dict[str, float | None]
    high: dict[str, float | None]


class FrontEntry(Bounds):
    """A trial on the front, or tied with one that is."""

    trial: int
    on: bool = Field(description="whether it is on the front")
    p_front: float | None = Field(description="share of draws from the noise in which it is on the front")
    hv_contribution: float
    ties: tuple[int, ...] = Field(description="trials that differ from it significantly on no objective")
    layout: str


class ReferenceEntry(Bounds):
    """A reference layout."""

    name: str
    trial: int
    layout: str


class CourseView(BaseModel):
    """The steps in which the hypervolume grew, in columns."""

    trial: list[int]
    complete: list[int] = Field(description="complete trials that counted by then")
    at: list[float] = Field(description="seconds since the epoch")
    device_seconds: list[float] = Field(description="of the study's own measurements by then")
    hypervolume: list[float]


class Points(BaseModel):
    """A study's trials that changed since a revision, and its front."""

    study: int = Field(description="id; a new one means that the study was created again: start at revision 0")
    name: str
    state: str
    revision: int = Field(description="`since` of the next request")
    trials: int = Field(description="number of trials of the study")
    axes: list[AxisView] = Field(description="all axes of the study")
    told: TrialColumns
    front: list[FrontEntry] | None = Field(
        description="all of it, best first, with the objectives and the requested axes; null if unchanged"
    )
    best: int | None = Field(description="the trial that the study's headline names, else the first of the front")
    references: list[ReferenceEntry]
    hypervolume: float | None
    device_seconds: float
    course: CourseView | None = Field(description="all of it; null if unchanged")


class FrontFile(BaseModel):
    """The front with all axes."""

    study: str
    revision: int
    hypervolume: float | None
    axes: list[AxisView]
    front: list[FrontEntry]
    references: list[ReferenceEntry]


class ShareView(BaseModel):
    """The share of a kind of block in each tenth of the depth, input first."""

    role: str
    kind: str
    all: list[float]
    front: list[float] | None
    """None while the front is empty."""


class KindView(BaseModel):
    """What became of the trials that have a kind of block."""

    role: str
    kind: str
    trials: int = Field(description="that have it, references not counted")
    states: dict[str, int] = Field(description="state -> how many of them are in it")
    front: int = Field(description="how many of them are on the front")
    chosen: float | None = Field(
        description="share that has it of what the search proposed, fixed seeds not counted; null if that is nothing"
    )
    drawn: float | None = Field(
        description="share that has it of random layouts of the space, more than `chosen` where the search drops it; "
        "null where none could be drawn"
    )


class EffectView(BaseModel):
    """How an objective changes from the least to the greatest value of a knob, all others equal."""

    value: float = Field(description="in percent of a figure, or in the objective's unit for a quality; more is more")
    low: float
    high: float


class KnobView(BaseModel):
    """A knob of the space, as the trials have it."""

    name: str
    least: float
    greatest: float
    effects: list[EffectView | None] = Field(description="for each objective; null where too few trials have it")


class Prediction(BaseModel):
    """A forecast of an objective in its unit, with its 95 % interval."""

    value: float
    low: float
    high: float


class SliceView(BaseModel):
    """Forecasts by the search's model of layouts of the front that are changed in one knob alone."""

    knob: str
    values: list[float] = Field(description="of the knob, ascending")
    layouts: list[int] = Field(description="trials that are changed")
    predicted: list[list[Prediction]] = Field(
        description="for each objective, at each value: the mean of these layouts (geometric where the objective is "
        "compared by ratios), in an interval that holds however their errors are correlated"
    )


class EffectsView(BaseModel):
    """Which knobs move the objectives: effects by a linear model of the newest trials, slices by the search's model."""

    objectives: list[str]
    units: list[str] = Field(description="of the effects")
    explained: list[float | None] = Field(description="share of the variance of left-out trials that is predicted")
    knobs: list[KnobView] = Field(description="those with an effect on some objective first")
    slice_units: list[str] = Field(description="of the predictions in `slices`")
    slices: list[SliceView] = Field(
        description="of the knobs that change an objective most, in standard deviations of the trials, along the slice"
    )
    no_slices: str | None = Field(description="why there are none; null if there are")


class TargetAgreement(BaseModel):
    """Rank correlation of layouts measured on two targets (device and runtime); not of noisy ones and references."""

    metric: str
    workload: str | None
    places: tuple[str, str]
    correlation: RankCorrelation


class CornerView(BaseModel):
    """The reference point on one objective; only better trials count for the hypervolume."""

    objective: str
    value: float
    unit: str
    direction: str
    coordinate: float


class EndingView(BaseModel):
    """Why no more layouts are proposed."""

    rule: str
    message: str


class GainView(BaseModel):
    """The expected gain of the last proposal."""

    hypervolume: float = Field(description="upper bound, for the whole batch of the proposal")
    batch: int
    share: float | None = Field(description="of the hypervolume at that time")


class ActiveTrial(BaseModel):
    """A trial that has not ended."""

    trial: int
    state: str
    rung: int | None
    origin: str
    operator: str | None
    since: float = Field(description="start of its state, in seconds since the epoch")
    layout: str


class ActiveJob(BaseModel):
    """A measurement that is queued or running."""

    trial: int | None
    device: str
    state: str
    since: float
    attempts: int
    place: int | None = Field(None, description="in the queue of its device, from 1; null once it runs")
    queued: int | None = Field(None, description="jobs in the queue of its device, of all studies")


class QueueView(BaseModel):
    """Trials and measurements in progress."""

    trials: list[ActiveTrial]
    further: int = Field(description="number of unfinished trials that are not in `trials`")
    jobs: list[ActiveJob]


class RankedView(FrontEntry):
    """A row of the ranked list."""

    place: int | None = Field(
        description="rank by hypervolume contribution, from 1; null for a trial that is only tied"
    )
    gain: float | None = Field(description="its contribution as a share of the hypervolume; null for one only tied")


class StudyView(BaseModel):
    """The page of a study; the data of its plots come from `points`."""

    name: str
    space: str
    state: str
    reason: str | None = Field(None, description="why it failed or was interrupted")
    resume: str | None = Field(None, description="the command that continues it where it was launched")
    desired_state: str
    over: bool = Field(description="no orchestrator is expected to continue the study")
    created: float
    left: Estimate | None = Field(None, description="what remains of a study that runs")
    seed: int
    version: str
    revision: int
    wanted: int | None = Field(description="requested trials, references not counted; null if it was never launched")
    expected: int | None = Field(description="trials with which the search ends: those that were proposed once it has")
    proposed: int
    ended: int
    states: dict[str, int] = Field(description="state -> trials, references not counted")
    device_seconds: float = Field(description="of the study's own measurements")
    hypervolume: VolumeView | None = Field(description="null until the reference point is fixed")
    headline: Headline | None = Field(description="the result in sentences; null until the references are measured")
    corner: list[CornerView] = Field(description="the reference point")
    reliability: QualityReliability | None = Field(description="of the qualities; null before there is a front")
    noise: NoiseSummary | None = Field(description="of the measurements; null before there are any")
    course: list[Moment] = Field(description="of the hypervolume; includes the last moment")
    ending: EndingView | None
    expected_gain: GainView | None
    axes: list[AxisView]
    places: list[str]
    page: PageState
    queue: QueueView
    front: int = Field(description="trials on the front")
    no_front: str | None = Field(description="why the front is empty; null if it is not")
    waiting: str | None = Field(None, description="what a study at work without a front waits for")
    ranked: list[RankedView] = Field(description="the best of the front, then trials tied with it")
    references: list[ReferenceEntry]
    blocks: list[ShareView] | None = Field(description="shares of kinds of blocks by depth")
    kinds: list[KindView] = Field(description="what became of the trials with each kind of block")
    agreement: list[TargetAgreement]


def studies_view(
    store: Store, snapshots: Snapshots, before: int | None = None, submitted: SubmittedStudies | None = None,
    wanted: StudyFilter | None = None,
) -> StudiesView:  # fmt: skip
    """Returns the newest studies and the waiting ones of `submitted`; or the studies older than the id `before`.

    With `wanted` only those that match it, and none that wait.
    """
    rows = pages.latest_studies(store, limit=PAGE + 1, before=before, matching=wanted or StudyFilter())
    shown = rows[:PAGE]
    lines = [line for row in shown if (line := _line(row, snapshots)) is not None]
    filtered = wanted is not None and wanted != StudyFilter()
    waiting = submitted.not_begun() if submitted is not None and before is None and not filtered else []
    return StudiesView(
        wanted=wanted or StudyFilter(),
        studies=[
            line.model_copy(update={"submitted_by": submitted and submitted.submitter(line.name)}) for line in lines
        ],
        next=shown[-1].id if len(rows) > PAGE else None,
        waiting=[WaitingLine.model_validate(each) for each in waiting],
    )


def study_view(store: Store, snapshots: Snapshots, name: str, query: Mapping[str, str]) -> StudyView:
    """Returns the view of a study.

    Args:
        store: the database.
        snapshots: of its studies.
        name: of the study.
        query: of the page's address.

    Raises:
        InvalidInput: its space is not valid in this version, or the query is malformed.
        UnknownName: no such study, axis, or device and runtime.
    """
    study = snapshots.get(name)
    row = studies.get(store, study.id)
    view = study.cached("view", lambda: _view(study))
    condition = studies.condition(store, row)
    update = {
        **asdict(condition),
        "left": time_left(store, study, condition.state),
        "desired_state": row.desired_state,
        "page": page_state(study.axes, query),
        "queue": _queue(store, study),
        "waiting": _waiting(study) if condition.state in (StudyState.NEW, StudyState.RUNNING) else None,
    }
    return view.model_copy(update=update)


def points(study: StudySnapshot, since: int = 0, axes: Sequence[str] = ()) -> Points:
    """Returns the changes after the revision `since`; everything for 0.

    Args:
        study: the snapshot.
        since: a revision.
        axes: keys of the requested axes; none: the objectives.

    Raises:
        UnknownName: the study has no such axis.
    """
    objectives = [axis.key for axis in study.axes if axis.objective]
    keys = _checked(study, axes) or objectives
    changed = study.table["changed"]
    rows = np.arange(len(changed)) if study.record.log.judged > since else np.flatnonzero(changed > since)
    front_keys = [*dict.fromkeys([*objectives, *keys])]
    news = study.counted_changed > since or not since
    return Points(
        study=study.id,
        name=study.name,
        state=study.state.value,
        revision=study.revision,
        trials=len(study.table),
        axes=study.axes,
        told=_columns(study, rows, keys),
        front=front_entries(study, front_keys) if news else None,
        best=best_trial(study),
        references=reference_entries(study, front_keys),
        hypervolume=study.course.hypervolume,
        device_seconds=study.device_seconds,
        course=course_view(study) if news else None,
    )


def best_trial(study: StudySnapshot) -> int | None:
    """Returns the trial that the headline names, else the first of the front; None without a front."""
    said = study.cached("headline", lambda: headline(study))
    return said.named if said and said.named is not None else next((row.trial for row in study.front if row.on), None)


def points_json(study: StudySnapshot, since: int = 0, axes: Sequence[str] = ()) -> bytes:
    """Returns `points` as JSON; that of all trials is cached with the snapshot."""
    if since:
        return points(study, since, axes).model_dump_json().encode()
    key = "points", tuple(_checked(study, axes))
    return study.cached(key, lambda: points(study, 0, axes).model_dump_json().encode())


def front_file(study: StudySnapshot) -> FrontFile:
    """Returns the front of a study."""
    keys = [axis.key for axis in study.axes]
    return FrontFile(
        study=study.name,
        revision=study.revision,
        hypervolume=study.course.hypervolume,
        axes=study.axes,
        front=front_entries(study, keys),
        references=reference_entries(study, keys),
    )


def page_state(axes: Sequence[AxisView], query: Mapping[str, str]) -> PageState:
    """Parses the query of a page; unknown fields are ignored.

    Raises:
        InvalidInput: a field is malformed.
        UnknownName: no such axis, or device and runtime.
    """
    panels = []
    for number, (x, y) in zip(PANELS, _usual_panels(axes), strict=True):
        chosen = [axis_of(query.get(f"{side}{number}") or usual, axes) for side, usual in (("x", x), ("y", y))]
        panels.append(PanelView(number=number, x=chosen[0], y=chosen[1]))
    return PageState(
        panels=panels,
        log=[axis_of(key, axes) for key in _parts(query, "log")],
        infeasible=_flag(query, "infeasible"),
        incomplete=_flag(query, "incomplete"),
        far=_flag(query, "far"),
        place=place_of(query.get("place") or None, axes),
        pick=[_range(part, axes) for part in _parts(query, "pick")],
    )


def _line(row: StudySummary, snapshots: Snapshots) -> StudyLine | None:
    """Returns a row of the list; None if the study was deleted meanwhile."""
    try:
        with readable(row.name):
            return _study_line(row, snapshots.get(row.name))
    except UnknownName:
        return None
    except InvalidInput as error:
        return StudyLine(
            name=row.name, space=row.space, desired_state=row.desired_state, created=row.created, wanted=None,
            expected=None, proposed=0, ended=0, states={}, front=0, hypervolume=None, course=[], device_seconds=0.0,
            problem=str(error), **asdict(row.condition),
        )  # fmt: skip


def _study_line(row: StudySummary, study: StudySnapshot) -> StudyLine:
    return StudyLine(
        name=row.name,
        space=row.space,
        desired_state=row.desired_state,
        created=row.created,
        hypervolume=study.course.hypervolume,
        **asdict(row.condition),
        **_progress(study),
    )


def _view(study: StudySnapshot) -> StudyView:
    """Returns the part that is the same for all visitors, without the queue, which changes without an event."""
    row = study.record.study
    objectives = [axis.key for axis in study.axes if axis.objective]
    entries = front_entries(study, objectives, MOST_RANKED)
    end, gain = ended(study.record.log), expected_gain(study.record.log)
    return StudyView(
        name=study.name,
        space=study.space.name,
        state=study.state.value,
        desired_state=row.desired_state,
        over=study.over,
        created=row.created,
        seed=row.seed,
        version=row.version,
        revision=study.revision,
        hypervolume=_volume(study),
        headline=study.cached("headline", lambda: headline(study)),
        corner=_corner(study),
        reliability=quality_reliability(study),
        noise=noise_summary(study),
        ending=EndingView.model_validate(end) if end else None,
        expected_gain=GainView.model_validate(gain) if gain else None,
        axes=study.axes,
        places=target_names(study.axes),
        page=page_state(study.axes, {}),
        queue=QueueView(trials=[], further=0, jobs=[]),
        no_front=_no_front(study),
        ranked=[
            RankedView(
                **dict(entry),
                place=rank if entry.on else None,
                gain=share_of_volume(study, entry.hv_contribution) if entry.on else None,
            )
            for rank, entry in enumerate(entries, 1)
        ],
        references=reference_entries(study, objectives),
        blocks=share_views(study),
        kinds=kind_views(study),
        agreement=[*target_agreements(study)],
        **_progress(study),
    )


def _no_front(study: StudySnapshot) -> str | None:
    """Returns why the front is empty; None if it is not."""
    states = study.states()
    if study.course.front:
        return None
    if study.corner is None:
        return "the reference layouts are not measured, so there is no reference point"
    if not sum(states.values()):
        return "no layout was proposed"
    if not (complete := states.get("complete", 0)):
        counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items() if count)
        return f"no trial is complete ({counts})"
    return f"of {complete} complete trial(s), each lacks an objective or was measured too noisily"


def _waiting(study: StudySnapshot) -> str | None:
    """Returns what must happen before there is a front; None if there is one."""
    if study.course.front:
        return None
    states = study.states()
    under_way = [f"{count} {state.replace('_', ' ')}" for state, count in states.items() if state not in TERMINAL]
    ended = [f"{count} {state}" for state, count in states.items() if state in TERMINAL]
    if study.corner is None:
        wanted = "the reference layouts to be measured: all others are compared with them"
    elif not states:
        wanted = "the first layouts to be proposed"
    else:
        wanted = "the first trial to be complete"
    parts = {"under way": under_way, "ended": ended}
    counts = "; ".join(f"{what}: {', '.join(some)}" for what, some in parts.items() if some)
    return f"Waiting for {wanted}" + (f" ({counts})" if counts else "")


def _progress(study: StudySnapshot) -> dict[str, Any]:
    """Returns the fields that the list and the page share."""
    states = study.states()
    done = study.state is StudyState.COMPLETE or ended(study.record.log)
    return {
        "wanted": study.record.wanted,
        "proposed": sum(states.values()),
        "expected": sum(states.values()) if done else study.record.wanted,
        "ended": sum(count for state, count in states.items() if state in TERMINAL),
        "states": states,
        "front": len(study.course.front),
        "course": thinned([Moment(step.complete, step.hypervolume) for step in study.course.steps]),
        "device_seconds": study.device_seconds,
    }


def thinned(course: Sequence[Moment]) -> list[Moment]:
    """Returns evenly spaced moments, the last one among them."""
    every = -(-len(course) // _MOMENTS) or 1
    return [*course[::-1][::every]][::-1]


def front_entries(study: StudySnapshot, keys: Sequence[str], most: int | None = None) -> list[FrontEntry]:
    """Returns the front, best first, then the trials tied with it; at most `most`."""
    rows = study.front[:most]
    found = bounds_of(study, [row.trial for row in rows], keys)
    return [
        FrontEntry(
            trial=row.trial, on=row.on, p_front=row.p_front, hv_contribution=row.hv_contribution, ties=row.ties,
            layout=study.records[row.trial].layout.format(), **bounds,
        )
        for row, bounds in zip(rows, found, strict=True)
    ]  # fmt: skip


def share_of_volume(study: StudySnapshot, contribution: float) -> float | None:
    """Returns a contribution as a share of the front's hypervolume; None while that is 0."""
    volume = study.course.hypervolume
    return contribution / volume if volume else None


def reference_entries(study: StudySnapshot, keys: Sequence[str]) -> list[ReferenceEntry]:
    """Returns the reference layouts that have been proposed."""
    found = {name: record.trial.number for name, record in study.record.references.items()}
    bounds = bounds_of(study, [*found.values()], keys)
    return [
        ReferenceEntry(name=name, trial=trial, layout=study.records[trial].layout.format(), **each)
        for (name, trial), each in zip(found.items(), bounds, strict=True)
    ]


def course_view(study: StudySnapshot) -> CourseView:
    """Returns the growth of the hypervolume."""
    steps = study.course.steps
    columns = {name: [getattr(step, name) for step in steps] for name in Step._fields}
    return CourseView(**columns, device_seconds=study.device_seconds_until(columns["at"]).tolist())


def share_views(study: StudySnapshot) -> list[ShareView]:
    """Returns the shares of all kinds of blocks that some layout has, references not counted, mixers first."""
    blocks = study.table["blocks"]
    if not (own := study.own()).any():
        return []
    everything, front = np.round(blocks[own].mean(axis=0), 4), [*study.course.front]
    part = np.round(blocks[front].mean(axis=0), 4) if front else None
    return [
        ShareView(role=role, kind=kind, all=everything[i].tolist(), front=None if part is None else part[i].tolist())
        for i, (role, kind) in enumerate(study.block_roles)
        if blocks[own][:, i].any()
    ]


def kind_views(study: StudySnapshot) -> list[KindView]:
    """Returns what became of the trials with each kind of block that some have, mixers first."""
    own = np.flatnonzero(study.own())
    table, front = study.table[own], np.isin(own, [*study.course.front])
    searched = np.asarray(table["origin"] == ORIGINS.index("proposal"))
    drawn, found = _drawn_kinds(study.space.model_dump_json()), list[KindView]()
    for index, (role, kind) in enumerate(study.block_roles):
        has = np.asarray(table["blocks"][:, index].any(axis=1))
        if not has.any():
            continue
        counts = np.bincount(table["state"][has], minlength=len(STATES)).tolist()
        found.append(
            KindView(
                role=role, kind=kind, trials=int(has.sum()), front=int((has & front).sum()),
                states={state: count for state, count in zip(STATES, counts, strict=True) if count},
                chosen=float(has[searched].mean()) if searched.any() else None,
                drawn=None if drawn is None else drawn[kind] / _DRAWS,
            )
        )  # fmt: skip
    return found


@lru_cache(maxsize=64)
def _drawn_kinds(space: str) -> Counter[str] | None:
    """Returns kind of block -> how many of `_DRAWS` random layouts of a space (JSON) have it, always the same ones.

    Whether a runtime carries them is not asked: it need not be installed where a study is read. None: there are none.
    """
    rng = np.random.default_rng(0)
    try:
        sampler = Sampler(SearchSpace.model_validate_json(space))
        drawn = [sampler.draw(rng) for _ in range(_DRAWS)]
    except InvalidInput:
        return None
    return Counter(
        kind for layout in drawn for kind in {block.kind for layer in layout.layers for block in layer.blocks}
    )


def effects_view(store: Store, study: StudySnapshot, most: float = math.inf) -> EffectsView:
    """Returns the effects of knobs on the objectives, from the newest trials; computed once for each snapshot.

    Args:
        store: the database.
        study: the snapshot.
        most: trials of the largest study whose model is fitted for slices.
    """
    return study.cached(("effects", most), lambda: _effects_view(store, study, most))


def _effects_view(store: Store, study: StudySnapshot, most: float) -> EffectsView:
    objectives, numbers = [axis for axis in study.axes if axis.objective], range(len(study.table))[-_MOST_FITTED:]
    columns = features(study.space, [study.records[number].layout for number in numbers])
    table = np.column_stack([*columns.values()]) if columns else np.empty((len(numbers), 0))
    fitted = [effects(table, study.table["axes"][numbers, index, 1]) for index in range(len(objectives))]
    found = [
        KnobView(
            name=name, least=float(column.min()), greatest=float(column.max()),
            effects=[each and _effect(each, place, axis) for each, axis in zip(fitted, objectives, strict=True)],
        )
        for place, (name, column) in enumerate(columns.items())
    ]  # fmt: skip
    slices, reason = _slices(store, study, most)
    return EffectsView(
        objectives=[axis.name for axis in objectives],
        units=["%" if axis.transform == "log" else axis.unit for axis in objectives],
        explained=[each and round(each.explained, 2) for each in fitted],
        knobs=sorted(found, key=lambda knob: not any(each and each.low * each.high > 0 for each in knob.effects)),
        slice_units=[axis.unit for axis in objectives],
        slices=slices,
        no_slices=reason,
    )


def _slices(store: Store, study: StudySnapshot, most: float) -> tuple[list[SliceView], str | None]:
    """Returns the slices of the knobs that move an objective most, or none and the reason."""
    if (count := len(study.records)) > most:
        return [], f"a model of {count} trials is not fitted for a page; 'nas study effects {study.name}' fits it"
    found, reason = study_slices(store, study)
    spread = np.nanstd(study.table["axes"][:, :, 1], axis=0) if found else np.ones(1)
    found.sort(key=lambda each: -float((np.ptp(each.mean, axis=0) / np.maximum(spread, 1e-9)).max()))
    if not found and reason is None:
        reason = "no layout of the front can take all values of a knob"
    return [_slice(study, each) for each in found[:_MOST_SLICES]], reason


def _slice(study: StudySnapshot, found: Slice) -> SliceView:
    half = Z95 * found.sd
    ends = np.stack([found.mean, found.mean - half, found.mean + half], axis=-1)
    predicted = [
        [_prediction(*(_value(study, index, float(each)) for each in row)) for row in ends[:, index]]
        for index in range(ends.shape[1])
    ]
    return SliceView(knob=found.knob, values=[*found.values], layouts=[*found.layouts], predicted=predicted)


def _prediction(value: float, one: float, other: float) -> Prediction:
    value, low, high = (float(f"{each:.4g}") for each in (value, min(one, other), max(one, other)))
    return Prediction(value=value, low=low, high=high)


def _effect(found: Effects, place: int, axis: AxisView) -> EffectView:
    """Returns an effect in percent, or turned so that more is more where the objective is maximised."""
    ends = np.array([found.change[place], found.low[place], found.high[place]])
    if axis.transform == "log":
        ends = 100 * np.expm1(ends)
    elif axis.direction == "max":
        ends = -ends[[0, 2, 1]]
    value, low, high = (float(f"{each:.3g}") for each in ends)
    return EffectView(value=value, low=low, high=high)


def target_agreements(study: StudySnapshot) -> Iterator[TargetAgreement]:
    """Compares the order of trials, for every figure, on every two targets that have an axis of it."""
    counted = study.own() & ~study.table["noisy"]
    by_figure: dict[tuple[str, str | None], list[AxisView]] = {}
    for axis in study.axes:
        if axis.place is not None:
            by_figure.setdefault((axis.metric, axis.workload), []).append(axis)
    for (metric, workload), found in by_figure.items():
        columns = [(axis.place or "", study.values(axis.key)[counted]) for axis in found]
        for (first, one), (second, other) in itertools.combinations(columns, 2):
            both = np.isfinite(one) & np.isfinite(other)
            correlation = rank_correlation(one[both], other[both], kendall=False)
            yield TargetAgreement(metric=metric, workload=workload, places=(first, second), correlation=correlation)


def _volume(study: StudySnapshot) -> VolumeView | None:
    value, drawn = study.course.hypervolume, study.volume
    if value is None:
        return None
    if drawn is None:
        return VolumeView(value=value, estimate=None, low=None, high=None)
    return VolumeView(value=value, estimate=drawn.estimate, low=drawn.low, high=drawn.high)


def _corner(study: StudySnapshot) -> list[CornerView]:
    objectives = [axis for axis in study.axes if axis.objective]
    return [
        CornerView(
            objective=axis.name,
            value=_value(study, index, coordinate),
            unit=axis.unit,
            direction=axis.direction,
            coordinate=coordinate,
        )
        for index, (axis, coordinate) in enumerate(zip(objectives, study.corner or [], strict=False))
    ]


def _value(study: StudySnapshot, index: int, coordinate: float) -> float:
    """Returns a coordinate of an objective in its unit."""
    objective = study.space.objectives[index]
    metric, key = METRICS[objective.metric], only_key(study.space, objective)
    if metric.source == "proxy":
        return 0.0 - coordinate
    figure = (study.record.published or {}).get(key, {}).get(objective.metric) if key else None
    if figure is None or figure.value is None:
        return math.exp(coordinate)
    return figure.value * math.exp(coordinate if metric.direction == "min" else -coordinate)


def _queue(store: Store, study: StudySnapshot) -> QueueView:
    active = [
        ActiveTrial(
            trial=each.trial.number,
            state=each.trial.status.state.value,
            rung=each.trial.status.rung,
            origin=each.trial.origin,
            operator=each.trial.operator,
            since=each.trial.updated,
            layout=each.layout.format(),
        )
        for each in study.active(MOST_ACTIVE)
    ]
    own = sum(each.origin != "reference" for each in active)
    under_way = sum(count for state, count in study.states().items() if state not in TERMINAL)
    queues = pages.queues(store)
    places = {job.id: job.place for queue in queues.values() for job in queue}
    jobs = [
        ActiveJob(
            trial=job.trial, device=job.device, state=job.state.value, since=job.updated, attempts=job.attempts,
            place=places.get(job.id), queued=len(queues[job.device]) if job.id in places else None,
        )
        for state in (JobState.LEASED, JobState.QUEUED)
        for job in pages.jobs(store, limit=MOST_ACTIVE, state=state, study_name=study.name)
    ]  # fmt: skip
    jobs.sort(key=lambda job: (job.place is not None, job.device, job.place or 0))
    return QueueView(trials=active, further=max(0, under_way - own), jobs=jobs)


def _usual_panels(axes: Sequence[AxisView]) -> list[tuple[str, str]]:
    """Returns pairs of objectives, or of an objective and a size; axes to maximise are vertical."""
    objectives = [axis for axis in axes if axis.objective]
    pairs = list(itertools.combinations(objectives, 2))
    sizes = [next(axis for axis in axes if axis.key == key) for key in (PARAMS_TOTAL, KV_BYTES)]
    pairs += [(size, objectives[0]) for size in sizes]
    upright = [(b, a) if a.direction == "max" else (a, b) for a, b in pairs]
    return [(x.key, y.key) for x, y in upright[: len(PANELS)]]


def target_names(axes: Sequence[AxisView]) -> list[str]:
    """Returns the devices and runtimes of the axes."""
    return list(dict.fromkeys(axis.place for axis in axes if axis.place is not None))


def axis_of(key: str, axes: Sequence[AxisView]) -> str:
    """Returns the key of an axis.

    Raises:
        UnknownName: no axis has it.
    """
    known = [axis.key for axis in axes]
    if key not in known:
        raise UnknownName("axis", key[:128], known)
    return key


def place_of(place: str | None, axes: Sequence[AxisView]) -> str | None:
    """Returns the device and runtime.

    Raises:
        UnknownName: no axis has it.
    """
    known = target_names(axes)
    if place is not None and place not in known:
        raise UnknownName("place", place[:128], known)
    return place


def _parts(query: Mapping[str, str], name: str) -> list[str]:
    return [part for part in query.get(name, "").split(",") if part]


def _flag(query: Mapping[str, str], name: str) -> bool:
    given = query.get(name, "0")
    if given not in ("0", "1"):
        raise InvalidInput(f"{name} is 0 or 1", where=name)
    return given == "1"


def _range(text: str, axes: Sequence[AxisView]) -> RangeView:
    key, _, bounds = text.partition(":")
    axis = axis_of(key, axes)
    try:
        low, high = map(float, bounds.split(":"))
    except ValueError:
        low = high = math.nan
    if not low <= high or math.isinf(low) or math.isinf(high):
        raise InvalidInput(f"a brushed range is KEY:LOW:HIGH, not {text[:128]!r}", where="pick")
    return RangeView(key=axis, low=low, high=high)


def _checked(study: StudySnapshot, axes: Sequence[str]) -> list[str]:
    """Returns the keys, each once."""
    known = [axis.key for axis in study.axes]
    for key in axes:
        if key not in known:
            raise UnknownName(f"axis of study {study.name}", key[:128], known)
    return [*dict.fromkeys(axes)]


def _columns(study: StudySnapshot, some: NDArray[np.intp], keys: Sequence[str]) -> TrialColumns:
    rows = study.table[some]
    return TrialColumns(
        trial=some.tolist(),
        status=rows["state"].tolist(),
        origin=rows["origin"].tolist(),
        rung=_nullable(rows["rung"], NO_RUNG),
        feasible=_nullable(study.feasible()[some], UNKNOWN),
        noisy=rows["noisy"].astype(int).tolist(),
        values={key: rounded(study.values(key)[some]).tolist() for key in keys},
    )


def _nullable(codes: NDArray[Any], null: int) -> list[int | None]:
    return [None if code == null else code for code in codes.tolist()]


def bounds_of(study: StudySnapshot, trials: Sequence[int], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the fields of the `Bounds` of each of a few trials."""
    known, objectives = [axis.key for axis in study.axes], len(study.space.objectives)
    figures = [study.records[trial].figures if study.further else {} for trial in trials]
    found: list[dict[str, Any]] = [{"values": {}, "low": {}, "high": {}} for _ in trials]
    for key in keys:
        index, values = known.index(key), rounded(study.values(key)[[*trials]]).tolist()
        bounds: Sequence[tuple[float | None, float | None]] = [(None, None)] * len(trials)
        if index < objectives:
            bounds = _objective_intervals(study, trials, index)
        elif index < objectives + len(study.further):
            wanted = study.further[index - objectives]
            taken = [each.get(wanted.key, {}).get(wanted.metric) for each in figures]
            bounds = [(None, None) if each is None else (each.low, each.high) for each in taken]
        for entry, value, (low, high) in zip(found, values, bounds, strict=True):
            for name, number in (("values", value), ("low", low), ("high", high)):
                entry[name][key] = None if number is None or number != number else number
    return found


def _objective_intervals(study: StudySnapshot, trials: Sequence[int], index: int) -> list[tuple[float, float]]:
    value, _, sd = study.table["axes"][[*trials], index].T
    half = Z95 * sd
    if METRICS[study.space.objectives[index].metric].transform == "log":
        low, high = value * np.exp(-half), value * np.exp(half)
    else:
        low, high = value - half, value + half
    return [*zip(rounded(low).tolist(), rounded(high).tolist(), strict=True)]
