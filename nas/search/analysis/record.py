"""Reads a study from the database: its trials with their measurements, quality and objectives.

`read_study` reads all of it, `read_news` what changed since. Reports, pages and exports are made from these records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from nas.core.errors import InvalidInput, NasError, UnknownName
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.metrics import METRICS
from nas.core.scoring import (
    PUBLISHED,
    Axis,
    BudgetCheck,
    Figures,
    MeasurementKey,
    QualityValue,
    axis,
    check_budgets,
    check_quality,
    figures_from_json,
    with_file_size,
)
from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.core.workload import Workload
from nas.infra.store import results, studies, trials
from nas.infra.store.results import ResultSummary
from nas.infra.store.rows import Study, Trial
from nas.infra.store.store import Store
from nas.search.proposers import Observation
from nas.search.proxy.ladder import proxy_of
from nas.search.proxy.quality import Quality
from nas.search.study.events import (
    BY_PEOPLE,
    UNREADABLE,
    Calibrated,
    CalibratedDevice,
    Launched,
    Named,
    Observed,
    QualityKnown,
    Remeasured,
    Rescored,
    Spent,
    WarmStarted,
    all_events,
    calibrated_devices,
    notes,
    stored_space,
)

log = logging.getLogger(__name__)
_FROZEN = ("scales", "reference_point")
"""Fields of study events that change how all trials are scored."""
_IN_RECORDS = (QualityKnown.what, Rescored.what, Remeasured.what, Observed.what)
"""Notes that fields of `Record` hold."""
KeyLookup = Callable[[str, str, str | None, str], Sequence[MeasurementKey]]
"""A device's id, a runtime's name, a quantisation (None: not known) and a workload's JSON -> the space's keys."""

_FIGURES: TypeAdapter[dict[str, Figure]] = TypeAdapter(dict[str, Figure])


@contextmanager
def readable(study: str) -> Iterator[None]:
    """Raises `InvalidInput` where the records of a study are malformed, so that it is one study that cannot be shown.

    Args:
        study: its name or id, for the message.
    """
    try:
        yield
    except NasError:
        raise
    except UNREADABLE as error:
        log.exception("the records of study %s are malformed", study)
        raise InvalidInput(f"study {study}: its records are malformed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class MeasurementSummary:
    """A measurement without its repetitions.

    Args:
        key: of the result that holds all of it.
        figures_json: the figures by name, as stored: parsed, those of a large study would fill the memory.
        foreign_cpu: median CPU share of other processes meanwhile, in cores; None: not known.
    """

    key: str
    figures_json: str
    foreign_cpu: float | None = None

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures by name, parsed at each access."""
        return _FIGURES.validate_json(self.figures_json)


@dataclass
class Record:
    """All that is stored of one trial.

    Args:
        trial: its row, without the JSON of the layout.
        layout: of the trial.
        measurements: by key; see `best_measurements`.
        axes: the objectives in the space's order; None where one is not known. Their `source` is the layout's id.
        quality: at the highest rung so far; on fresh seeds, if it was re-scored.
        rungs: rung -> quality there, in the order in which they were reached.
        rescored: quality on fresh seeds; None: only candidates near the front are re-scored.
        remeasured: round -> the second figures, of what was measured again; `measurements` and `axes` are of the first.
        observed: JSON of the last observation that was reported to the proposer, without the layout.
        observed_after_s: when, in seconds while an orchestrator ran.
        results: of all stages, oldest first.
        changed: id of the trial's newest event.
    """

    trial: Trial
    layout: Layout
    measurements: Mapping[MeasurementKey, MeasurementSummary] = field(default_factory=dict)
    axes: Sequence[Axis | None] = ()
    quality: Quality | None = None
    rungs: dict[str, Quality] = field(default_factory=dict)
    rescored: Rescored | None = None
    remeasured: dict[int, Remeasured] = field(default_factory=dict)
    observed: Mapping[str, Any] | None = None
    observed_after_s: float | None = None
    results: Sequence[ResultSummary] = ()
    changed: int = 0

    @property
    def figures(self) -> Figures:
        """The figures by measurement key."""
        return with_file_size({key: measurement.figures for key, measurement in self.measurements.items()})

    @property
    def observation(self) -> Observation | None:
        """The last observation that was reported to the proposer."""
        if self.observed is None:
            return None
        return Observation.from_json({**self.observed, "layout": self.layout.to_json()})

    def apply(self, event: Event, after_s: float) -> None:
        """Updates the record by one of the trial's events, `after_s` seconds of running time after the first launch."""
        self.changed = event.id
        what = event.payload.get("what")
        if reached := QualityKnown.read(event.payload):
            self.rungs[reached.quality.rung] = reached.quality
            if self.rescored is None:
                self.quality = reached.quality
        elif fresh := Rescored.read(event.payload):
            self.quality, self.rescored = fresh.quality, fresh
        elif again := Remeasured.read(event.payload):
            self.remeasured[again.round] = again
        elif what == Observed.what:
            observation = event.payload["observation"]
            self.observed = {name: value for name, value in observation.items() if name != "layout"}
            self.observed_after_s = after_s


class Completion(NamedTuple):
    """A trial that became complete, at a time in seconds since the epoch and of running time."""

    trial: int
    at: float
    elapsed_s: float


@dataclass
class StudyLog:
    """The parts of a study's log that are not in its records.

    Args:
        last: id of the newest event.
        at: its time, in seconds since the epoch.
        launched: whether an orchestrator ever ran.
        elapsed_s: seconds in which one ran.
        judged: id of the newest event that may change the scores of all trials.
        notes: the study's own events, and those of trials that no field of `Record` holds.
        completions: in the order of the log.
    """

    last: int = 0
    at: float = 0.0
    launched: bool = False
    elapsed_s: float = 0.0
    judged: int = 0
    notes: list[Event] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def append(self, event: Event) -> None:
        """Adds the next event."""
        what = event.payload.get("what")
        if what in BY_PEOPLE:
            self.last = event.id
            self.notes.append(event)
            return
        if self.launched and what != Launched.what:
            self.elapsed_s += max(0.0, event.at - self.at)
        self.launched = self.launched or what == Launched.what
        self.last, self.at = event.id, event.at
        if event.kind is EventKind.STUDY:
            self.notes.append(event)
            if what == Calibrated.what or any(name in event.payload for name in _FROZEN):
                self.judged = event.id
        elif event.kind is EventKind.PROGRESS and what not in _IN_RECORDS:
            self.notes.append(event)
        elif event.kind is EventKind.COMPLETE and event.trial is not None:
            self.completions.append(Completion(event.trial, event.at, self.elapsed_s))

    @property
    def devices(self) -> list[CalibratedDevice]:
        """Every device that took part."""
        return sorted(set(calibrated_devices(self.notes)))


@dataclass(frozen=True)
class StudyRecord:
    """A whole study.

    Args:
        study: its row.
        space: the search space.
        records: by trial number, in ascending order.
        published: figures of the published reference; None until they are known.
        reference_point: in the order of the objectives; None until it is fixed.
        log: the rest of the log.
    """

    study: Study
    space: SearchSpace
    records: dict[int, Record]
    published: Figures | None
    reference_point: list[float] | None
    log: StudyLog = field(default_factory=StudyLog)

    @property
    def propose_seconds(self) -> float:
        """Seconds that the proposer took."""
        return float(sum(note.seconds for note in notes(self.log.notes, Spent)))

    @property
    def warm_start(self) -> list[dict[str, Any]]:
        """The observations taken from earlier studies, one row each (`nas.search.study.proposals`)."""
        return [row for note in notes(self.log.notes, WarmStarted) for row in note.studies]

    @property
    def requested(self) -> int | None:
        """The requested number of trials, references not counted; None if the study was never launched."""
        launched = notes(self.log.notes, Launched)
        return launched[-1].trials if launched else None

    @property
    def named(self) -> tuple[int, ...]:
        """The trials that are measured again, as the first measurement chose them; none before the search has ended."""
        named = notes(self.log.notes, Named)
        return named[-1].trials if named else ()

    @cached_property
    def references(self) -> dict[str, Record]:
        """Name -> the reference's record, of those that have been proposed."""
        names = {layout.id: name for name, layout in self.space.references.layouts().items()}
        return {
            names[record.layout.id]: record for record in self.records.values() if record.trial.origin == "reference"
        }

    def checks(self, record: Record) -> list[BudgetCheck]:
        """Returns the verdicts on a trial's budgets as far as they are known: on quality, at the top rung alone."""
        checks = check_budgets(self.space, record.figures, self.published or {}, final=True)
        config, quality = self.space.quality, record.quality
        if quality is None or quality.rung != config.rungs[-1].name:
            return checks
        return checks + check_quality(self.space, quality, final=record.rescored is not None or config.rescore is None)

    def proxy_id(self, record: Record) -> str:
        """Returns the id of the layout's proxy; layouts with the same proxy share the error of its quality."""
        return proxy_of(record.layout, self.space.quality).id


def read_study(store: Store, study: str | int) -> StudyRecord:
    """Reads a study from the database, by name or id.

    Raises:
        UnknownName: no such study.
        InvalidInput: its space is not valid in this version, or its records are malformed.
    """
    id = study if isinstance(study, int) else studies.find_id(store, study)
    # The row after the events: `read_news` sees later changes of either by their events.
    news = all_events(store, id)
    row = studies.get(store, id)
    with readable(row.name):
        return _read(store, row, StudyLog(), news, {}, trials.all(store, row.id))


def read_news(store: Store, before: StudyRecord) -> StudyRecord:
    """Reads the changes since a study was read: only trials with new events are read again.

    Returns:
        `before` itself if nothing has; else what `read_study` would return.

    Raises:
        UnknownName: the study is gone.
        InvalidInput: its space is not valid in this version.
    """
    news = all_events(store, before.study.id, before.log.last)
    if not news:
        return before
    row = studies.get(store, before.study.id)
    touched = sorted({event.trial for event in news if event.trial is not None})
    with readable(row.name):
        study_log = replace(before.log, notes=[*before.log.notes], completions=[*before.log.completions])
        after = _read(store, row, study_log, news, before.records, trials.get_many(store, row.id, touched))
    scored_alike = (row.scales, row.reference_point) == (before.study.scales, before.study.reference_point)
    if scored_alike and after.log.devices == before.log.devices:
        return after
    return read_study(store, row.id)


def _read(
    store: Store,
    study: Study,
    log: StudyLog,
    news: Sequence[Event],
    before: Mapping[int, Record],
    rows: Sequence[Trial],
) -> StudyRecord:
    """Returns the record after `news`; `rows` are those of all trials in them, read after them."""
    read = {row.number: _record(row, before.get(row.number)) for row in rows}
    for event in news:
        log.append(event)
        if event.trial is not None:
            if event.trial not in read:
                raise UnknownName("study", study.name, ())  # it was deleted after its events were read
            read[event.trial].apply(event, log.elapsed_s)
    space, scales, point = stored_space(study), study.scales, study.reference_point
    after = StudyRecord(
        study=study,
        space=space,
        records={**before, **read},
        published=figures_from_json(scales["figures"][PUBLISHED]) if scales else None,
        reference_point=[point[objective.name] for objective in space.objectives] if point else None,
        log=log,
    )
    lookup = key_lookup(space, log.devices)
    for number, summaries in results.summaries(store, study.id, [*read] if before else None).items():
        if number in read:
            read[number].results = summaries
            keys = {row.result for again in read[number].remeasured.values() for row in again.measurements}
            second = keys | {results.imported_key(study.id, key) for key in keys}
            first = [summary for summary in summaries if summary.key not in second]
            read[number].measurements = best_measurements(first, lookup)
    for record in read.values():
        record.axes = axes_of(record, after)
    return after


def _record(row: Trial, before: Record | None) -> Record:
    layout = before.layout if before else Layout.from_json(row.layout)
    row = replace(row, layout={})
    if before is None:
        return Record(row, layout)
    copies: dict[str, Any] = {"rungs": {**before.rungs}, "remeasured": {**before.remeasured}}
    return replace(before, trial=row, measurements={}, results=(), **copies)


def key_lookup(space: SearchSpace, devices: Sequence[CalibratedDevice]) -> KeyLookup:
    """Returns the lookup for a study: one device or workload may have several names in its space.

    Args:
        space: of the study.
        devices: that took part.
    """

    @cache
    def lookup(device: str, runtime: str, quantisation: str | None, workload: str) -> Sequence[MeasurementKey]:
        settings = Workload.model_validate_json(workload).key()
        labels = [
            label
            for label, spec in space.labelled.items()
            if runtime == label or (runtime, quantisation) == (spec.name, spec.quantisation)
        ]
        return [
            MeasurementKey(place.name, label, name)
            for place in devices
            if place.id == device
            for label in labels
            for name, named in space.workloads.items()
            if place.placed(name, named).key() == settings
        ]

    return lookup


def best_measurements(stored: Iterable[ResultSummary], lookup: KeyLookup) -> dict[MeasurementKey, MeasurementSummary]:
    """Returns a trial's measurements by key: the one with the most repetitions that count, of equal ones the newest.

    Args:
        stored: its results, oldest first.
        lookup: of the study.
    """
    stored = list(stored)
    quantisations = {result.artifact: result.quantisation for result in stored if result.quantisation is not None}
    best: dict[MeasurementKey, MeasurementSummary] = {}
    repetitions: dict[MeasurementKey, int] = {}
    for result in stored:
        if result.stage != "measure" or result.device is None:
            continue  # not a measurement, or a failure that is kept as the result
        assert result.runtime and result.workload and result.figures, "a measurement has all of these"
        summary = MeasurementSummary(result.key, result.figures, result.foreign_cpu)
        count = summary.figures["ttft"].n
        quantisation = quantisations.get(result.artifact)
        for key in lookup(result.device, result.runtime, quantisation, result.workload):
            if count >= repetitions.get(key, 0):
                best[key], repetitions[key] = summary, count
    return best


def axes_of(record: Record, study: StudyRecord) -> list[Axis | None]:
    """Computes the objectives of a record."""
    space, published = study.space, study.published
    if published is None:
        return [None] * len(space.objectives)
    figures, quality = record.figures, QualityValue(0.0, 0.0, "")
    if record.quality:
        quality = QualityValue.of(record.quality, record.layout.id)
    return [
        None
        if METRICS[objective.metric].source == "proxy" and record.quality is None
        else axis(space, objective, figures, published, quality)
        for objective in space.objectives
    ]
