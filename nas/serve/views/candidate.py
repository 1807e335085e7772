"""View models of candidates: one with all its results, a comparison of several, and forecasts of hardware models."""

from __future__ import annotations

import math
import shlex
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.measurement import TTFT_PARTS, ClockName, Figure, Measurement, Repetition
from nas.core.metrics import METRICS
from nas.core.profile import ProfileSummary
from nas.core.quality_config import QualityConfig
from nas.core.scoring import PUBLISHED, BudgetCheck, MeasurementKey, of_proxy, ratio_sd, together
from nas.core.stats import interval
from nas.core.workload import MEDIA_FIELDS, Workload
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
from nas.search.study.events import CorpusUsed, Profiled, notes
from nas.serve.api.types import shared
from nas.serve.views.base import (
    Bounds,
    Interval,
    Standing,
    TrialView,
    View,
    bounds_fields,
    standing_fields,
    trial_fields,
)
from nas.serve.views.layout import LayoutView, align, differs, distances, layer_codes, layout_view

FEWEST = 2
"""Candidates of a comparison."""
MOST = 6
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


Ends = tuple[float | None, float | None]
"""Of an interval; null if it is not known."""


class Training(TrainResult):
    """One training of the proxy."""

    rung: str | None = Field(description="the first rung that trains it; null if it is not known any more")
    run: str = Field(description="'lm' or the task's name")
    seed: int | None = Field(description="null if it is not known")

    @property
    def name(self) -> str:
        """The run and rung, such as 'lm, rung long'."""
        return f"{self.run}, rung {self.rung}" if self.rung else self.run


class ObjectiveView(View):
    """One objective, with the reference layouts' values."""

    name: str
    metric: str
    unit: str = Field(description="'x' for a ratio to the published reference over several devices or runtimes")
    direction: str
    value: float | None
    low: float | None = Field(description="lower end of the 95 % interval of `value`")
    high: float | None
    coordinate: float | None
    sd: float | None = Field(description="of the coordinate")
    rung: str | None = Field(description="rung of a quality; qualities of different rungs do not compare")
    references: dict[str, float | None] = Field(description="reference layout -> its value, at the same rung")
    reference_ends: dict[str, Ends] = Field(description="reference layout -> ends of the 95 % interval of its value")

    @property
    def heading(self) -> str:
        """The name with the unit, such as 'latency [ms]'."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


class RepetitionView(View):
    """One repetition with every token's time, as it was read: not corrected."""

    valid: bool
    reason: str | None = Field(description="why it does not count")
    attempt: int
    ttft_ms: float | None
    token_ms: tuple[float, ...]
    drift: float | None = Field(description="reference run's time / its calibration - 1")
    temperature_c: float | None
    temperature_unread: str | None = Field(description="why there is no temperature")
    throttled: bool | None
    governor: str | None
    power_source: str | None


class MeasurementView(View):
    """A measurement: one device, runtime and workload."""

    key: MeasurementKey = Field(serialization_alias="place")
    device_id: str
    workload: Workload
    build: str
    patched: bool
    artifact: str
    protocol: int = Field(description="version of the measurement protocol")
    clock: ClockName
    foreign_cpu: float | None = Field(description="median CPU share of other processes, in cores")
    refused_share: float
    drift: float | None
    calibration_ms: float | None
    wall_s: float
    figures: dict[str, Figure]
    ratios: dict[str, float] = Field(description="figure -> ratio to the published reference's")
    repetitions: tuple[RepetitionView, ...]

    @property
    def name(self) -> str:
        """Workload, device and runtime, such as 'chat on laptop/llama.cpp'."""
        return f"{self.key.workload} on {self.key.device}/{self.key.runtime}"

    @property
    def ttft_parts(self) -> dict[str, tuple[float, float]]:
        """What the time to the first token is made of with images or sounds: part -> milliseconds and share."""
        names = TTFT_PARTS[self.workload.media] if self.workload.media else {}
        figures = {title: self.figures[name] for name, title in names.items() if name in self.figures}
        parts = {title: figure.value for title, figure in figures.items() if figure.value is not None}
        whole = sum(parts.values())
        return {title: (ms, ms / whole) for title, ms in parts.items()} if whole else {}


class EvaluationView(View):
    """One evaluation group at one rung; the published reference has 1."""

    rung: str
    group: str = Field(description="'' for the quality, the mean over groups")
    value: float
    sd: float | None = Field(description="over seeds; only the quality has one")
    references: dict[str, float | None]


class ArtifactView(View):
    """An exported file."""

    sha256: str
    size: int
    runtime: str
    quantisation: str
    arch: str
    patched: bool
    weights: str
    scale: str = Field(description="'deploy' for the layout itself, 'proxy' for its trained proxy")
    stored: str = Field(description="SHA-256 of the stored content: the file, or the recipe to make it from")
    recipe: bool
    present: bool = Field(serialization_alias="kept", description="whether the store still has it")


class AncestorView(TrialView):
    """An ancestor of the trial."""

    generations: int = Field(description="1: a parent")
    layout: str
    layout_id: str
    parents: tuple[int, ...]


class ProfileView(ProfileSummary):
    """Where the time of one request goes; the newest that was kept for a device, runtime and request."""

    model_config = ConfigDict(serialize_by_alias=True)

    device_id: str
    runtime: str
    build: str
    prompt: int
    gen: int
    threads: int
    at: float = Field(serialization_alias="taken", description="seconds since the epoch")

    @property
    def name(self) -> str:
        """Device, runtime and request, such as 'laptop/llama.cpp, 512 tokens in, 128 out, 1 thread'."""
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        return f"{self.device_id}/{self.runtime}, {self.prompt} tokens in, {self.gen} out, {threads}"


class CommandView(View):
    """A command that reproduces a part of the results."""

    what: str
    command: str
    beside: tuple[str, ...] = Field((), description="settings that the command has no option for")


class FrontStanding(Standing):
    """Where a complete trial is relative to the front."""

    front: int = Field(description="trials on the front")


class NeighbourView(Bounds, TrialView):
    """A trial with a similar layout."""

    distance: int = Field(
        description="cost of aligning both: 1 for each other mixer or feed-forward, 2 for each layer that one lacks"
    )
    layout: str


class CandidateView(TrialView):
    """All that is stored of one candidate."""

    study: str
    record: dict[str, Any] = Field(description="data of the proposer for the layout")
    created: float
    updated: float
    layout: LayoutView
    objectives: tuple[ObjectiveView, ...]
    budgets: tuple[BudgetCheck, ...]
    measurements: tuple[MeasurementView, ...] = Field(serialization_alias="places")
    profiles: tuple[ProfileView, ...]
    evaluations: tuple[EvaluationView, ...]
    trainings: tuple[Training, ...]
    artifacts: tuple[ArtifactView, ...]
    ancestors: tuple[AncestorView, ...]
    commands: tuple[CommandView, ...]
    standing: FrontStanding | None = Field(description="null unless the trial is complete and counts for the front")
    neighbours: tuple[NeighbourView, ...] = Field(description="trials with the most similar layouts, nearest first")
    previous: int | None = Field(description="number of the trial before; null for the first")
    next: int | None


class LayerRow(View):
    """Layers that are aligned."""

    layers: tuple[int | None, ...] = Field(description="for each candidate the index of its layer; null for a gap")
    differs: bool


class Ratio(Interval):
    """Ratio of a figure to the first candidate's."""

    @property
    def apart(self) -> bool:
        """Whether the two differ significantly."""
        return not self.low <= 1 <= self.high


class FigureRow(View):
    """One figure on one device and runtime."""

    key: MeasurementKey = Field(serialization_alias="place")
    metric: str
    unit: str
    direction: str
    figures: tuple[Figure | None, ...] = Field(description="null: not measured")
    ratios: tuple[Ratio | None, ...] = Field(description="null for the first, or if an interval is missing")


class EvaluationRow(View):
    """One evaluation group at one rung."""

    rung: str
    group: str = Field(description="'' for the quality, the mean over groups")
    values: tuple[float | None, ...]
    sds: tuple[float | None, ...] = Field(description="over seeds; only the quality has one")
    differences: tuple[float | None, ...] = Field(description="to the first candidate")
    difference_ends: tuple[Ends, ...] = Field(description="of the 95 % interval of a difference of qualities")


class ComparisonView(View):
    """Several candidates, compared with the first."""

    study: str = Field(description="of the first candidate")
    candidates: tuple[CandidateView, ...] = Field(description="names of those of other studies begin with the study's")
    contexts: tuple[int, ...] = Field(description="tokens for which all candidates' caches are known")
    apart: tuple[str, ...] = Field(
        description="why figures of other studies have rows of their own, or wider intervals of their ratios"
    )
    rows: tuple[LayerRow, ...]
    figures: tuple[FigureRow, ...]
    evaluations: tuple[EvaluationRow, ...]


class ForecastView(View):
    """One figure of one candidate, forecast by a model that was fitted without it."""

    device: str
    runtime: str
    workload: str
    metric: str
    unit: str
    measured: float | None
    predicted: float | None
    low: float | None = Field(description="lower end of the forecast's 95 % interval")
    high: float | None
    mape: float | None = Field(description="of the model, over all measured candidates")
    measurements: int
    reason: str | None = Field(description="why there is no forecast")


class CardView(View):
    """A trial in short."""

    reason: str | None = Field(description="why it ended; null where its state says it")
    layout: str


class ForecastsView(View):
    """All forecasts of one candidate."""

    forecasts: tuple[ForecastView, ...]
    reason: str | None = Field(None, description="why there are none")


def candidate_views(store: Store, study: StudySnapshot, numbers: Sequence[int]) -> list[CandidateView]:
    """Returns the views of trials of a study, in the order of `numbers`; raises UnknownName if there is none."""
    return [_view(store, study, _record(study, number)) for number in numbers]


def card_view(study: StudySnapshot, number: int) -> CardView:
    """Returns a trial's layout, and why it ended."""
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
    names = [*numbers, *(f"{other.name}/{number}" for other, number in others)]
    if not FEWEST <= len(names) <= MOST or len(set(names)) < len(names):
        raise InvalidInput(f"tick {FEWEST} to {MOST} different trials to compare, not {names}", where="trial")
    candidates = candidate_views(store, study, numbers)
    apart: list[str] = []
    for other, number in others:
        (view,) = candidate_views(store, other, [number])
        candidates.append(_of_another_study(view, other, study, candidates, apart))
    layouts = [Layout.parse(candidate.layout.text) for candidate in candidates]
    contexts = [[cost.context for cost in candidate.layout.contexts] for candidate in candidates]
    rows = [LayerRow(layers=row, differs=differs(layouts, row)) for row in align(layouts)]
    return ComparisonView(
        study=study.name,
        candidates=tuple(candidates),
        contexts=tuple(context for context in contexts[0] if all(context in others for others in contexts)),
        apart=tuple(dict.fromkeys(apart)),
        rows=tuple(rows),
        figures=tuple(_figures(candidates)),
        evaluations=tuple(_compared_evaluations(candidates)),
    )


def _of_another_study(
    view: CandidateView, other: StudySnapshot, study: StudySnapshot, before: Sequence[CandidateView], apart: list[str]
) -> CandidateView:
    """Returns the view of a trial of another study; what was measured otherwise than in `before` gets another name.

    Args:
        view: of the trial.
        other: its study.
        study: the comparison's.
        before: candidates that it is compared with.
        apart: gets the reasons.
    """

    def conditions(measurement: MeasurementView) -> dict[str, object]:
        return {
            "device": measurement.device_id,
            "build": measurement.build,
            "protocol": measurement.protocol,
            "workload": measurement.workload,
        }

    earlier = {measurement.key: measurement for candidate in reversed(before) for measurement in candidate.measurements}
    measurements = []
    for measurement in view.measurements:
        key = measurement.key
        first = earlier.get(key, measurement)
        expected = conditions(first)
        differences = [f"another {name}" for name, value in conditions(measurement).items() if expected[name] != value]
        if differences:
            apart.append(f"{measurement.name}: {other.name} has {' and '.join(differences)}")
            renamed = key._replace(workload=f"{key.workload} of {other.name}")
            measurement = measurement.model_copy(update={"key": renamed})
        elif measurement.calibration_ms != first.calibration_ms:
            apart.append(f"{measurement.name}: {other.name} has another calibration, so ratios have wider intervals")
        measurements.append(measurement)
    evaluations = view.evaluations
    references = [space.references.layouts()[PUBLISHED] for space in (other.space, study.space)]
    if other.space.quality != study.space.quality or references[0] != references[1]:
        why = "another ladder or another published reference, so its scores are on another scale"
        apart.append(f"quality: {other.name} has {why}")
        evaluations = tuple(
            evaluation.model_copy(update={"rung": f"{evaluation.rung} of {other.name}"}) for evaluation in evaluations
        )
    name = f"{other.name} {view.name}"
    return view.model_copy(update={"name": name, "measurements": tuple(measurements), "evaluations": evaluations})


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
    finished = [_training(config, TrainResult.model_validate(value), jobs) for value in values]
    order = {rung.name: index for index, rung in enumerate(config.rungs)}
    return sorted(
        finished,
        key=lambda training: (
            order.get(training.rung or "", len(order)),
            training.run,
            training.seed or 0,
            training.key,
        ),
    )


class Forecasts:
    """A cache of the hardware models of the latest studies; those of a running one are fitted again once a minute."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
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
            if time.monotonic() - at >= _FRESH_S:
                fitted, at = study, time.monotonic()
            models = fitted.cached("hardware models", lambda: study_models(fitted.record))
            self._fitted[study.id] = fitted, at
            self._fitted.move_to_end(study.id)
            if len(self._fitted) > _STUDIES:
                self._fitted.popitem(last=False)
        return ForecastsView(forecasts=tuple(_forecast_view(model, number) for model in models))


def _view(store: Store, study: StudySnapshot, record: Record) -> CandidateView:
    trial, space = record.trial, study.space
    stored = results.of_trial(store, trial.study, trial.number)
    payloads = {row.result_key: row.payload for row in stored}
    measurements = {
        key: Measurement.model_validate(payloads[summary.key]["value"])
        for key, summary in sorted(record.measurements.items())
    }
    artifact_views = _artifacts(store, record, stored)
    corpora = sorted({note.hash for note in notes(study.record.log.notes, CorpusUsed)})
    windows = [space.workloads[workload].window for workload in space.measured]
    standing = None
    if trial.number in study.counted and study.reference_point is not None:
        standing = FrontStanding(front=len(study.curve.front), **standing_fields(study, trial.number))
    return CandidateView(
        study=study.name,
        record={key: value for key, value in (trial.record or {}).items() if key != "layout"},
        created=trial.created,
        updated=trial.updated,
        layout=layout_view(record.layout, max(windows), *windows),
        objectives=tuple(_objectives(study, record)),
        budgets=tuple(study.record.checks(record)),
        measurements=tuple(_measurement(study, key, measurement) for key, measurement in measurements.items()),
        profiles=tuple(_profiles(study, record)),
        evaluations=tuple(_evaluations(study, record)),
        trainings=tuple(trainings(space.quality, record.layout, stored, corpora)),
        artifacts=tuple(artifact_views),
        ancestors=tuple(_ancestors(study, record)),
        commands=tuple(_commands(study.name, record, measurements, artifact_views)),
        standing=standing,
        neighbours=tuple(_neighbours(study, trial.number)),
        previous=trial.number - 1 if trial.number else None,
        next=trial.number + 1 if trial.number + 1 < len(study.records) else None,
        **trial_fields(study, trial.number),
    )


def _neighbours(study: StudySnapshot, number: int) -> Iterator[NeighbourView]:
    codes = study.cached("layer codes", lambda: layer_codes([record.layout for record in study.records.values()]))
    costs = distances(codes, number)
    nearest = [int(other) for other in np.argsort(costs, kind="stable") if other != number][:_NEIGHBOURS]
    objectives = [axis.key for axis in study.axes if axis.objective]
    for other, bounds in zip(nearest, bounds_fields(study, nearest, objectives), strict=True):
        layout = study.records[other].layout.format()
        yield NeighbourView(distance=int(costs[other]), layout=layout, **trial_fields(study, other), **bounds)


def _objectives(study: StudySnapshot, record: Record) -> Iterator[ObjectiveView]:
    for index, (objective, reached) in enumerate(zip(study.space.objectives, record.axes, strict=True)):
        metric = METRICS[objective.metric]
        columns: dict[str, tuple[float | None, float | None]] = {
            name: (axis.value, axis.value_sd) if (axis := reference.axes[index]) else (None, None)
            for name, reference in study.record.references.items()
        }
        rung = record.quality.rung if record.quality and metric.source == "proxy" else None
        if rung is not None and record.rescored is not None:
            rung = f"{rung}, on fresh seeds"
        elif rung is not None:
            columns = _qualities(study, rung, objective.metric)
        low, high = _ends(reached.value, reached.value_sd, metric.transform) if reached else (None, None)
        yield ObjectiveView(
            name=objective.name,
            metric=objective.metric,
            unit=study.axes[index].unit,
            direction=study.axes[index].direction,
            value=reached.value if reached else None,
            low=low,
            high=high,
            coordinate=reached.coordinate if reached else None,
            sd=reached.sd if reached else None,
            rung=rung,
            references={name: value for name, (value, _) in columns.items()},
            reference_ends={name: _ends(value, sd, metric.transform) for name, (value, sd) in columns.items()},
        )


def _ends(value: float | None, sd: float | None, transform: str) -> Ends:
    return (None, None) if value is None or sd is None else interval(value, sd, transform)


def _qualities(
    study: StudySnapshot, rung: str, metric: str = "quality"
) -> dict[str, tuple[float | None, float | None]]:
    """Returns reference -> its value of a metric of quality at a rung, and the standard deviation of that."""
    rows: dict[str, tuple[float | None, float | None]] = {}
    for name, reference in study.record.references.items():
        value, sd = of_proxy(metric, reference.rungs[rung]) if rung in reference.rungs else (None, 0.0)
        rows[name] = value, None if value is None else ratio_sd(value, sd)
    return rows


def _measurement(study: StudySnapshot, key: MeasurementKey, measurement: Measurement) -> MeasurementView:
    base = (study.record.published or {}).get(key, {})
    ratios = {
        name: figure.value / reference
        for name, figure in measurement.figures.items()
        if figure.value is not None and name in base and (reference := base[name].value)
    }
    return MeasurementView(
        **shared(MeasurementView, measurement)
        | {
            "key": key,
            "device_id": measurement.device,
            "ratios": ratios,
            "repetitions": tuple(_repetition(repetition) for repetition in measurement.repetitions),
        }
    )


def _repetition(repetition: Repetition) -> RepetitionView:
    sample, conditions = repetition.sample, repetition.conditions
    return RepetitionView(
        **shared(RepetitionView, repetition),
        **shared(RepetitionView, conditions),
        ttft_ms=sample.ttft_ms if sample else None,
        token_ms=tuple(ns / 1e6 for ns in sample.decode_ns) if sample else (),
        temperature_unread=conditions.unread.get("temperature_c"),
    )


def _evaluations(study: StudySnapshot, record: Record) -> Iterator[EvaluationView]:
    for rung, quality in record.rungs.items():
        means = {name: value for name, (value, _) in _qualities(study, rung).items()}
        yield EvaluationView(rung=rung, group="", value=quality.value, sd=quality.sd, references=means)
        for group, value in quality.per_group.items():
            qualities = {name: reference.rungs.get(rung) for name, reference in study.record.references.items()}
            scores = {
                name: reference_quality.per_group.get(group) if reference_quality else None
                for name, reference_quality in qualities.items()
            }
            yield EvaluationView(rung=rung, group=group, value=value, sd=None, references=scores)
    if record.rescored is not None:
        fresh = record.rescored.quality
        references = study.record.references
        means = {name: reference.quality.value if reference.quality else None for name, reference in references.items()}
        yield EvaluationView(
            rung=f"{fresh.rung}, on fresh seeds", group="", value=fresh.value, sd=fresh.sd, references=means
        )


def _jobs(config: QualityConfig, layout: Layout, corpora: Iterable[str]) -> dict[str, tuple[str, TrainJob]]:
    """Returns result key -> the first rung that trains it, and its job."""
    by_key: dict[str, tuple[str, TrainJob]] = {}
    for corpus in corpora:
        reference = CorpusRef(source="default", hash=corpus)
        for ladder in (
            config,
            *([config.with_seeds(config.anchors.seeds)] if config.anchors else []),
            *([config.rescored] if config.rescore else []),
        ):
            for index, rung in enumerate(ladder.rungs):
                for job in rung_jobs(ladder, index, layout, reference):
                    by_key.setdefault(job.key, (rung.name, job))
    return by_key


def _training(config: QualityConfig, result: TrainResult, jobs: Mapping[str, tuple[str, TrainJob]]) -> Training:
    rung, job = jobs.get(result.key, (None, None))
    if job is None:
        of_lm = any(group.startswith("lm/") for group in result.scores)
        run = "lm" if of_lm else ", ".join(group.removeprefix("task/") for group in sorted(result.scores))
        rung = next((step.name for step in config.rungs if run == "lm" and step.lm_steps == result.steps), None)
    else:
        run = job.run.name
    return Training(**dict(result), rung=rung, run=run, seed=job.seed if job else None)


def _artifacts(store: Store, record: Record, stored: Sequence[Result]) -> list[ArtifactView]:
    values = [row.payload["value"] for row in stored if row.stage == "export" and "value" in row.payload]
    return [
        ArtifactView(
            **shared(ArtifactView, artifact)
            | {
                "scale": "deploy" if artifact.layout_id == record.layout.architecture.id else "proxy",
                "stored": artifact.stored.sha256,
                "recipe": artifact.recipe is not None,
                "present": artifacts.get(store, artifact.stored.sha256) is not None,
            }
        )
        for artifact in map(Artifact.model_validate, values)
    ]


def _ancestors(study: StudySnapshot, record: Record) -> Iterator[AncestorView]:
    """Yields the nearest first, each once, up to the limits."""
    lineage = {record.trial.number}
    generation = record.trial.parents
    for generations in range(1, _GENERATIONS + 1):
        numbers = [number for number in dict.fromkeys(generation) if number not in lineage]
        generation = ()
        for number in numbers:
            if len(lineage) > _ANCESTORS:
                return
            lineage.add(number)
            row, layout = study.records[number].trial, study.records[number].layout
            yield AncestorView(
                generations=generations,
                layout=layout.format(),
                layout_id=row.layout_id,
                parents=row.parents,
                **trial_fields(study, number),
            )
            generation += row.parents


def _profiles(study: StudySnapshot, record: Record) -> Iterator[ProfileView]:
    """Yields the profiles that were kept of a trial, newest first.

    Raises:
        InvalidInput: one is of another layout.
    """
    requests = set()
    for event in reversed(study.record.log.notes):
        profiled = Profiled.read(event.payload)
        if profiled is None or profiled.trial != record.trial.number:
            continue
        if not profiled.profile.is_of(record.layout):
            raise InvalidInput(f"a profile of trial {profiled.trial} is of another layout")
        request = (profiled.device, profiled.runtime, profiled.prompt, profiled.gen, profiled.threads)
        if request not in requests:
            requests.add(request)
            of_request = shared(ProfileView, profiled)
            yield ProfileView(**dict(profiled.profile), **of_request, device_id=profiled.device, at=event.at)


def _commands(
    study: str, record: Record, measured: Mapping[MeasurementKey, Measurement], written: Sequence[ArtifactView]
) -> Iterator[CommandView]:
    """Yields commands that repeat the measurements and exports, with the same protocol and random weights."""
    layout = shlex.quote(record.layout.format())
    quantisations = {artifact.sha256: artifact.quantisation for artifact in written}
    for key, measurement in measured.items():
        counted = sum(repetition.valid for repetition in measurement.repetitions)
        workload = measurement.workload
        flags = [f"--{flag.replace('_', '-')} {getattr(workload, flag)}" for flag in _bench_flags(workload)]
        if quantisation := quantisations.get(measurement.artifact):
            flags.insert(0, f"-q {shlex.quote(quantisation)}")
        where = f"--runtime {shlex.quote(measurement.runtime)} --device {shlex.quote(key.device)}"
        bench, beside = f"nas bench {layout} {where} {' '.join(flags)}", _other_settings(measurement.workload)
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
    for artifact in written:
        if artifact.scale == "deploy":
            target = f"--runtime {shlex.quote(artifact.runtime)} -q {shlex.quote(artifact.quantisation)}"
            seed = artifact.weights.removeprefix("random:")
            yield CommandView(
                what=f"write the {artifact.runtime} file",
                beside=(),
                command=f"nas export {layout} {target} --seed {shlex.quote(seed)} -o model",
            )


def _bench_flags(workload: Workload) -> tuple[str, ...]:
    return _BENCH_FLAGS + (MEDIA_FIELDS[workload.media] if workload.media else ())


def _other_settings(workload: Workload) -> tuple[str, ...]:
    """Returns settings of the workload that differ from those of `nas bench` and have no option there."""
    plain = Workload(**{flag: getattr(workload, flag) for flag in _bench_flags(workload)}).key()
    # Cores are pinned by the device, whatever the request.
    return tuple(f"{k} {v}" for k, v in workload.key().items() if plain[k] != v and k != "affinity")


def _figures(candidates: Sequence[CandidateView]) -> Iterator[FigureRow]:
    by_key = [{measurement.key: measurement for measurement in view.measurements} for view in candidates]
    for key in dict.fromkeys(key for measurements in by_key for key in sorted(measurements)):
        measured = [measurements[key].figures if key in measurements else {} for measurements in by_key]
        calibrations = [measurements[key].calibration_ms if key in measurements else None for measurements in by_key]
        for metric in METRICS.values():
            row = tuple(figures.get(metric.name) for figures in measured) if metric.compared else ()
            if any(figure and figure.value is not None for figure in row):
                yield FigureRow(
                    key=key,
                    metric=metric.name,
                    unit=metric.unit,
                    direction=metric.direction,
                    figures=row,
                    ratios=(
                        None,
                        *(
                            ratio(figure, row[0], alike=calibration == calibrations[0])
                            for figure, calibration in zip(row[1:], calibrations[1:], strict=True)
                        ),
                    ),
                )


def ratio(figure: Figure | None, base: Figure | None, *, alike: bool) -> Ratio | None:
    """Returns the ratio of two figures; `alike`: they have one calibration, so that they share that noise."""
    if figure is None or base is None or not figure.value or not base.value:
        return None
    sd = together(*(one.log_sd if alike else one.whole_log_sd for one in (figure, base)))
    if not sd:
        return None
    value = figure.value / base.value
    low, high = interval(value, sd, "log")
    return Ratio(value=value, low=low, high=high)


def _compared_evaluations(candidates: Sequence[CandidateView]) -> Iterator[EvaluationRow]:
    by_key = [
        {(evaluation.rung, evaluation.group): evaluation for evaluation in candidate.evaluations}
        for candidate in candidates
    ]
    for rung, group in dict.fromkeys(key for of_candidate in by_key for key in of_candidate):
        row = [of_candidate.get((rung, group)) for of_candidate in by_key]
        first = row[0]
        differences = [None if first is None or one is None else one.value - first.value for one in row]
        sds = [None if one is None else one.sd for one in row]
        ends = [
            _ends(difference, together(sds[0], sd), "linear") for difference, sd in zip(differences, sds, strict=True)
        ]
        yield EvaluationRow(
            rung=rung,
            group=group,
            values=tuple(None if one is None else one.value for one in row),
            sds=tuple(sds),
            differences=tuple(differences),
            difference_ends=((None, None), *ends[1:]),  # the first is compared with itself
        )


def _forecast_view(model: ModelError, trial: int) -> ForecastView:
    forecast = next((candidate for candidate in model.candidates if candidate.trial == trial), None)
    of_trial = {name: getattr(forecast, name, None) for name in ("measured", "predicted", "low", "high")}
    reason = model.reason if forecast is None else None
    return ForecastView(**shared(ForecastView, model) | of_trial | {"reason": reason})
