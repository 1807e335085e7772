"""The view of one study, from what is kept in memory of it and a few short queries."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from nas.core.metrics import METRICS
from nas.core.trial import TERMINAL
from nas.service.ending import CLOSED, EXPECTED, Expected
from nas.service.live_axes import only_place
from nas.service.live_points import front_entries, reference_entries
from nas.service.live_reading import PATIENCE_S, BeingRead
from nas.service.live_studies import KEPT, LiveStudies
from nas.service.live_study import LiveStudy
from nas.service.studies_view import Moment, ReadingView, thinned
from nas.service.study_models import (
    ActiveJob,
    ActiveTrial,
    CornerView,
    EndingView,
    GainView,
    QueueView,
    RankedView,
    StudyView,
    VolumeView,
)
from nas.service.study_state import page_state, place_names
from nas.service.study_summary import Summaries
from nas.store import columns, events, pages, studies
from nas.store.rows import JobState, Study
from nas.store.store import Store

MOST_RANKED = 50
MOST_ACTIVE = 50
_LAST_PROPOSALS = 50
"""Trials among which the last expectation is looked for."""


_TIMES_ITS_COST, _LONGEST_S = 20.0, 1.0
"""A view is kept for so many times what it took, and so many seconds, at most: jobs change without an event."""


class _Kept(NamedTuple):
    """A view that was found, for what it holds, and until when."""

    version: tuple[object, ...]
    until: float
    view: StudyView


class StudyViews:
    """Views of studies.

    Args:
        store: the database.
        live: the studies in memory.
    """

    def __init__(self, store: Store, live: LiveStudies) -> None:
        self._store, self._live = store, live
        self._summaries = Summaries()
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def view(self, name: str, query: Mapping[str, str], *, whole: bool = True) -> StudyView:
        """The view of a study.

        Args:
            name: of the study.
            query: of the page's address.
            whole: with what all layouts say; else without, where they have not been read: that is begun.

        Raises:
            BeingRead: the study, or its layouts for `whole`.
            InvalidInput: its space is none of this version's, or the query says what none can.
            UnknownName: no such study, axis or place.
        """
        study, row = self._live.get(name), studies.get(self._store, name)
        reading = None
        try:
            study.read_layouts(PATIENCE_S if whole else 0.0)
        except BeingRead as error:
            if whole:
                raise
            reading = ReadingView(done=error.done, total=error.total)
        with study.lock:
            view = self._shared(study, row, reading)
            return view.model_copy(update={"page": page_state(study.axes, query)})

    def _shared(self, study: LiveStudy, row: Study, reading: ReadingView | None) -> StudyView:
        """What all who look see: for a moment after it was found, as long as nothing is known otherwise."""
        version = study.revision, row.desired_state, reading
        with self._lock:
            kept = self._kept.get(study.id)
        now = time.monotonic()
        if kept is None or kept.version != version or now > kept.until:
            view = self._view(study, row, reading)
            cost = time.monotonic() - now
            kept = _Kept(version, now + min(_LONGEST_S, _TIMES_ITS_COST * cost), view)
        with self._lock:
            self._kept[study.id] = kept
            self._kept.move_to_end(study.id)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return kept.view

    def _view(self, study: LiveStudy, row: Study, reading: ReadingView | None) -> StudyView:
        states = study.table.states()
        objectives = [axis.key for axis in study.axes if axis.objective]
        entries = front_entries(study, objectives, MOST_RANKED)
        summary = self._summaries.of(study)
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
            wanted=study.wanted,
            proposed=sum(states.values()),
            ended=sum(count for state, count in states.items() if state in TERMINAL),
            states=states,
            device_seconds=study.device_seconds.total,
            hypervolume=_volume(study),
            corner=_corner(study),
            course=thinned([Moment(step.complete, step.hypervolume) for step in study.course.steps]),
            ending=_ending(self._store, row),
            expected_gain=_expected_gain(self._store, study),
            axes=study.axes,
            places=place_names(study.axes),
            page=page_state(study.axes, {}),
            queue=_queue(self._store, study, states),
            front=len(study.course.front),
            ranked=[
                RankedView(**dict(entry), place=place if entry.on else None) for place, entry in enumerate(entries, 1)
            ],
            references=reference_entries(study, objectives),
            blocks=summary.blocks,
            reading=reading,
            agreement=summary.agreement,
        )


def _volume(study: LiveStudy) -> VolumeView | None:
    value, drawn = study.course.hypervolume, study.volume()
    if value is None:
        return None
    return VolumeView(value=value, low=drawn.low if drawn else None, high=drawn.high if drawn else None)


def _corner(study: LiveStudy) -> list[CornerView]:
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


def _value(study: LiveStudy, index: int, coordinate: float) -> float:
    """What a coordinate of an objective is in its unit."""
    objective = study.space.objectives[index]
    metric, place = METRICS[objective.metric], only_place(study.space, objective)
    if metric.source == "proxy":
        return 0.0 - coordinate
    figure = (study.constants.published or {}).get(place, {}).get(objective.metric) if place else None
    if figure is None or figure.value is None:
        return math.exp(coordinate)
    return figure.value * math.exp(coordinate if metric.direction == "min" else -coordinate)


def _ending(store: Store, study: Study) -> EndingView | None:
    told = events.notes(store, study.id, CLOSED)
    return EndingView.model_validate(told[-1].payload) if told else None


def _expected_gain(store: Store, study: LiveStudy) -> GainView | None:
    trials = len(study.table)
    payload = columns.last_progress(store, study.id, range(max(0, trials - _LAST_PROPOSALS), trials), EXPECTED)
    if payload is None:
        return None
    told = Expected(*(payload[name] for name in Expected._fields))
    if told.of_batch is None:
        return None
    share = told.of_batch / told.hypervolume if told.hypervolume else None
    return GainView(hypervolume=told.of_batch, batch=told.batch, share=share)


def _queue(store: Store, study: LiveStudy, states: Mapping[str, int]) -> QueueView:
    rows = columns.active(store, study.id, study.table.going_on(MOST_ACTIVE))
    layouts = study.details.texts([row.number for row in rows])
    active = [
        ActiveTrial(
            trial=row.number,
            state=row.state,
            rung=row.rung,
            origin=row.origin,
            operator=row.operator,
            since=row.updated,
            layout=layouts[row.number],
        )
        for row in rows
    ]
    own = sum(each.origin != "reference" for each in active)
    under_way = sum(count for state, count in states.items() if state not in TERMINAL)
    jobs = [
        ActiveJob(
            trial=job.trial, device=job.device, state=job.state.value, since=job.updated, attempts=job.attempts
        )
        for state in (JobState.LEASED, JobState.QUEUED)
        for job in pages.jobs(store, limit=MOST_ACTIVE, state=state, study_name=study.name)
    ]  # fmt: skip
    return QueueView(trials=active, further=max(0, under_way - own), jobs=jobs)
