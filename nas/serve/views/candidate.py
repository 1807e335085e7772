"""View models of candidates: one with all its results, a comparison of several, and forecasts of hardware models."""

from __future__ import annotations

import math
import shlex
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.measurement import ClockName, Figure, Measurement, Repetition
from nas.core.metrics import METRICS
from nas.core.profile import ProfileSummary
from nas.core.quality_config import QualityConfig
from nas.core.scoring import PUBLISHED, BudgetCheck, MeasurementKey, log_sd, measurement_keys
from nas.core.space import Objective, SearchSpace
from nas.core.stats import Z95
from nas.core.workload import Workload
from nas.infra.store import artifacts, results
from nas.infra.store.rows import Result
from nas.infra.store.store import Store
from nas.measure.runtimes.base import Artifact
from nas.model.text.corpus import CorpusRef
from nas.search.analysis.hardware import ModelError, study_models
from nas.search.analysis.record import Record
from nas.search.analysis.snapshot import Snapshots, StudySnapshot
from nas.search.proxy.job import TrainJob, TrainResult
from nas.search.proxy.ladder import rung_jobs
from nas.search.study.events import CorpusUsed, Marked, Profiled, marks, notes
from nas.serve.views.layout import LayoutView, align, differs, distances, layer_codes, layout_view
from nas.serve.views.study import Bounds, bounds_of, share_of_volume

FEWEST, MOST = 2, 6
MOST_TRIALS = 500
"""Largest study whose models are fitted for a page; larger ones take too long."""
_NO_CORPUS = "f" * 64
"""Hash for an unknown corpus: no stored training has it, and those of tasks do not depend on it."""
_GENERATIONS = 8
_ANCESTORS = 32
_NEIGHBOURS = 5
_BENCH_FLAGS = ("prompt", "gen", "context", "threads")
_STUDIES = 4
_FRESH_S = 60.0


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Training(BaseModel):
    """One training of the proxy."""

    model_config = ConfigDict(frozen=True)

    key: str
    """Of the result."""
    rung: str | None
    """The first rung that trains it; None if it is not known any more."""
    run: str
    """'lm' or the task's name."""
    seed: int | None
    """None if it is not known."""
    steps: int
    tokens: int
    seconds: float
    device: str
    curve: tuple[tuple[int, float], ...]
    """(step, mean training loss in nats since the point before)."""
    scores: dict[str, float]
    """Evaluation group -> amount above chance."""
    losses: dict[str, float]
    accuracy: dict[str, float]
    weights_sha256: str

    @property
    def name(self) -> str:
        """The run and rung, such as 'lm, rung long'."""
        return f"{self.run}, rung {self.rung}" if self.rung else self.run


class ObjectiveView(_Frozen):
    """One objective, with the reference layouts' values."""

    name: str
    metric: str
    unit: str
    """'x' for a ratio to the published reference over several devices or runtimes."""
    direction: str
    value: float | None
    coordinate: float | None
    sd: float | None
    """Of the coordinate."""
    rung: str | None
    """Rung of a quality; qualities of different rungs do not compare."""
    references: dict[str, float | None]
    """Reference layout -> its value, at the same rung."""


class RepetitionView(_Frozen):
    """One repetition with every token's time, as it was read: not corrected."""

    valid: bool
    reason: str | None
    """Why it does not count."""
    attempt: int
    ttft_ms: float | None
    token_ms: tuple[float, ...]
    drift: float | None
    """Reference run's time / its calibration - 1."""
    temperature_c: float | None
    temperature_unread: str | None
    """Why there is no temperature."""
    throttled: bool | None
    governor: str | None
    power_source: str | None


class MeasurementView(_Frozen):
    """A measurement: one device, runtime and workload."""

    place: MeasurementKey
    device_id: str
    workload: Workload
    build: str
    patched: bool
    artifact: str
    protocol: int
    """Version of the measurement protocol."""
    clock: ClockName
    noisy: bool
    foreign_cpu: float | None
    """Median CPU share of other processes, in cores."""
    refused_share: float
    drift: float | None
    calibration_ms: float | None
    wall_s: float
    figures: dict[str, Figure]
    ratios: dict[str, float]
    """Figure -> ratio to the published reference's."""
    repetitions: tuple[RepetitionView, ...]

    @property
    def name(self) -> str:
        """Workload, device and runtime, such as 'chat on laptop/llama.cpp'."""
        return f"{self.place.workload} on {self.place.device}/{self.place.runtime}"


class EvaluationView(_Frozen):
    """One evaluation group at one rung; the published reference has 1."""

    rung: str
    group: str
    """'' for the quality, the mean over groups."""
    value: float
    sd: float | None
    """Over seeds; only the quality has one."""
    references: dict[str, float | None]


class ArtifactView(_Frozen):
    """An exported file."""

    sha256: str
    size: int
    runtime: str
    quantisation: str
    arch: str
    patched: bool
    weights: str
    scale: str
    """'deploy' for the layout itself, 'proxy' for its trained proxy."""
    stored: str
    """SHA-256 of the stored content: the file, or the recipe that a runner makes it from."""
    recipe: bool
    kept: bool
    """Whether the store still has it."""


class AncestorView(_Frozen):
    """An ancestor of the trial."""

    trial: int
    generations: int
    """1: a parent."""
    layout: str
    layout_id: str
    state: str
    origin: str
    operator: str | None
    parents: tuple[int, ...]


class ProfileView(ProfileSummary):
    """Where the time of one request goes; the newest that was kept for a device, runtime and request."""

    device_id: str
    runtime: str
    build: str
    prompt: int
    gen: int
    threads: int
    taken: float
    """When, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """Device, runtime and request, such as 'laptop/llama.cpp, 512 tokens in, 128 out, 1 thread'."""
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        return f"{self.device_id}/{self.runtime}, {self.prompt} tokens in, {self.gen} out, {threads}"


class CommandView(_Frozen):
    """A command that reproduces a part of the results."""

    what: str
    command: str
    beside: tuple[str, ...]
    """Settings without an option of the command that differed from its defaults, such as 'kv_type q8_0'."""


class Standing(_Frozen):
    """Where a complete trial is relative to the front."""

    place: int | None
    """Rank on the front by hypervolume contribution, from 1; None: not on it."""
    front: int
    """Trials on the front."""
    tied: bool
    """Not on the front, but within the noise of a trial on it."""
    p_front: float | None
    """Share of draws from the noise in which it is on the front; None if too many trials are on it to draw."""
    gain: float | None
    """Share of the hypervolume that it alone adds; None where it is not on the front."""


class NeighbourView(Bounds):
    """A trial with a similar layout."""

    trial: int
    name: str
    """'trial 12', or the reference layout's name."""
    distance: int
    """Cost of the alignment of both: 1 for each other mixer or feed-forward, 2 for each layer that one lacks."""
    state: str
    layout: str


class CandidateView(_Frozen):
    """All that is stored of one candidate."""

    study: str
    trial: int
    name: str
    """'trial 12', or the reference layout's name."""
    state: str
    rung: int | None
    reason: str | None
    star: bool
    tags: tuple[str, ...]
    note: str
    """What people wrote about it."""
    origin: str
    operator: str | None
    record: dict[str, Any]
    """Data of the proposer for the layout."""
    created: float
    updated: float
    noisy: bool
    layout: LayoutView
    objectives: tuple[ObjectiveView, ...]
    budgets: tuple[BudgetCheck, ...]
    places: tuple[MeasurementView, ...]
    profiles: tuple[ProfileView, ...]
    evaluations: tuple[EvaluationView, ...]
    trainings: tuple[Training, ...]
    artifacts: tuple[ArtifactView, ...]
    ancestors: tuple[AncestorView, ...]
    commands: tuple[CommandView, ...]
    standing: Standing | None
    """None unless the trial is complete and counts for the front."""
    neighbours: tuple[NeighbourView, ...]
    """Trials with the most similar layouts, nearest first."""
    previous: int | None
    """Number of the trial before; None for the first."""
    next: int | None


class LayerRow(_Frozen):
    """Layers that are aligned."""

    layers: tuple[int | None, ...]
    """For each candidate the index of its layer; None for a gap."""
    differs: bool


class Ratio(_Frozen):
    """Ratio of a figure to the first candidate's, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def apart(self) -> bool:
        """Whether the two differ significantly."""
        return not self.low <= 1 <= self.high


class FigureRow(_Frozen):
    """One figure on one device and runtime."""

    place: MeasurementKey
    metric: str
    unit: str
    direction: str
    figures: tuple[Figure | None, ...]
    """None: not measured."""
    ratios: tuple[Ratio | None, ...]
    """None for the first, and if a figure or its interval is missing."""


class EvaluationRow(_Frozen):
    """One evaluation group at one rung."""

    rung: str
    group: str
    """'' for the quality, the mean over groups."""
    values: tuple[float | None, ...]
    differences: tuple[float | None, ...]
    """To the first candidate."""


class ComparisonView(_Frozen):
    """Several candidates, compared with the first."""

    study: str
    """Of the first candidate."""
    candidates: tuple[CandidateView, ...]
    """Names of those of other studies begin with the study's."""
    contexts: tuple[int, ...]
    """Tokens for which all candidates' caches are known."""
    apart: tuple[str, ...]
    """Why figures of other studies have rows of their own."""
    rows: tuple[LayerRow, ...]
    figures: tuple[FigureRow, ...]
    evaluations: tuple[EvaluationRow, ...]


class ForecastView(BaseModel):
    """One figure of one candidate, forecast by a model that was fitted without it."""

    model_config = ConfigDict(frozen=True)

    device: str
    runtime: str
    workload: str
    metric: str
    unit: str
    measured: float | None
    predicted: float | None
    low: float | None
    """Lower end of the forecast's 95 % interval."""
    high: float | None
    mape: float | None
    """Of the model, over all measured candidates."""
    measurements: int
    reason: str | None
    """Why there is no forecast."""


class CardView(_Frozen):
    """A trial in short."""

    reason: str | None
    """Why it ended; None where its state says it."""
    layout: str


class ForecastsView(BaseModel):
    """All forecasts of one candidate."""

    model_config = ConfigDict(frozen=True)

    forecasts: tuple[ForecastView, ...]
    reason: str | None = None
    """Why there are none."""


def candidate_views(store: Store, study: StudySnapshot, numbers: Sequence[int]) -> list[CandidateView]:
    """Returns the views of some trials of a study, in the order asked for.

    Raises:
        UnknownName: no such trial.
    """
    return [_view(store, study, _record(study, number)) for number in numbers]


def card_view(study: StudySnapshot, number: int) -> CardView:
    """Returns a trial's layout, and why it ended.

    Raises:
        UnknownName: no such trial.
    """
    record = _record(study, number)
    return CardView(reason=record.trial.status.reason, layout=record.layout.format())


def _record(study: StudySnapshot, number: int) -> Record:
    if number not in study.records:
        count = len(study.records)
        raise UnknownName(f"trial of study {study.name}", str(number), [f"0 to {count - 1}"] if count else [])
    return study.records[number]


def comparison_view(
    store: Store, study: StudySnapshot, numbers: Sequence[int], others: Sequence[tuple[StudySnapshot, int]] = ()
) -> ComparisonView:
    """Compares some trials, in the order asked for.

    Figures of different studies share a row where they were measured on the same device by the same build, protocol and
    workload, and qualities where both studies have the same ladder and published reference.

    Args:
        store: the database.
        study: of the first trials.
        numbers: of its trials.
        others: trials of other studies.

    Raises:
        InvalidInput: too few, too many, or one twice.
        UnknownName: no such trial.
    """
    wanted = [*numbers, *(f"{other.name}/{number}" for other, number in others)]
    if not FEWEST <= len(wanted) <= MOST or len(set(wanted)) < len(wanted):
        raise InvalidInput(f"tick {FEWEST} to {MOST} different trials to compare, not {wanted}", where="trial")
    candidates = candidate_views(store, study, numbers)
    apart: list[str] = []
    for other, number in others:
        (found,) = candidate_views(store, other, [number])
        candidates.append(_of_another_study(found, other, study, candidates, apart))
    layouts = [Layout.parse(each.layout.text) for each in candidates]
    rows = [LayerRow(layers=row, differs=differs(layouts, row)) for row in align(layouts)]
    return ComparisonView(
        study=study.name,
        candidates=tuple(candidates),
        contexts=_common([[cost.context for cost in each.layout.contexts] for each in candidates]),
        apart=tuple(dict.fromkeys(apart)),
        rows=tuple(rows),
        figures=tuple(_figures(candidates)),
        evaluations=tuple(_compared_evaluations(candidates)),
    )


def _common(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(each for each in lists[0] if all(each in other for other in lists))


def _of_another_study(
    view: CandidateView, own: StudySnapshot, study: StudySnapshot, before: Sequence[CandidateView], apart: list[str]
) -> CandidateView:
    """Returns the view of a trial of the study `own`; what was measured otherwise than in `before` has other names.

    Args:
        view: of the trial.
        own: its study.
        study: the comparison's.
        before: candidates that it is compared with.
        apart: gets the reasons.
    """

    def measured(each: MeasurementView) -> dict[str, object]:
        return {"device": each.device_id, "build": each.build, "protocol": each.protocol, "workload": each.workload}

    known = {each.place: measured(each) for candidate in before for each in candidate.places}
    places = []
    for each in view.places:
        met = known.get(each.place, measured(each))
        if differing := [f"another {name}" for name, value in measured(each).items() if met[name] != value]:
            apart.append(f"{each.name}: {own.name} has {' and '.join(differing)}")
            place = each.place._replace(workload=f"{each.place.workload} of {own.name}")
            each = each.model_copy(update={"place": place})
        places.append(each)
    evaluations = view.evaluations
    references = [space.references.layouts()[PUBLISHED] for space in (own.space, study.space)]
    if own.space.quality != study.space.quality or references[0] != references[1]:
        why = "another ladder or another published reference, so its scores are on another scale"
        apart.append(f"quality: {own.name} has {why}")
        evaluations = tuple(each.model_copy(update={"rung": f"{each.rung} of {own.name}"}) for each in evaluations)
    name = f"{own.name} {view.name}"
    return view.model_copy(update={"name": name, "places": tuple(places), "evaluations": evaluations})


def trainings(
    config: QualityConfig, layout: Layout, stored: Iterable[Result], corpora: Sequence[str] = ()
) -> list[Training]:
    """Returns the finished trainings among a trial's results, by rung, run and seed.

    Args:
        config: the study's ladder.
        layout: of the trial.
        stored: results of the trial, of any stage.
        corpora: hashes of the corpora of the study's language models, as far as known.
    """
    values = [row.payload["value"] for row in stored if row.stage == "train" and "value" in row.payload]
    jobs = _jobs(config, layout, corpora or (_NO_CORPUS,))
    if config.anchors is not None and corpora:  # anchors are trained under the trial of the published reference
        values = [value for value in values if value["key"] in jobs]
    found = [_training(config, TrainResult.model_validate(value), jobs) for value in values]
    order = {rung.name: index for index, rung in enumerate(config.rungs)}
    return sorted(found, key=lambda each: (order.get(each.rung or "", len(order)), each.run, each.seed or 0, each.key))


class Forecasts:
    """A cache of the hardware models of the latest studies.

    Args:
        snapshots: of the studies.
        clock: for the age of a fit; the models of a running study are fitted again at most once a minute.
    """

    def __init__(self, snapshots: Snapshots, clock: Clock | None = None) -> None:
        self._snapshots, self._clock = snapshots, clock or SystemClock()
        self._fitted: OrderedDict[int, tuple[StudySnapshot, float]] = OrderedDict()
        self._lock = Lock()

    def of_trial(self, name: str, number: int) -> ForecastsView:
        """Returns every model's forecast of one trial. One fit at a time: it takes seconds.

        Raises:
            UnknownName: no such study.
        """
        study = self._snapshots.get(name)
        if (count := len(study.records)) > MOST_TRIALS:
            return ForecastsView(
                forecasts=(),
                reason=f"models of {count} trials are not fitted for a page; 'nas study hardware {name}' fits them",
            )
        with self._lock:
            fitted, at = self._fitted.get(study.id, (study, -math.inf))
            if self._clock.monotonic() - at >= _FRESH_S:
                fitted = study
                at = self._clock.monotonic()
            models = fitted.cached("hardware models", lambda: study_models(fitted.record))
            self._fitted[study.id] = fitted, at
            self._fitted.move_to_end(study.id)
            if len(self._fitted) > _STUDIES:
                self._fitted.popitem(last=False)
        return ForecastsView(forecasts=tuple(_forecast_view(model, number) for model in models))


def _view(store: Store, study: StudySnapshot, record: Record) -> CandidateView:
    trial, space = record.trial, study.space
    stored = results.of_trial(store, trial.study, trial.number)
    taken = _measurements(record, stored)
    written = _artifacts(store, record, stored)
    named = {each.trial.number: reference for reference, each in study.record.references.items()}
    corpora = sorted({note.hash for note in notes(study.record.log.notes, CorpusUsed)})
    mark = marks(study.record.log.notes).get(trial.number) or Marked(trial.number, star=False, tags=(), text="")
    windows = [space.workloads[workload].window for workload in space.measured]
    return CandidateView(
        study=study.name,
        trial=trial.number,
        name=named.get(trial.number, f"trial {trial.number}"),
        state=trial.status.state.value,
        rung=trial.status.rung,
        reason=trial.status.reason,
        star=mark.star,
        tags=mark.tags,
        note=mark.text,
        origin=trial.origin,
        operator=trial.operator,
        record={key: value for key, value in (trial.record or {}).items() if key != "layout"},
        created=trial.created,
        updated=trial.updated,
        noisy=record.noisy,
        layout=layout_view(record.layout, max(windows), *windows),
        objectives=tuple(_objectives(study, record)),
        budgets=tuple(study.record.checks(record)),
        places=tuple(_measurement(study, key, each) for key, each in taken.items()),
        profiles=tuple(_profiles(study, record)),
        evaluations=tuple(_evaluations(study, record)),
        trainings=tuple(trainings(space.quality, record.layout, stored, corpora)),
        artifacts=tuple(written),
        ancestors=tuple(_ancestors(study, record)),
        commands=tuple(_commands(study.name, record, taken, written)),
        standing=_standing(study, trial.number),
        neighbours=tuple(_neighbours(study, trial.number, named)),
        previous=trial.number - 1 if trial.number else None,
        next=trial.number + 1 if trial.number + 1 < len(study.records) else None,
    )


def _standing(study: StudySnapshot, number: int) -> Standing | None:
    if number not in study.counted or study.corner is None:
        return None
    found = next(((rank, row) for rank, row in enumerate(study.front, 1) if row.trial == number), None)
    if found is None:
        return Standing(
            place=None, front=len(study.course.front), tied=False, p_front=study.chances.get(number, 0.0),
            gain=None,
        )  # fmt: skip
    rank, row = found
    return Standing(
        place=rank if row.on else None, front=len(study.course.front), tied=not row.on, p_front=row.p_front,
        gain=share_of_volume(study, row.hv_contribution) if row.on else None,
    )  # fmt: skip


def _neighbours(study: StudySnapshot, number: int, names: Mapping[int, str]) -> Iterator[NeighbourView]:
    codes = study.cached("layer codes", lambda: layer_codes([each.layout for each in study.records.values()]))
    apart = distances(codes, number)
    order = [int(each) for each in np.argsort(apart, kind="stable") if each != number][:_NEIGHBOURS]
    objectives = [axis.key for axis in study.axes if axis.objective]
    for other, bounds in zip(order, bounds_of(study, order, objectives), strict=True):
        record = study.records[other]
        yield NeighbourView(
            trial=other,
            name=names.get(other, f"trial {other}"),
            distance=int(apart[other]),
            state=record.trial.status.state.value,
            layout=record.layout.format(),
            **bounds,
        )


def _objectives(study: StudySnapshot, record: Record) -> Iterator[ObjectiveView]:
    theirs = {name: each.axes for name, each in study.record.references.items()}
    for index, (objective, reached) in enumerate(zip(study.space.objectives, record.axes, strict=True)):
        columns = {name: axis.value if (axis := axes[index]) else None for name, axes in theirs.items()}
        rung = record.quality.rung if record.quality and METRICS[objective.metric].source == "proxy" else None
        if rung is not None and record.rescored is not None:
            rung = f"{rung}, on fresh seeds"
        elif rung is not None:
            columns = _qualities(study, rung)
        unit, direction = _unit_and_direction(study.space, objective)
        yield ObjectiveView(
            name=objective.name,
            metric=objective.metric,
            unit=unit,
            direction=direction,
            value=reached.value if reached else None,
            coordinate=reached.coordinate if reached else None,
            sd=reached.sd if reached else None,
            rung=rung,
            references=columns,
        )


def _qualities(study: StudySnapshot, rung: str) -> dict[str, float | None]:
    """Returns reference -> its quality at a rung."""
    return {
        name: each.rungs[rung].value if rung in each.rungs else None for name, each in study.record.references.items()
    }


def _unit_and_direction(space: SearchSpace, objective: Objective) -> tuple[str, str]:
    metric = METRICS[objective.metric]
    ratio = len(measurement_keys(space, objective)) > 1
    return ("x", "min") if ratio else (metric.unit, metric.direction)


def _measurements(record: Record, stored: Sequence[Result]) -> dict[MeasurementKey, Measurement]:
    """Returns the trial's measurements with their repetitions."""
    payloads = {row.result_key: row.payload for row in stored}
    found = sorted(record.measurements.items())
    return {key: Measurement.model_validate(payloads[summary.key]["value"]) for key, summary in found}


def _measurement(study: StudySnapshot, key: MeasurementKey, taken: Measurement) -> MeasurementView:
    base = (study.record.published or {}).get(key, {})
    ratios = {
        name: figure.value / theirs
        for name, figure in taken.figures.items()
        if figure.value is not None and name in base and (theirs := base[name].value)
    }
    shared = (
        "build", "patched", "artifact", "protocol", "clock", "noisy", "foreign_cpu", "refused_share", "drift",
        "calibration_ms", "wall_s", "figures",
    )  # fmt: skip
    return MeasurementView(
        place=key,
        device_id=taken.device,
        workload=taken.workload,
        ratios=ratios,
        repetitions=tuple(_repetition(each) for each in taken.repetitions),
        **{name: getattr(taken, name) for name in shared},
    )


def _repetition(taken: Repetition) -> RepetitionView:
    sample, conditions = taken.sample, taken.conditions
    return RepetitionView(
        valid=taken.valid,
        reason=taken.reason,
        attempt=taken.attempt,
        ttft_ms=sample.ttft_ms if sample else None,
        token_ms=tuple(ns / 1e6 for ns in sample.decode_ns) if sample else (),
        drift=taken.drift,
        temperature_c=conditions.temperature_c,
        temperature_unread=conditions.unread.get("temperature_c"),
        throttled=conditions.throttled,
        governor=conditions.governor,
        power_source=conditions.power_source,
    )


def _evaluations(study: StudySnapshot, record: Record) -> Iterator[EvaluationView]:
    for rung, quality in record.rungs.items():
        means = _qualities(study, rung)
        yield EvaluationView(rung=rung, group="", value=quality.value, sd=quality.sd, references=means)
        for group, value in quality.per_group.items():
            theirs = {name: each.rungs.get(rung) for name, each in study.record.references.items()}
            scores = {name: each.per_group.get(group) if each else None for name, each in theirs.items()}
            yield EvaluationView(rung=rung, group=group, value=value, sd=None, references=scores)
    if record.rescored is not None:
        fresh = record.rescored.quality
        references = study.record.references
        means = {name: each.quality.value if each.quality else None for name, each in references.items()}
        yield EvaluationView(
            rung=f"{fresh.rung}, on fresh seeds", group="", value=fresh.value, sd=fresh.sd, references=means
        )  # fmt: skip


def _jobs(config: QualityConfig, layout: Layout, corpora: Iterable[str]) -> dict[str, tuple[str, TrainJob]]:
    """Returns result key -> the first rung that trains it, and its job."""
    found: dict[str, tuple[str, TrainJob]] = {}
    for corpus in corpora:
        reference = CorpusRef(source="default", hash=corpus)
        for ladder in (config, *(config.with_seeds(each.seeds) for each in (config.anchors, config.rescore) if each)):
            for index, rung in enumerate(ladder.rungs):
                for job in rung_jobs(ladder, index, layout, reference):
                    found.setdefault(job.key, (rung.name, job))
    return found


def _training(config: QualityConfig, result: TrainResult, jobs: Mapping[str, tuple[str, TrainJob]]) -> Training:
    rung, job = jobs.get(result.key, (None, None))
    if job is None:
        run = "lm" if any(group.startswith("lm/") for group in result.scores) else _task(result)
        rung = next((each.name for each in config.rungs if run == "lm" and each.lm_steps == result.steps), None)
    else:
        run = job.run.name
    return Training(
        key=result.key, rung=rung, run=run, seed=job.seed if job else None, steps=result.steps, tokens=result.tokens,
        seconds=result.seconds, device=result.device, curve=tuple(result.curve), scores=result.scores,
        losses=result.losses, accuracy=result.accuracy, weights_sha256=result.weights_sha256,
    )  # fmt: skip


def _task(result: TrainResult) -> str:
    return ", ".join(group.removeprefix("task/") for group in sorted(result.scores))


def _artifacts(store: Store, record: Record, stored: Sequence[Result]) -> list[ArtifactView]:
    exports = [row.payload["value"] for row in stored if row.stage == "export" and "value" in row.payload]
    return [_artifact(store, record, Artifact.model_validate(value)) for value in exports]


def _artifact(store: Store, record: Record, written: Artifact) -> ArtifactView:
    return ArtifactView(
        sha256=written.sha256,
        size=written.size,
        runtime=written.runtime,
        quantisation=written.quantisation,
        arch=written.arch,
        patched=written.patched,
        weights=written.weights,
        scale="deploy" if written.layout_id == record.layout.id else "proxy",
        stored=written.stored.sha256,
        recipe=written.recipe is not None,
        kept=artifacts.get(store, written.stored.sha256) is not None,
    )


def _ancestors(study: StudySnapshot, record: Record) -> Iterator[AncestorView]:
    """Yields the nearest first, each once, up to the limits."""
    seen = {record.trial.number}
    generation = record.trial.parents
    for generations in range(1, _GENERATIONS + 1):
        numbers = [number for number in dict.fromkeys(generation) if number not in seen]
        generation = ()
        for number in numbers:
            if len(seen) > _ANCESTORS:
                return
            seen.add(number)
            row, layout = study.records[number].trial, study.records[number].layout
            yield AncestorView(
                trial=number,
                generations=generations,
                layout=layout.format(),
                layout_id=row.layout_id,
                state=row.status.state.value,
                origin=row.origin,
                operator=row.operator,
                parents=row.parents,
            )
            generation += row.parents


def _profiles(study: StudySnapshot, record: Record) -> Iterator[ProfileView]:
    """Yields the profiles that were kept of a trial, newest first.

    Raises:
        InvalidInput: one is of another layout.
    """
    seen = set()
    for event in reversed(study.record.log.notes):
        kept = Profiled.read(event.payload)
        if kept is None or kept.trial != record.trial.number:
            continue
        if not kept.profile.is_of(record.layout):
            raise InvalidInput(f"a profile of trial {kept.trial} is of another layout")
        request = (kept.device, kept.runtime, kept.prompt, kept.gen, kept.threads)
        if request not in seen:
            seen.add(request)
            yield ProfileView(
                **dict(kept.profile), device_id=kept.device, runtime=kept.runtime, build=kept.build,
                prompt=kept.prompt, gen=kept.gen, threads=kept.threads, taken=event.at,
            )  # fmt: skip


def _commands(
    study: str, record: Record, measured: Mapping[MeasurementKey, Measurement], written: Sequence[ArtifactView]
) -> Iterator[CommandView]:
    """Yields commands that repeat the measurements and exports, with the same protocol and random weights."""
    layout = shlex.quote(record.layout.format())
    quantisations = {each.sha256: each.quantisation for each in written}
    for key, taken in measured.items():
        counted = sum(each.valid for each in taken.repetitions)
        flags = [f"--{flag} {getattr(taken.workload, flag)}" for flag in _BENCH_FLAGS]
        if quantisation := quantisations.get(taken.artifact):
            flags.insert(0, f"-q {shlex.quote(quantisation)}")
        where = f"--runtime {shlex.quote(key.runtime)} --device {shlex.quote(key.device)}"
        bench, beside = f"nas bench {layout} {where} {' '.join(flags)}", _other_settings(taken.workload)
        yield CommandView(
            what=f"measure {key.workload} on {key.device}/{key.runtime}",
            command=f"{bench} --reps {max(2, counted)}",
            beside=beside,
        )
        yield CommandView(
            what=f"show here the time of each layer and operator of {key.workload} on {key.device}/{key.runtime}",
            command=f"{bench} --reps 2 --profile --trial {shlex.quote(f'{study}/{record.trial.number}')}",
            beside=beside,
        )
    for each in written:
        if each.scale == "deploy":
            target = f"--runtime {shlex.quote(each.runtime)} -q {shlex.quote(each.quantisation)}"
            seed = each.weights.removeprefix("random:")
            yield CommandView(
                what=f"write the {each.runtime} file", beside=(),
                command=f"nas export {layout} {target} --seed {shlex.quote(seed)} -o model",
            )  # fmt: skip


def _other_settings(workload: Workload) -> tuple[str, ...]:
    """Returns settings of the workload that differ from those of `nas bench` and have no option there."""
    plain = Workload(**{flag: getattr(workload, flag) for flag in _BENCH_FLAGS}).key()
    # Cores are pinned by the device, whatever the request.
    return tuple(f"{k} {v}" for k, v in workload.key().items() if plain[k] != v and k != "affinity")


def _figures(candidates: Sequence[CandidateView]) -> Iterator[FigureRow]:
    by_key = [{each.place: each for each in candidate.places} for candidate in candidates]
    for key in dict.fromkeys(key for places in by_key for key in sorted(places)):
        taken = [places.get(key) for places in by_key]
        for metric in METRICS.values():
            figures = tuple(_figure(each, metric.name) for each in taken) if metric.compared else ()
            if any(figure and figure.value is not None for figure in figures):
                yield FigureRow(
                    place=key,
                    metric=metric.name,
                    unit=metric.unit,
                    direction=metric.direction,
                    figures=figures,
                    ratios=(None, *(_ratio(figure, figures[0]) for figure in figures[1:])),
                )


def _figure(taken: MeasurementView | None, metric: str) -> Figure | None:
    return taken.figures.get(metric) if taken else None


def _ratio(figure: Figure | None, base: Figure | None) -> Ratio | None:
    if figure is None or base is None or not figure.value or not base.value:
        return None
    sd = math.hypot(log_sd(figure), log_sd(base))
    if not sd:
        return None
    mean = math.log(figure.value / base.value)
    off = Z95 * sd
    return Ratio(value=math.exp(mean), low=math.exp(mean - off), high=math.exp(mean + off))


def _compared_evaluations(candidates: Sequence[CandidateView]) -> Iterator[EvaluationRow]:
    scores = [{(each.rung, each.group): each.value for each in candidate.evaluations} for candidate in candidates]
    for rung, group in dict.fromkeys(key for known in scores for key in known):
        values = [known.get((rung, group)) for known in scores]
        first = values[0]
        yield EvaluationRow(
            rung=rung,
            group=group,
            values=tuple(values),
            differences=tuple(None if value is None or first is None else value - first for value in values),
        )


def _forecast_view(model: ModelError, trial: int) -> ForecastView:
    found = next((each for each in model.candidates if each.trial == trial), None)
    return ForecastView(
        device=model.device,
        runtime=model.runtime,
        workload=model.workload,
        metric=model.metric,
        unit=model.unit,
        measured=found.measured if found else None,
        predicted=found.predicted if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        mape=model.mape,
        measurements=model.measurements,
        reason=model.reason if found is None else None,
    )
