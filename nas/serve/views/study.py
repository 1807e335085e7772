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
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.core.trial import TERMINAL
from nas.infra.store import listings as pages
from nas.infra.store import studies
from nas.infra.store.listings import StudyFilter, StudySummary
from nas.infra.store.rows import JobState, StudyState
from nas.infra.store.store import Store
from nas.search.analysis.agreement import RankCorrelation, rank_correlation
from nas.search.analysis.axes import KV_BYTES, PARAMS_TOTAL, AxisView
from nas.search.analysis.headline import Headline, headline
from nas.search.analysis.history import ExpectedGain, Step, VolumeView, expected_gain
from nas.search.analysis.record import readable
from nas.search.analysis.reliability import QualityReliability, quality_reliability
from nas.search.analysis.report import NoiseSummary, noise_summary, time_left
from nas.search.analysis.snapshot import NO_RUNG, NONE, ORIGINS, STATES, UNKNOWN, Snapshots, StudySnapshot, rounded
from nas.search.proposers.sampling import Sampler
from nas.search.study.estimate import Estimate
from nas.search.study.events import ending
from nas.serve.api.submissions import Submission, SubmittedStudies
from nas.serve.views.base import (
    Bounds,
    Moment,
    Standing,
    StudyProgress,
    TrialView,
    View,
    bounds_fields,
    objective_value,
    standing_fields,
    trial_fields,
)

PANELS = (1, 2, 3)
"""Numbers of the panels."""
PAGE = 20
"""Studies on one page of the list: no more than `Snapshots` keeps in memory."""
MOST_RANKED = 50
"""Rows of the ranked list."""
MOST_ACTIVE = 50
"""Rows of the queue."""
_MOMENTS = 60
"""Points of a sparkline."""
_DRAWS = 100
"""Random layouts of a space: a second of work, and a share is known to 5 percent (standard error, at most)."""


class StudyLine(StudyProgress):
    """A row of the list."""

    hypervolume: float | None = Field(None, description="null until the reference point is fixed")
    problem: str | None = Field(None, description="why only its name is known")
    submitted_by: str | None = Field(None, description="name of the API token; null: it was launched on this host")


class StudiesView(View):
    """A page of the list."""

    studies: list[StudyLine]
    next: int | None = Field(description="`before` of the next page; null on the last one")
    waiting: list[Submission] = Field(description="submitted ones that have not begun; on the first page only")
    filter: StudyFilter = Field(serialization_alias="wanted", description="what the listed studies match")


class PanelView(View):
    """One panel: the keys of its axes."""

    number: int
    x: str
    y: str


class RangeView(View):
    """A brushed range of an axis, in its unit."""

    key: str
    low: float
    high: float


class PageState(View):
    """The state of a page, from its query; missing fields have their defaults."""

    panels: list[PanelView]
    log: list[str] = Field(description="axes with a logarithmic scale")
    infeasible: bool = Field(description="whether trials that break a budget are shown")
    incomplete: bool = Field(description="whether stopped and running trials are shown")
    far: bool = Field(description="whether axes reach to what is far from the front")
    target: str | None = Field(
        serialization_alias="place", description="device and runtime whose figures are shown; null: as each axis says"
    )
    pick: list[RangeView]


class TrialColumns(View):
    """Trials, a column for each of their properties."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    trial: list[int]
    status: list[int] = Field(description="indices of `statuses`")
    statuses: tuple[str, ...] = STATES
    origin: list[int] = Field(description="indices of `origins`")
    origins: tuple[str, ...] = ORIGINS
    rung: list[int | None]
    feasible: list[int | None] = Field(description="1: the budgets are kept; 0: not; null: not known")
    values: dict[str, list[float]] = Field(description="axis -> values in its unit; null if not known")


class FrontEntry(Bounds, Standing):
    """A trial on the front, or tied with one that is."""

    trial: int
    on: bool = Field(description="whether it is on the front")
    hv_contribution: float
    ties: tuple[int, ...] = Field(description="trials that differ from it significantly on no objective")
    layout: str


class ReferenceEntry(Bounds):
    """A reference layout."""

    name: str
    trial: int
    layout: str


class Curve(View):
    """The steps in which the hypervolume grew, in columns."""

    trial: list[int]
    complete: list[int] = Field(description="complete trials that counted by then")
    at: list[float] = Field(description="seconds since the epoch")
    device_seconds: list[float] = Field(description="of the study's own measurements by then")
    hypervolume: list[float]
    counted: int = Field(description="complete trials that count by now")


class FrontFile(View):
    """The front with all axes."""

    study: str
    revision: int
    hypervolume: float | None
    axes: list[AxisView]
    front: list[FrontEntry]
    references: list[ReferenceEntry]


class Points(View):
    """A study's trials that changed since a revision, and its front."""

    study: int = Field(description="id; a new one means that the study was created again: start at revision 0")
    name: str
    state: str
    revision: int = Field(description="`since` of the next request")
    trials: int = Field(description="number of trials of the study")
    axes: list[AxisView] = Field(description="all axes of the study")
    columns: TrialColumns = Field(serialization_alias="told")
    front: list[FrontEntry] | None = Field(
        description="all of it, best first, with the objectives and the requested axes; null if unchanged"
    )
    best: int | None = Field(description="the trial that the study's headline names, else the first of the front")
    references: list[ReferenceEntry]
    hypervolume: float | None
    device_seconds: float
    curve: Curve | None = Field(serialization_alias="course", description="all of it; null if unchanged")


class ShareView(View):
    """The share of a kind of block in each tenth of the depth, input first."""

    role: str
    kind: str
    all: list[float]
    front: list[float] | None = Field(description="null while the front is empty")


class KindView(View):
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


class TargetAgreement(View):
    """Rank correlation of layouts measured on two targets (device and runtime); not of references."""

    metric: str
    workload: str | None
    targets: tuple[str, str] = Field(serialization_alias="places")
    correlation: RankCorrelation


class PointView(View):
    """The reference point on one objective; only better trials count for the hypervolume."""

    objective: str
    value: float
    unit: str
    direction: str
    coordinate: float


class ActiveTrial(TrialView):
    """A trial that has not ended."""

    since: float = Field(description="start of its state, in seconds since the epoch")
    layout: str


class ActiveJob(View):
    """A measurement that is queued or running."""

    trial: int | None
    device: str
    state: str
    since: float
    attempts: int
    position: int | None = Field(
        serialization_alias="place", description="in the queue of its device, from 1; null once it runs"
    )
    queued: int | None = Field(description="jobs in the queue of its device, of all studies")


class QueueView(View):
    """Trials and measurements in progress."""

    trials: list[ActiveTrial]
    further: int = Field(description="number of unfinished trials that are not in `trials`")
    jobs: list[ActiveJob]


class StudyView(StudyProgress):
    """The page of a study; the data of its plots come from `points`."""

    over: bool = Field(description="no orchestrator is expected to continue the study")
    time_left: Estimate | None = Field(None, serialization_alias="left", description="of a study that runs")
    seed: int
    version: str
    revision: int
    hypervolume: VolumeView | None = Field(description="null until the reference point is fixed")
    headline: Headline | None = Field(description="the result in sentences; null until the references are measured")
    reference_point: list[PointView] = Field(serialization_alias="corner")
    reliability: QualityReliability | None = Field(description="of the qualities; null before there is a front")
    noise: NoiseSummary | None = Field(description="of the measurements; null before there are any")
    ending: dict[str, str] | None = Field(description="rule and message: why no more layouts are proposed")
    expected_gain: ExpectedGain | None
    axes: list[AxisView]
    targets: list[str] = Field(serialization_alias="places", description="devices and runtimes")
    page: PageState
    queue: QueueView
    no_front: str | None = Field(description="why the front is empty; null if it is not")
    waiting: str | None = Field(None, description="what a study at work without a front waits for")
    ranked: list[FrontEntry] = Field(description="the best of the front, then trials tied with it")
    references: list[ReferenceEntry]
    blocks: list[ShareView] | None = Field(description="shares of kinds of blocks by depth")
    kinds: list[KindView] = Field(description="what became of the trials with each kind of block")
    agreement: list[TargetAgreement]


def studies_view(
    store: Store,
    snapshots: Snapshots,
    before: int | None = None,
    submitted: SubmittedStudies | None = None,
    filter: StudyFilter | None = None,
) -> StudiesView:
    """Returns the newest studies that match a filter, or those older than the id `before`.

    The first page without a filter has the studies of `submitted` that have not begun, too.
    """
    filter = filter or StudyFilter()
    rows = pages.latest_studies(store, limit=PAGE + 1, before=before, matching=filter)
    first = submitted is not None and before is None and filter == StudyFilter()
    return StudiesView(
        filter=filter,
        studies=[line for row in rows[:PAGE] if (line := _line(row, snapshots, submitted)) is not None],
        next=rows[PAGE - 1].id if len(rows) > PAGE else None,
        waiting=submitted.not_begun() if submitted is not None and first else [],
    )


def study_view(store: Store, study: StudySnapshot, query: Mapping[str, str]) -> StudyView:
    """Returns the view of a study.

    Args:
        store: the database.
        study: the snapshot.
        query: of the page's address.

    Raises:
        InvalidInput: the query is malformed.
        UnknownName: no such axis, or device and runtime; or the study is gone.
    """
    row = studies.get(store, study.id)
    view = study.cached("view", lambda: _view(study))
    condition = studies.condition(store, row)
    update = {
        **asdict(condition),
        "time_left": time_left(store, study, condition.state),
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
    keys = _axes_of(study, axes) or objectives
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
        columns=_columns(study, rows, keys),
        front=front_entries(study, front_keys) if news else None,
        best=best_trial(study),
        references=reference_entries(study, front_keys),
        hypervolume=study.curve.hypervolume,
        device_seconds=study.device_seconds,
        curve=_curve(study) if news else None,
    )


def best_trial(study: StudySnapshot) -> int | None:
    """Returns the trial that the headline names, else the first of the front; None without a front."""
    result = study.cached("headline", lambda: headline(study))
    return (
        result.named
        if result and result.named is not None
        else next((row.trial for row in study.front if row.on), None)
    )


def points_json(study: StudySnapshot, since: int = 0, axes: Sequence[str] = ()) -> bytes:
    """Returns `points` as JSON; that of all trials is cached with the snapshot."""
    if since:
        return points(study, since, axes).model_dump_json().encode()
    key = "points", tuple(_axes_of(study, axes))
    return study.cached(key, lambda: points(study, 0, axes).model_dump_json().encode())


def front_file(study: StudySnapshot) -> FrontFile:
    """Returns the front of a study."""
    keys = [axis.key for axis in study.axes]
    return FrontFile(
        study=study.name,
        revision=study.revision,
        hypervolume=study.curve.hypervolume,
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
        target=target_of(query.get("place") or None, axes),
        pick=[_range(part, axes) for part in _parts(query, "pick")],
    )


def _line(row: StudySummary, snapshots: Snapshots, submitted: SubmittedStudies | None) -> StudyLine | None:
    """Returns a row of the list; None if the study was deleted meanwhile."""
    line = StudyLine(
        name=row.name,
        space=row.space,
        desired_state=row.desired_state,
        created=row.created,
        submitted_by=submitted and submitted.submitter(row.name),
        **asdict(row.condition),
    )
    try:
        with readable(row.name):
            study = snapshots.get(row.name)
            return line.model_copy(update={"hypervolume": study.curve.hypervolume, **_progress(study)})
    except UnknownName:
        return None
    except InvalidInput as error:
        return line.model_copy(update={"problem": str(error)})


def _view(study: StudySnapshot) -> StudyView:
    """Returns the part that is the same for all visitors, without the queue, which changes without an event."""
    row = study.record.study
    objectives = [axis.key for axis in study.axes if axis.objective]
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
        reference_point=_reference_point(study),
        reliability=quality_reliability(study),
        noise=noise_summary(study),
        ending=ending(study.record.log.notes),
        expected_gain=expected_gain(study.record.log),
        axes=study.axes,
        targets=target_names(study.axes),
        page=page_state(study.axes, {}),
        queue=QueueView(trials=[], further=0, jobs=[]),
        no_front=_no_front(study),
        ranked=front_entries(study, objectives, MOST_RANKED),
        references=reference_entries(study, objectives),
        blocks=share_views(study),
        kinds=kind_views(study),
        agreement=[*target_agreements(study)],
        **_progress(study),
    )


def _no_front(study: StudySnapshot) -> str | None:
    """Returns why the front is empty; None if it is not."""
    states = study.states()
    if study.curve.front:
        return None
    if study.reference_point is None:
        return "the reference layouts are not measured, so there is no reference point"
    if not sum(states.values()):
        return "no layout was proposed"
    if not (complete := states.get("complete", 0)):
        counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items() if count)
        return f"no trial is complete ({counts})"
    return f"of {complete} complete trial(s), each lacks an objective"


def _waiting(study: StudySnapshot) -> str | None:
    """Returns what must happen before there is a front; None if there is one."""
    if study.curve.front:
        return None
    states = study.states()
    under_way = [f"{count} {state.replace('_', ' ')}" for state, count in states.items() if state not in TERMINAL]
    final_counts = [f"{count} {state}" for state, count in states.items() if state in TERMINAL]
    if study.reference_point is None:
        event = "the reference layouts to be measured: all others are compared with them"
    elif not states:
        event = "the first layouts to be proposed"
    else:
        event = "the first trial to be complete"
    parts = {"under way": under_way, "ended": final_counts}
    counts = "; ".join(f"{what}: {', '.join(words)}" for what, words in parts.items() if words)
    return f"Waiting for {event}" + (f" ({counts})" if counts else "")


def _progress(study: StudySnapshot) -> dict[str, Any]:
    """Returns the fields that the list and the page share."""
    states = study.states()
    done = study.state is StudyState.COMPLETE or ending(study.record.log.notes)
    return {
        "requested": study.record.requested,
        "proposed": sum(states.values()),
        "expected": sum(states.values()) if done else study.record.requested,
        "ended": sum(count for state, count in states.items() if state in TERMINAL),
        "states": states,
        "front": len(study.curve.front),
        "curve": thinned([Moment(step.complete, step.hypervolume) for step in study.curve.steps]),
        "device_seconds": study.device_seconds,
    }


def thinned(curve: Sequence[Moment]) -> list[Moment]:
    """Returns evenly spaced moments, the last one among them."""
    every = -(-len(curve) // _MOMENTS) or 1
    return [*curve[::-1][::every]][::-1]


def front_entries(study: StudySnapshot, keys: Sequence[str], most: int | None = None) -> list[FrontEntry]:
    """Returns the front, best first, then the trials tied with it; at most `most`."""
    rows = study.front[:most]
    return [
        FrontEntry(
            trial=row.trial,
            on=row.on,
            hv_contribution=row.hv_contribution,
            ties=row.ties,
            layout=study.records[row.trial].layout.format(),
            **standing_fields(study, row.trial),
            **bounds,
        )
        for row, bounds in zip(rows, bounds_fields(study, [row.trial for row in rows], keys), strict=True)
    ]


def reference_entries(study: StudySnapshot, keys: Sequence[str]) -> list[ReferenceEntry]:
    """Returns the reference layouts that have been proposed."""
    trials = {name: record.trial.number for name, record in study.record.references.items()}
    return [
        ReferenceEntry(name=name, trial=trial, layout=study.records[trial].layout.format(), **bounds)
        for (name, trial), bounds in zip(trials.items(), bounds_fields(study, [*trials.values()], keys), strict=True)
    ]


def _curve(study: StudySnapshot) -> Curve:
    columns = {name: [getattr(step, name) for step in study.curve.steps] for name in Step._fields}
    device_seconds = study.device_seconds_until(columns["at"]).tolist()
    return Curve(**columns, device_seconds=device_seconds, counted=len(study.counted))


def share_views(study: StudySnapshot) -> list[ShareView]:
    """Returns the shares of all kinds of blocks that some layout has, references not counted, mixers first."""
    blocks = study.table["blocks"]
    if not (proposed := study.proposed()).any():
        return []
    everything, front = np.round(blocks[proposed].mean(axis=0), 4), [*study.curve.front]
    part = np.round(blocks[front].mean(axis=0), 4) if front else None
    return [
        ShareView(role=role, kind=kind, all=everything[i].tolist(), front=None if part is None else part[i].tolist())
        for i, (role, kind) in enumerate(study.block_roles)
        if blocks[proposed][:, i].any()
    ]


def kind_views(study: StudySnapshot) -> list[KindView]:
    """Returns what became of the trials with each kind of block that some have, mixers first."""
    proposed = np.flatnonzero(study.proposed())
    table, front = study.table[proposed], np.isin(proposed, [*study.curve.front])
    searched = np.asarray(table["origin"] == ORIGINS.index("proposal"))
    drawn, views = _drawn_kinds(study.space.model_dump_json()), list[KindView]()
    for index, (role, kind) in enumerate(study.block_roles):
        has = np.asarray(table["blocks"][:, index].any(axis=1))
        if not has.any():
            continue
        counts = np.bincount(table["state"][has], minlength=len(STATES)).tolist()
        views.append(
            KindView(
                role=role,
                kind=kind,
                trials=int(has.sum()),
                front=int((has & front).sum()),
                states={state: count for state, count in zip(STATES, counts, strict=True) if count},
                chosen=float(has[searched].mean()) if searched.any() else None,
                drawn=None if drawn is None else drawn[role, kind] / _DRAWS,
            )
        )
    return views


@lru_cache(maxsize=64)
def _drawn_kinds(space: str) -> Counter[tuple[str, str]] | None:
    """Returns role and kind of block -> how many of `_DRAWS` random layouts of a space (JSON) have it.

    The layouts are always the same ones. Whether a runtime carries them is not asked: it need not be installed where a
    study is read. None: there are none.
    """
    rng = np.random.default_rng(0)
    try:
        sampler = Sampler(SearchSpace.model_validate_json(space))
        drawn = [sampler.draw(rng) for _ in range(_DRAWS)]
    except InvalidInput:
        return None
    return Counter(itertools.chain.from_iterable(set(_kinds(layout)) for layout in drawn))


def _kinds(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields role and kind of the blocks of all layers; of a missing one `NONE`."""
    for layer in map(layout.layer_at, range(layout.depth)):
        yield from (("mixer", kind) for kind in [block.kind for block in layer.mixers] or [NONE])
        yield "ffn", layer.ffn.kind if layer.ffn else NONE


def target_agreements(study: StudySnapshot) -> Iterator[TargetAgreement]:
    """Compares the order of trials, for every figure, on every two targets that have an axis of it."""
    counted = study.proposed()
    by_figure: dict[tuple[str, str | None], list[AxisView]] = {}
    for axis in study.axes:
        if axis.target is not None:
            by_figure.setdefault((axis.metric, axis.workload), []).append(axis)
    for (metric, workload), axes in by_figure.items():
        columns = [(axis.target or "", study.values(axis.key)[counted]) for axis in axes]
        for (first, one), (second, other) in itertools.combinations(columns, 2):
            both = np.isfinite(one) & np.isfinite(other)
            correlation = rank_correlation(one[both], other[both], kendall=False)
            yield TargetAgreement(metric=metric, workload=workload, targets=(first, second), correlation=correlation)


def _volume(study: StudySnapshot) -> VolumeView | None:
    value, drawn = study.curve.hypervolume, study.volume
    if value is None:
        return None
    if drawn is None:
        return VolumeView(value=value, estimate=None, low=None, high=None)
    return VolumeView(value=value, estimate=drawn.estimate, low=drawn.low, high=drawn.high)


def _reference_point(study: StudySnapshot) -> list[PointView]:
    objectives = [axis for axis in study.axes if axis.objective]
    return [
        PointView(
            objective=axis.name,
            value=objective_value(study, index, coordinate),
            unit=axis.unit,
            direction=axis.direction,
            coordinate=coordinate,
        )
        for index, (axis, coordinate) in enumerate(zip(objectives, study.reference_point or [], strict=False))
    ]


def _queue(store: Store, study: StudySnapshot) -> QueueView:
    active = [
        ActiveTrial(
            since=record.trial.updated, layout=record.layout.format(), **trial_fields(study, record.trial.number)
        )
        for record in study.active(MOST_ACTIVE)
    ]
    proposed = sum(trial.origin != "reference" for trial in active)
    under_way = sum(count for state, count in study.states().items() if state not in TERMINAL)
    queues = pages.queues(store)
    positions = {job.id: job.position for queue in queues.values() for job in queue}
    jobs = [
        ActiveJob(
            trial=job.trial,
            device=job.device,
            state=job.state.value,
            since=job.updated,
            attempts=job.attempts,
            position=positions.get(job.id),
            queued=len(queues[job.device]) if job.id in positions else None,
        )
        for state in (JobState.LEASED, JobState.QUEUED)
        for job in pages.jobs(store, limit=MOST_ACTIVE, state=state, study_name=study.name)
    ]
    jobs.sort(key=lambda job: (job.position is not None, job.device, job.position or 0))
    return QueueView(trials=active, further=max(0, under_way - proposed), jobs=jobs)


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
    return list(dict.fromkeys(axis.target for axis in axes if axis.target is not None))


def axis_of(key: str, axes: Sequence[AxisView]) -> str:
    """Returns the key of an axis; raises UnknownName if no axis has it."""
    keys = [axis.key for axis in axes]
    if key not in keys:
        raise UnknownName("axis", key[:128], keys)
    return key


def _axes_of(study: StudySnapshot, keys: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(axis_of(key, study.axes) for key in keys)]


def target_of(target: str | None, axes: Sequence[AxisView]) -> str | None:
    """Returns the device and runtime; raises UnknownName if no axis has it."""
    targets = target_names(axes)
    if target is not None and target not in targets:
        raise UnknownName("place", target[:128], targets)
    return target


def _parts(query: Mapping[str, str], name: str) -> list[str]:
    return [part for part in query.get(name, "").split(",") if part]


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "0")
    if value not in ("0", "1"):
        raise InvalidInput(f"{name} is 0 or 1", where=name)
    return value == "1"


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


def _columns(study: StudySnapshot, numbers: NDArray[np.intp], keys: Sequence[str]) -> TrialColumns:
    rows = study.table[numbers]
    return TrialColumns(
        trial=numbers.tolist(),
        status=rows["state"].tolist(),
        origin=rows["origin"].tolist(),
        rung=_nullable(rows["rung"], NO_RUNG),
        feasible=_nullable(study.feasible()[numbers], UNKNOWN),
        values={key: rounded(study.values(key)[numbers]).tolist() for key in keys},
    )


def _nullable(codes: NDArray[Any], null: int) -> list[int | None]:
    return [None if code == null else code for code in codes.tolist()]
