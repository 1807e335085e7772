"""How long a study takes: from stored durations, the plan of its space, and how far it is.

A study is counted as the work that remains: repetitions by device, trainings by rung, exports and checks, each with the
chance that a layout gets there. Seconds come from stored results of the same study, then of the latest other studies of
the database; where there are none, from a rough rate by weights and tokens, which is named as a guess. All durations
are ranges: the quartiles of what was stored, with the fewest and the most layouts that may get to a stage.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.quality_config import QualityConfig
from nas.core.scoring import PUBLISHED
from nas.core.space import SearchSpace
from nas.core.task import make_task
from nas.core.trial import Event, TrialState
from nas.core.workload import Workload
from nas.infra.store import events, results, studies, trials
from nas.infra.store.results import ResultSummary
from nas.infra.store.rows import Study, Trial
from nas.infra.store.store import Store
from nas.measure.farm.farm import LOCAL
from nas.measure.protocol.reference import CALIBRATION_RUNS
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.job import LibraryRun, LmRun, TrainJob, proxy_layout
from nas.search.proxy.ladder import rung_jobs
from nas.search.study.events import (
    CORPUS,
    MARKED,
    AnchorsChosen,
    CorpusUsed,
    Launched,
    QualityKnown,
    all_events,
    calibrated_devices,
    elapsed,
    ending,
    notes,
    stored_space,
)

_Range = NDArray[np.float64]
"""Low, typical and high value of a duration in seconds, or of a count: [3]. Sums and products are all low or all high
at once, because what is off is off for all parts alike."""

_OTHER_STUDIES, _TRIALS_READ, _OWN_TRIALS_READ = 4, 10, 16
"""Latest studies, and the latest trials of each, whose durations are read."""
_FEW = 4
"""Results below which quartiles say little, so that the range is widened."""
_START_S = 1.5
"""Of a repetition, what does not grow with the model: two processes, and the run of the reference model."""
_PROMPT_S, _GEN_S = 3e-11, 8e-11
"""Guess for one thread: seconds per weight and token of the prompt, and per weight and decoded token."""
_TRAINING_S = 6e-10
"""Guess: seconds per token and weight of a proxy on one core (6 operations at 10 billion a second)."""
_LIBRARY_TOKENS = 1 << 12
"""Guess: tokens of held-out text that a part of an assembled mix is evaluated on."""
_GUESS_FACTOR, _OTHER_WORK_FACTOR, _FEW_FACTOR = 3.0, 1.6, 1.25
"""How far off guesses, figures of other workloads or trainings, and figures of few results may be."""
_SAME_WORK = 2.0
"""Factor within which trainings count as of the same size."""
_PRIOR_TRIALS = 4.0
"""Trials that the assumed share of layouts within their budgets is worth."""
_PACE_AFTER = 3
"""Trials that must have ended before the study's own pace corrects the sum of its work."""
_STARTING_S, _CALIBRATION_RUN_S = np.array([10, 35, 90.0]), np.array([0.5, 1.5, 5])
"""From the launch to the first run of the reference model (Ray, runners, the reference's export), and each such run."""
_EXPORT_S, _CHECK_S = np.array([0.5, 2, 15]), np.array([2, 5, 20.0])
"""Guesses for one export and one check of the exported graph."""
_WAITING = np.array([0, 0.2, 0.6])
"""Share of the work that proposals, waits and other processes add, until the study's own pace is known."""


class Span(BaseModel):
    """A duration in seconds, as a range."""

    model_config = ConfigDict(frozen=True)

    low: float
    typical: float
    high: float


class EstimatePart(BaseModel):
    """One kind of work of a study."""

    name: str = Field(description="calibration, anchors, export, screen, training, confirm, re-score or waiting")
    seconds: Span


_SPAN: JsonDict = {"low": 900.0, "typical": 1500.0, "high": 2900.0}
_EXAMPLE: JsonDict = {
    "seconds": _SPAN,
    "parts": [{"name": "training", "seconds": _SPAN}],
    "based_on": ["trainings of this database"],
    "depends_on": ["half of the layouts keep the budgets"],
    "text": "15 to 48 min, mostly training",
}


class Estimate(BaseModel):
    """How long a study takes, or what remains of it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    seconds: Span = Field(description="of time that passes; measuring and training may overlap")
    parts: list[EstimatePart] = Field(description="in the order in which they begin")
    based_on: list[str] = Field(description="what the durations were taken from")
    depends_on: list[str] = Field(description="what was assumed of the layouts, and other conditions")
    text: str = Field(description="the range and its larger parts")


class _Training(NamedTuple):
    """A training: `lm` or `task/NAME`, and its steps times tokens times weights."""

    kind: str
    work: float


class _Run(NamedTuple):
    """A stored measurement: device and runtime, seconds per repetition, and the guess for its model and workload."""

    place: tuple[str, str]
    workload: Workload
    seconds: float
    guess: float


@dataclass
class _Durations:
    """Durations of stored results, each counted once although studies share results."""

    runs: list[_Run] = field(default_factory=list)
    trainings: list[tuple[_Training, float]] = field(default_factory=list)
    exports: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, found: ResultSummary, layout: Layout, trainings: Mapping[str, _Training]) -> None:
        """Adds a result of a layout; `trainings` are the layout's by result key."""
        if found.key in self.seen or found.seconds <= 0:
            return
        self.seen.add(found.key)
        if found.key in trainings:
            self.trainings.append((trainings[found.key], found.seconds))
        elif found.stage == "export":
            self.exports.append(found.seconds)
        elif found.stage == "gate":
            self.checks.append(found.seconds)
        elif found.stage == "measure" and found.device and found.runtime and found.workload and found.figures:
            workload, repetitions = Workload.model_validate_json(found.workload), json.loads(found.figures)["ttft"]["n"]
            if repetitions:
                place, guess = (found.device, found.runtime), _guessed_run(layout, workload)
                self.runs.append(_Run(place, _unpinned(workload), found.seconds / repetitions, guess))


class _Position(NamedTuple):
    """Where a trial is: the stage that it is in, and whether that is done and only what follows remains."""

    stage: int = 0
    done: bool = False
    reference: bool = False


@dataclass(frozen=True)
class _Progress:
    """How far a study is; the default is one that has not begun."""

    positions: Sequence[_Position] = ()
    unproposed: int = 0
    proposed: int = 0
    screened: int = 0
    feasible: int = 0
    complete: Sequence[Layout] = ()
    ended: int = 0
    calibrated: bool = False
    anchors: Sequence[Layout] = ()
    hours: float = 0.0


def estimate(store: Store | None, space: SearchSpace, wanted: int, ids: Mapping[str, str], workers: int) -> Estimate:
    """Estimates a study that has not begun.

    Args:
        store: the database; None: there is none yet.
        space: to be searched.
        wanted: layouts to propose, references not counted.
        ids: name of a device in the space -> its id, of those that are known.
        workers: trainings at the same time.
    """
    references = [_Position(reference=True)] * len(space.references.layouts())
    durations = _Durations()
    if store is not None:
        _read_others(store, durations, None)
    progress = _Progress(references, min(wanted, len(space.layouts) or wanted))
    return _Estimator(store, space, _corpus([]), ids, workers, durations).estimate(progress)


def estimate_left(store: Store, study: Study, workers: int | None = None) -> Estimate | None:
    """Estimates what remains of a study that runs.

    Args:
        store: the database.
        study: its row.
        workers: trainings at the same time; None: as many as this host has cores.

    Returns:
        None before it was launched.

    Raises:
        InvalidInput: this version cannot read its space.
    """
    space, log, rows = stored_space(study), all_events(store, study.id), trials.all(store, study.id)
    launched = notes(log, Launched)
    if not launched:
        return None
    corpus = _corpus(notes(log, CorpusUsed))
    durations = _Durations()
    _read(store, durations, study, space, corpus, rows, _OWN_TRIALS_READ)
    if len(durations.runs) < _FEW or len(durations.trainings) < _FEW:
        _read_others(store, durations, study.id)
    ids = dict(calibrated_devices(log))
    estimator = _Estimator(store, space, corpus, ids, workers or os.cpu_count() or 1, durations)
    newest = max(event.at for event in log if event.payload.get("what") != MARKED)
    running_s = elapsed(log)[-1] + max(0.0, store.now() - newest)
    progress = _progress(space, rows, log, launched[-1].trials, running_s / 3600)
    return estimator.estimate(progress, estimator.pace(progress, results.stage_seconds(store, study.id), running_s))


class _Estimator:
    """Estimates one study.

    Args:
        store: the database, to see which trainings are done; None: none is.
        space: of the study.
        corpus: of its language models.
        ids: name of a device in the space -> its id.
        workers: trainings at the same time.
        durations: of stored results.
    """

    def __init__(
        self, store: Store | None, space: SearchSpace, corpus: CorpusRef, ids: Mapping[str, str], workers: int,
        durations: _Durations,
    ) -> None:  # fmt: skip
        self._store, self._space, self._corpus, self._workers = store, space, corpus, max(1, workers)
        self._ids, self._durations = ids, durations
        self._published = space.references.layouts()[PUBLISHED]
        sources = [METRICS[budget.metric].source for budget in space.budgets]
        self._gated, self._bounded = any(each != "proxy" for each in sources), "proxy" in sources
        self._runs = {name: self._repetition_of(name) for name in space.devices}
        self._host = [name for name in space.devices if name == LOCAL or ids.get(name, name) == ids.get(LOCAL)]
        rungs = _ladder(space.quality, self._published, corpus)
        self._rungs = np.array([self._seconds(rung.values()) for rung in rungs])

    def estimate(self, progress: _Progress, pace: float | None = None) -> Estimate:
        """Returns the estimate; `pace` is the time that passes for a second of work, None if it is not known."""
        hours = self._space.search.stop.hours
        if hours is not None and progress.unproposed:  # proposals end then; work grows evenly with their number
            numbers = (0, progress.unproposed)
            first, last = (self._work(replace(progress, unproposed=n), rescore=False)[1][1] for n in numbers)
            share = ((hours - progress.hours) * 3600 - first) / max(last - first, 1e-9)
            fits = max(1, math.ceil(progress.unproposed * share))
            progress = replace(progress, unproposed=min(progress.unproposed, fits))
        parts, total = self._work(progress)
        if pace is None:
            parts["waiting"] = total * _WAITING
            total = total + parts["waiting"]
        else:
            total, parts = total * pace, {name: seconds * pace for name, seconds in parts.items()}
        listed = [EstimatePart(name=name, seconds=_span(seconds)) for name, seconds in parts.items() if seconds[2] > 0]
        based, depends = [*self._based_on(pace)], [*self._depends_on(progress)]
        span = _span(total)
        return Estimate(seconds=span, parts=listed, based_on=based, depends_on=depends, text=_text(span, listed))

    def pace(self, progress: _Progress, spent: Mapping[str, float], elapsed_s: float) -> float | None:
        """Returns the seconds that passed for each second of work so far; None before a few trials have ended."""
        computed = math.fsum(spent.get(stage, 0.0) for stage in ("train", "export", "gate")) / self._workers
        measured = spent.get("measure", 0.0) / len(self._runs)
        elsewhere = measured if len(self._host) < len(self._runs) else 0.0
        work = measured * len(self._host) + max(elsewhere, computed)
        if progress.ended < _PACE_AFTER or work <= 0:
            return None
        return min(4.0, max(0.5, elapsed_s / work))

    def _work(self, progress: _Progress, *, rescore: bool = True) -> tuple[dict[str, _Range], _Range]:
        """Returns the seconds of each part, and of all, with or without the re-scoring that follows the search."""
        counts, protocol, runtimes = self._counts(progress), self._space.protocol, len(self._space.runtimes)
        references = [each for each in progress.positions if each.reference]
        # References are measured in full at once, so their confirmation finds its result.
        early = sum(each.stage < 2 for each in references)
        screened = np.maximum(counts[1] - early, 0) * protocol.screen_repetitions + early * protocol.confirm_repetitions
        confirmed = np.maximum(counts[-1] - len(references), 0) * protocol.confirm_repetitions
        calibration = np.zeros(3)
        if not progress.calibrated:
            calibration = _STARTING_S + _CALIBRATION_RUN_S * CALIBRATION_RUNS * len(self._runs) * runtimes
        runs, share = sum(self._runs.values(), np.zeros(3)), 1 / self._workers
        anchors, training = self._anchors(progress) * share, np.sum(self._rungs * counts[2:-1], axis=0) * share
        export = counts[0] * runtimes * _quartiles(self._durations.exports, _EXPORT_S) * share
        checks = counts[-1] * runtimes * _quartiles(self._durations.checks, _CHECK_S) * share
        again = self._rescore(progress, counts[-1], len(references)) * share if rescore else np.zeros(3)
        # Training pauses while this machine is measured; other devices are measured meanwhile.
        here = sum((self._runs[name] for name in self._host), np.zeros(3)) * (screened + confirmed)
        others = [each * (screened + confirmed) for name, each in self._runs.items() if name not in self._host]
        beside = np.max([anchors + export + training + checks, *others], axis=0)
        parts = {
            "calibration": calibration, "anchors": anchors, "export": export, "screen": runs * screened,
            "training": training, "confirm": runs * confirmed + checks, "re-score": again,
        }  # fmt: skip
        return parts, calibration + here + beside + again

    def _counts(self, progress: _Progress) -> _Range:
        """Returns how many trials still go through export, screen, every rung and confirmation: [stages, 3]."""
        feasible = self._feasible(progress)
        passed = [np.ones(3), feasible, *self._promoted(progress, feasible), np.ones(3)]
        counts = np.zeros((len(passed), 3))
        for position, number in [*((each, 1) for each in progress.positions), (_Position(), progress.unproposed)]:
            chance = np.full(3, float(number))
            for stage in range(position.stage, len(passed)):
                if not (position.done and stage == position.stage):
                    counts[stage] += chance
                if not position.reference:
                    chance = chance * passed[stage]
        return np.sort(counts, axis=1)  # rounding may turn their order round

    def _feasible(self, progress: _Progress) -> _Range:
        """Returns the share of layouts within their budgets: a half to all of them, corrected by those of the study."""
        if not self._gated:
            return np.ones(3)
        assumed = np.array([0.5, 0.75, 1.0]) * _PRIOR_TRIALS
        return (progress.feasible + assumed) / (progress.screened + _PRIOR_TRIALS)

    def _promoted(self, progress: _Progress, feasible: _Range) -> Iterator[_Range]:
        """Yields the share that each rung promotes, as its `keep` says."""
        entering = np.maximum(1, np.rint((progress.proposed + progress.unproposed) * feasible))
        for rung in self._space.quality.rungs[:-1]:
            promoted = np.array([float(rung.promoted(int(number))) for number in entering])
            yield promoted / entering
            entering = np.maximum(1, promoted)
        yield np.ones(3)

    def _repetition_of(self, device: str) -> _Range:
        """Returns the seconds of one repetition of every workload with every runtime on a device."""
        total = np.zeros(3)
        for runtime in self._space.runtimes:
            here = [run for run in self._durations.runs if run.place == self._place(device, runtime.name)]
            for name in self._space.measured:
                workload = self._space.workloads[name]
                guess = _guessed_run(self._published, workload)
                same = [run for run in here if run.workload == _unpinned(workload)]
                scaled = []
                for run in same or here:
                    start = min(_START_S, 0.8 * run.seconds)
                    scaled.append(start + (run.seconds - start) * (guess - _START_S) / (run.guess - _START_S))
                total += _quartiles(scaled, guess * _off_by(_GUESS_FACTOR), same_work=bool(same))
        return total

    def _place(self, device: str, runtime: str) -> tuple[str, str]:
        return self._ids.get(device, device), runtime

    def _seconds(self, jobs: Iterable[_Training]) -> _Range:
        """Returns the seconds of trainings, one after the other on one worker."""
        total = np.zeros(3)
        for job in jobs:
            known = self._durations.trainings
            alike = [each for each in known if each[0].kind == job.kind]
            same = [each for each in alike if 1 / _SAME_WORK <= each[0].work / job.work <= _SAME_WORK]
            scaled = [seconds / other.work * job.work for other, seconds in same or alike or known]
            total += _quartiles(scaled, _TRAINING_S * job.work * _off_by(_GUESS_FACTOR), same_work=bool(same))
        return total

    def _anchors(self, progress: _Progress) -> _Range:
        """Returns the seconds of the trainings of anchors and teachers that have no result yet."""
        quality, settings = self._space.quality, self._space.quality.anchors
        jobs = _teachers(quality, self._published, self._corpus)
        unchosen = np.zeros(3)
        if settings is not None:
            config = quality.with_seeds(settings.seeds)
            for layout in (*self._space.references.layouts().values(), *progress.anchors):
                jobs |= _trainings(config, layout, self._corpus)
            if not progress.anchors:
                one = _trainings(config, self._published, self._corpus)
                unchosen = self._seconds(one.values()) * settings.layouts
        done = results.get_many(self._store, [*jobs]) if self._store is not None else {}
        return self._seconds(job for key, job in jobs.items() if key not in done) + unchosen

    def _rescore(self, progress: _Progress, completing: _Range, waiting: int) -> _Range:
        """Returns the seconds of the re-scoring: of the references, and of 25, 50 or 100 % of complete candidates.

        Trainings with a result count as done before their trial is noted as re-scored, which happens to all together.

        Args:
            progress: of the study.
            completing: trials that will be complete.
            waiting: references among them.
        """
        settings, config = self._space.quality.rescore, self._space.quality
        if settings is None:
            return np.zeros(3)
        references = self._space.references.layouts().values()
        candidates = np.maximum(completing - waiting, 0) + len(progress.complete)
        chosen = np.maximum(1, candidates * np.array([0.25, 0.5, 1]))
        fresh = config.with_seeds(settings.seeds)

        def jobs(layout: Layout) -> list[TrainJob]:
            return rung_jobs(fresh, len(config.rungs) - 1, layout, self._corpus)

        keys = [{job.key for job in jobs(layout)} for layout in (*references, *progress.complete)]
        known = results.get_many(self._store, sorted(set().union(*keys))) if self._store is not None else {}
        due: _Range = np.maximum(0, chosen + len(references) - sum(each <= known.keys() for each in keys))
        return self._seconds(_training_of(job, 0) for job in jobs(self._published)) * due

    def _based_on(self, pace: float | None) -> Iterator[str]:
        devices, known = self._space.devices, {run.place for run in self._durations.runs}
        places = {name: {self._place(name, each.name) for each in self._space.runtimes} for name in devices}
        if count := sum(any(run.place in each for each in places.values()) for run in self._durations.runs):
            of = "this device" if len(devices) == 1 else "these devices"
            yield f"{count} measurement{'s' * (count != 1)} of {of}"
        for name in sorted(name for name in devices if not places[name] <= known):
            yield f"a guess for {name}: nothing was measured there yet"
        if count := len(self._durations.trainings):
            yield f"{count} training{'s' * (count != 1)} of this database"
        else:
            yield "a guess for trainings: nothing was trained here yet"
        if pace is not None:
            yield "the pace of this study so far"

    def _depends_on(self, progress: _Progress) -> Iterator[str]:
        low, _, high = self._feasible(progress)
        if self._gated:
            yield f"the share of layouts that keep their budgets ({100 * low:.0f} to {100 * high:.0f} % assumed)"
        if self._bounded:
            yield "budgets on quality (assumed to be kept by all that reach the top rung)"
        yield "what else this machine does"
        yield f"{self._workers} training{'s' * (self._workers != 1)} at the same time"
        if (hours := self._space.search.stop.hours) is not None:
            yield f"the end of proposals after {hours:g} h"
        if self._space.quality.promote == "value":
            yield "promotion by value (assumed to promote as many as `keep` says)"


def _ladder(config: QualityConfig, layout: Layout, corpus: CorpusRef) -> list[dict[str, _Training]]:
    """Returns for each rung the trainings that it adds to those before, by result key."""
    return _cached_ladder(config.model_dump_json(), layout.format(), corpus.hash)


@lru_cache(maxsize=2048)
def _cached_ladder(settings: str, text: str, corpus_hash: str) -> list[dict[str, _Training]]:
    config, layout = QualityConfig.model_validate_json(settings), Layout.parse(text)
    corpus = CorpusRef(source="default", hash=corpus_hash)
    steps: dict[str, int] = {}
    found = []
    for rung in range(len(config.rungs)):
        jobs = {job.key: job for job in rung_jobs(config, rung, layout, corpus)}
        new = {key: job for key, job in jobs.items() if key not in steps}
        found.append({key: _training_of(job, steps.get(job.resume_from or "", 0)) for key, job in new.items()})
        steps |= {key: job.steps for key, job in jobs.items()}
    return found


def _trainings(config: QualityConfig, layout: Layout, corpus: CorpusRef) -> dict[str, _Training]:
    """Returns the trainings of all rungs by result key."""
    return {key: job for rung in _ladder(config, layout, corpus) for key, job in rung.items()}


def _training_of(job: TrainJob, resumed_at: int) -> _Training:
    run = job.run
    if isinstance(run, LibraryRun):
        kind, length = f"library/{run.evaluated}", 1 if run.evaluated == "sum" else _LIBRARY_TOKENS
    elif isinstance(run, LmRun):
        kind, length = "lm", run.length
    else:
        kind, length = f"task/{run.task}", make_task(run.task, run.settings).length
    weights = proxy_layout(job).params.active
    return _Training(kind, float(max(1, job.steps - resumed_at) * job.batch * length * weights))


def _teachers(config: QualityConfig, layout: Layout, corpus: CorpusRef) -> dict[str, _Training]:
    jobs = [job for rung in range(len(config.rungs)) for job in rung_jobs(config, rung, layout, corpus)]
    return {job.teacher.job.key: _training_of(job.teacher.job, 0) for job in jobs if job.teacher is not None}


def _corpus(used: Sequence[CorpusUsed]) -> CorpusRef:
    """Returns the corpus that the keys of a study's trainings were made with."""
    return CorpusRef(source="default", hash=used[-1].hash if used else "0" * 64)


def _progress(space: SearchSpace, rows: Sequence[Trial], log: Sequence[Event], wanted: int, hours: float) -> _Progress:
    trained = {(each.trial, known.rung) for each in log if (known := QualityKnown.read(each.payload))}
    own = [row for row in rows if row.origin != "reference" and row.status.state is not TrialState.CANCELLED]
    feasible = sum(row.status.rung is not None for row in own)
    chosen = notes(log, AnchorsChosen)
    positions = [_position(row, trained, len(space.quality.rungs)) for row in rows if not row.status.terminal]
    missing = len(space.references.layouts()) - sum(row.origin == "reference" for row in rows)
    return _Progress(
        positions=[*positions, *[_Position(reference=True)] * missing],
        unproposed=0 if ending(log) else max(0, wanted - len(own)),
        proposed=len(own),
        screened=feasible + sum(row.status.state is TrialState.INFEASIBLE and row.status.rung is None for row in own),
        feasible=feasible,
        complete=[Layout.from_json(row.layout) for row in own if row.status.state is TrialState.COMPLETE],
        ended=sum(row.status.terminal for row in own),
        calibrated=bool(calibrated_devices(log)),
        anchors=[Layout.from_json(dict(layout)) for layout in chosen[-1].layouts] if chosen else (),
        hours=hours,
    )


def _position(row: Trial, trained: set[tuple[int | None, int]], rungs: int) -> _Position:
    rung, done = row.status.rung or 0, False
    match row.status.state:
        case TrialState.PROPOSED:
            stage = 0
        case TrialState.EXPORTED | TrialState.MEASURING | TrialState.BORDERLINE:
            stage = 1
        case TrialState.GATED_IN:
            stage = 2
        case TrialState.TRAINING:
            stage, done = 2 + rung, (row.number, rung) in trained
        case _:
            stage = 2 + rungs
    return _Position(stage, done, row.origin == "reference")


def _read_others(store: Store, into: _Durations, but: int | None) -> None:
    """Reads the durations of the latest studies of the database."""
    for study in [each for each in studies.all(store) if each.id != but][: -_OTHER_STUDIES - 1 : -1]:
        try:
            space = stored_space(study)
        except InvalidInput:
            continue  # of another version
        corpus = _corpus(notes(events.notes(store, study.id, CORPUS), CorpusUsed))
        _read(store, into, study, space, corpus, trials.all(store, study.id), _TRIALS_READ)


def _read(
    store: Store, into: _Durations, study: Study, space: SearchSpace, corpus: CorpusRef, rows: Sequence[Trial],
    most: int,
) -> None:  # fmt: skip
    """Reads the durations of the references of a study and of its latest trials."""
    begun = [row for row in rows if row.status.state is not TrialState.PROPOSED]
    some = [row for row in begun if row.origin == "reference"] + [r for r in begun if r.origin != "reference"][-most:]
    found = results.summaries(store, study.id, [row.number for row in some])
    for row in some:
        layout = Layout.from_json(row.layout)
        trainings = _trainings(space.quality, layout, corpus)
        for each in found.get(row.number, ()):
            into.add(each, layout, trainings)


def _unpinned(workload: Workload) -> Workload:
    """Returns a workload without the cores that it is pinned to, which do not change how long it takes."""
    return workload.model_copy(update={"affinity": ()})


def _guessed_run(layout: Layout, workload: Workload) -> float:
    tokens = workload.prompt * _PROMPT_S + workload.gen * _GEN_S
    return _START_S + layout.params.active * tokens / workload.threads


def _off_by(factor: float) -> _Range:
    return np.array([1 / factor, 1, factor])


def _quartiles(values: Sequence[float], guess: _Range, *, same_work: bool = True) -> _Range:
    """Returns the quartiles, widened where there are few values or these are of other work; the guess without any."""
    if not values:
        return guess
    found = np.quantile(values, (0.25, 0.5, 0.75))
    found = found * _off_by(1.0 if len(values) >= _FEW else _FEW_FACTOR)
    return found * _off_by(1.0 if same_work else _OTHER_WORK_FACTOR)


def _span(seconds: _Range) -> Span:
    low, typical, high = map(float, seconds)
    return Span(low=low, typical=typical, high=high)


def _text(total: Span, parts: Sequence[EstimatePart]) -> str:
    large = [part for part in parts if part.seconds.typical >= max(30.0, 0.05 * total.typical)]
    named = ", ".join(f"{part.name} {about(part.seconds.typical)}" for part in large)
    return f"{in_words(total)}{': ' if named else ''}{named}"


def in_words(span: Span) -> str:
    """Returns a range as words, such as 'about 2 h 10 min (1 h 30 min to 3 h)'."""
    low, typical, high = (about(each) for each in (span.low, span.typical, span.high))
    return f"about {typical}" + (f" ({low} to {high})" if low != high else "")


def about(seconds: float) -> str:
    """Returns a duration with no more digits than an estimate has: 40 s, 8 min, 2 h 10 min, 3 d 4 h."""
    if seconds < 95:
        return f"{max(5, round(seconds / 5) * 5) if seconds < 57 else round(seconds / 10) * 10} s"
    minutes = round(seconds / 60)
    if minutes >= 20:
        minutes = round(minutes / 5) * 5
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60) if minutes < 600 else (round(minutes / 60), 0)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    return f"{hours // 24} d" + (f" {hours % 24} h" if hours % 24 else "")
