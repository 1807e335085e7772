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
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig
from nas.core.scoring import PUBLISHED
from nas.core.space import SearchSpace
from nas.core.task import make_task
from nas.core.trial import Event, TrialState
from nas.core.workload import Workload
from nas.farm.farm import LOCAL
from nas.measure.reference import CALIBRATION_RUNS
from nas.proxy.corpus import CorpusRef
from nas.proxy.job import LmRun, TrainJob, proxy_layout
from nas.proxy.ladder import rung_jobs
from nas.store import events, results, studies, trials
from nas.store.results import ResultSummary
from nas.store.rows import Study, Trial
from nas.store.store import Store
from nas.study.events import (
    CORPUS,
    RESCORED,
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

_OTHER_STUDIES, _TRIALS_READ, _OWN_TRIALS_READ = 4, 10, 16
"""Latest studies, and the latest trials of each, whose durations are read."""
_FEW = 4
"""Results below which quartiles say little, so that the range is widened."""
_START_S = 1.5
"""Of a repetition, what does not grow with the model: two processes, and the run of the reference model."""
_SECONDS_PER_WEIGHT = {"prompt": 3e-11, "gen": 8e-11}
"""Guess for one thread: seconds per weight and token of the prompt, and per weight and decoded token."""
_SECONDS_PER_TRAINING = 6e-10
"""Guess: seconds per token and weight of a proxy on one core (6 operations at 10 billion a second)."""
_GUESS_FACTOR, _OTHER_WORK_FACTOR, _FEW_FACTOR = 3.0, 1.6, 1.25
"""How far off guesses, figures of other workloads or trainings, and figures of few results may be."""
_SAME_WORK = (1.3, 2.0)
"""Factors within which trainings count as of the same size; the second where there is none within the first."""
_PRIOR_TRIALS = 4.0
"""Trials that the assumed share of layouts within their budgets is worth."""
_OVERHEAD_AFTER = 3
"""Trials that must have ended before the study's own pace corrects the sum of its work."""


class Span(BaseModel):
    """A duration in seconds, as a range."""

    model_config = ConfigDict(frozen=True)

    low: float
    typical: float
    high: float

    def __add__(self, other: Span) -> Span:
        """Returns the sum; all low or all high at once, because what is off is off for all parts alike."""
        return Span(low=self.low + other.low, typical=self.typical + other.typical, high=self.high + other.high)

    def times(self, counts: Span | float) -> Span:
        """Returns the product with a number or a range of numbers."""
        by = counts if isinstance(counts, Span) else Span(low=counts, typical=counts, high=counts)
        return Span(low=self.low * by.low, typical=self.typical * by.typical, high=self.high * by.high)

    def widened(self, factor: float) -> Span:
        """Returns the range with its ends moved by a factor."""
        return Span(low=self.low / factor, typical=self.typical, high=self.high * factor)


class EstimatePart(BaseModel):
    """One kind of work of a study."""

    name: str = Field(description="calibration, anchors, export, screen, training, confirm, re-score or waiting")
    seconds: Span


class Estimate(BaseModel):
    """How long a study takes, or what remains of it."""

    seconds: Span = Field(description="of time that passes; measuring and training may overlap")
    parts: list[EstimatePart] = Field(description="in the order in which they begin")
    based_on: list[str] = Field(description="what the durations were taken from")
    depends_on: list[str] = Field(description="what was assumed of the layouts, and other conditions")
    text: str = Field(description="the range and its larger parts")


_NOTHING = Span(low=0, typical=0, high=0)
_START = Span(low=10, typical=35, high=90)
"""Seconds from the launch to the first run of the reference model: Ray, runners and the reference's export."""
_WAITING = Span(low=0, typical=0.2, high=0.6)
"""Share of the work that proposals, waits and other processes add, until the study's own pace is known."""


class _Training(NamedTuple):
    """A training: `lm` or `task/NAME`, and its steps times tokens times weights."""

    kind: str
    work: float


class _Run(NamedTuple):
    """A stored measurement: seconds per repetition, and what a guess says for its model and workload."""

    place: tuple[str, str]
    workload: str
    seconds: float
    guess: float


@dataclass
class Durations:
    """Durations of stored results."""

    runs: list[_Run] = field(default_factory=list)
    trainings: list[tuple[_Training, float]] = field(default_factory=list)
    exports: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """Keys, because studies share results."""


@dataclass(frozen=True)
class _Position:
    """Where a trial is: the stage that it is in, and whether that is done and only what follows remains."""

    stage: int
    done: bool
    reference: bool


@dataclass(frozen=True)
class _Progress:
    """How far a study is; the default is one that has not begun."""

    positions: Sequence[_Position] = ()
    unproposed: int = 0
    proposed: int = 0
    screened: int = 0
    feasible: int = 0
    complete: int = 0
    ended: int = 0
    rescored: int = 0
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
    wanted = min(wanted, len(space.layouts) or wanted)
    references = [_Position(0, done=False, reference=True)] * len(space.references.layouts())
    durations = Durations()
    if store is not None:
        _read_others(store, durations, None)
    return _Estimator(store, space, _corpus([]), ids, workers, durations).estimate(_Progress(references, wanted))


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
    durations = Durations()
    _read(store, durations, study, space, corpus, rows, _OWN_TRIALS_READ)
    if len(durations.runs) < _FEW or len(durations.trainings) < _FEW:
        _read_others(store, durations, study.id)
    ids = {name: id for name, id in calibrated_devices(log)}
    estimator = _Estimator(store, space, corpus, ids, workers or os.cpu_count() or 1, durations)
    running_s = elapsed(log)[-1] + max(0.0, store.now() - log[-1].at)
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
        durations: Durations,
    ) -> None:  # fmt: skip
        self._store, self._space, self._corpus, self._workers = store, space, corpus, max(1, workers)
        self._ids, self._durations = ids, durations
        self._published = space.references.layouts()[PUBLISHED]
        self._guessed_devices: set[str] = set()
        self._runs_used: set[int] = set()
        self._runs = {name: self._repetition_of(name) for name in space.devices}
        self._ladder = [[*found.values()] for found in _ladder(space.quality, self._published, corpus)]
        self._export = _quartiles(durations.exports) or Span(low=0.5, typical=2, high=15)
        self._check = _quartiles(durations.checks) or Span(low=2, typical=5, high=20)

    def estimate(self, progress: _Progress, pace: float | None = None) -> Estimate:
        """Returns the estimate; `pace` is the time that passes for a second of work, None if it is not known."""
        progress = self._until_hours(progress)
        counts = self._counts(progress)
        measured = {name: self._measured(name, progress, counts) for name in self._space.devices}
        screen, confirm = (_sum(each[part] for each in measured.values()) for part in (0, 1))
        share = 1 / self._workers
        training = _sum(self._seconds(jobs).times(n) for jobs, n in zip(self._ladder, counts[2:-1], strict=True))
        anchors, exports = self._anchors(progress), self._export.times(counts[0]).times(len(self._space.runtimes))
        checks = self._check.times(counts[-1]).times(len(self._space.runtimes))
        rescore = self._rescore(progress, counts[-1])
        calibration = _NOTHING if progress.calibrated else self._calibration()
        named = {
            "calibration": calibration, "anchors": anchors.times(share), "export": exports.times(share),
            "screen": screen, "training": training.times(share), "confirm": confirm + checks.times(share),
            "re-score": rescore.times(share),
        }  # fmt: skip
        # Training pauses while this machine is measured; other devices are measured meanwhile.
        here, elsewhere = _NOTHING, _NOTHING
        for name, (first, last) in measured.items():
            if self._is_host(name):
                here += first + last
            else:
                elsewhere = _longer(elsewhere, first + last)
        computed = (anchors + training + exports + checks).times(share)
        total = calibration + here + _longer(elsewhere, computed) + named["re-score"]
        if pace is None:
            named["waiting"] = total.times(_WAITING)
            total += named["waiting"]
        else:
            total, named = total.times(pace), {name: span.times(pace) for name, span in named.items()}
        parts = [EstimatePart(name=name, seconds=span) for name, span in named.items() if span.high > 0]
        return Estimate(
            seconds=total, parts=parts, based_on=self._based_on(pace), depends_on=[*self._depends_on(progress)],
            text=_text(total, parts),
        )  # fmt: skip

    def pace(self, progress: _Progress, spent: Mapping[str, float], elapsed_s: float) -> float | None:
        """Returns the seconds that passed for each second of work so far; None before a few trials have ended."""
        computed = math.fsum(spent.get(stage, 0.0) for stage in ("train", "export", "gate")) / self._workers
        measured = spent.get("measure", 0.0)
        here = [name for name in self._space.devices if self._is_host(name)]
        apart = measured * (1 - len(here) / len(self._space.devices)) / max(1, len(self._space.devices) - len(here))
        work = measured * len(here) / len(self._space.devices) + max(apart, computed)
        if progress.ended < _OVERHEAD_AFTER or work <= 0:
            return None
        return min(4.0, max(0.5, elapsed_s / work))

    def _is_host(self, name: str) -> bool:
        return name == LOCAL or self._ids.get(name, name) == self._ids.get(LOCAL)

    def _until_hours(self, progress: _Progress) -> _Progress:
        """Returns the progress with no more proposals than `stop.hours` leaves time for."""
        hours = self._space.search.stop.hours
        if hours is None or not progress.unproposed:
            return progress
        one = _Progress([_Position(0, done=False, reference=False)], screened=progress.screened,
                        feasible=progress.feasible, calibrated=True)  # fmt: skip
        each = self._without_hours(one).typical
        before = self._without_hours(_Progress(progress.positions, calibrated=progress.calibrated)).typical
        fits = max(1, math.ceil(((hours - progress.hours) * 3600 - before) / max(each, 1e-9)))
        return replace(progress, unproposed=min(progress.unproposed, fits))

    def _without_hours(self, progress: _Progress) -> Span:
        counts = self._counts(progress)
        measured = _sum(part for name in self._space.devices for part in self._measured(name, progress, counts))
        trained = _sum(self._seconds(jobs).times(n) for jobs, n in zip(self._ladder, counts[2:-1], strict=True))
        return measured + (trained + self._export.times(counts[0])).times(1 / self._workers)

    def _counts(self, progress: _Progress) -> list[Span]:
        """Returns how many trials still go through each stage: export, screen, every rung, confirm."""
        low, typical, high = (self._counted(progress, index) for index in range(3))
        found = (sorted(each) for each in zip(low, typical, high, strict=True))  # rounding may turn their order round
        return [Span(low=a, typical=b, high=c) for a, b, c in found]

    def _counted(self, progress: _Progress, scenario: int) -> list[float]:
        rungs = self._space.quality.rungs
        passed = [1.0, self._feasible(progress)[scenario], *self._promoted(progress, scenario), 1.0]
        found = [0.0] * (len(rungs) + 3)
        new = [_Position(0, done=False, reference=False)] * progress.unproposed
        for position in (*progress.positions, *new):
            chance = 1.0
            for stage in range(position.stage, len(found)):
                if not (position.done and stage == position.stage):
                    found[stage] += chance
                chance *= 1.0 if position.reference else passed[stage]
        return found

    def _feasible(self, progress: _Progress) -> tuple[float, float, float]:
        """Returns the share of layouts within their budgets: a half to all of them, corrected by those of the study."""
        if not self._space.budgets:
            return 1.0, 1.0, 1.0
        seen = progress.screened + _PRIOR_TRIALS
        low, typical, high = ((progress.feasible + share * _PRIOR_TRIALS) / seen for share in (0.5, 0.75, 1.0))
        return low, typical, high

    def _promoted(self, progress: _Progress, scenario: int) -> Iterator[float]:
        """Yields the share that each rung promotes, as its `keep` says."""
        entering = max(1, round((progress.proposed + progress.unproposed) * self._feasible(progress)[scenario]))
        for rung in self._space.quality.rungs[:-1]:
            yield rung.promoted(entering) / entering
            entering = max(1, rung.promoted(entering))
        yield 1.0

    def _measured(self, device: str, progress: _Progress, counts: Sequence[Span]) -> tuple[Span, Span]:
        """Returns the seconds of device time for screening and for confirmation."""
        protocol = self._space.protocol
        references = sum(each.reference and each.stage < 2 for each in progress.positions)
        run = self._runs[device]
        # References are measured in full at once, so their confirmation finds its result.
        own = _less(counts[1], references).times(protocol.screen_repetitions)
        screened = own + Span(low=1, typical=1, high=1).times(references * protocol.confirm_repetitions)
        waiting = sum(each.reference for each in progress.positions)
        return run.times(screened), run.times(_less(counts[-1], waiting)).times(protocol.confirm_repetitions)

    def _repetition_of(self, device: str) -> Span:
        """Returns the seconds of one repetition of every workload with every runtime on a device."""
        total = _NOTHING
        for runtime in self._space.runtimes:
            for name in self._space.measured:
                total += self._repetition(device, runtime.name, self._space.workloads[name])
        return total

    def _repetition(self, device: str, runtime: str, workload: Workload) -> Span:
        guess, place = _guessed_run(self._published, workload), (self._ids.get(device, device), runtime)
        here = [(index, run) for index, run in enumerate(self._durations.runs) if run.place == place]
        same = [each for each in here if each[1].workload == _workload_key(workload.model_dump(mode="json"))]
        if not here:
            self._guessed_devices.add(device)
            return Span(low=guess, typical=guess, high=guess).widened(_GUESS_FACTOR)
        used = same or here
        self._runs_used |= {index for index, _ in used}
        scaled = []
        for _, run in used:
            start = min(_START_S, 0.8 * run.seconds)
            scaled.append(start + (run.seconds - start) * (guess - _START_S) / (run.guess - _START_S))
        found = _quartiles(scaled)
        assert found is not None, "there are some"
        return found if same else found.widened(_OTHER_WORK_FACTOR)

    def _calibration(self) -> Span:
        runs = CALIBRATION_RUNS * len(self._space.devices) * len(self._space.runtimes)
        return _START + Span(low=0.5, typical=1.5, high=5).times(runs)

    def _seconds(self, jobs: Iterable[_Training]) -> Span:
        """Returns the seconds of trainings, one after the other on one worker."""
        return _sum(map(self._training, jobs))

    def _training(self, job: _Training) -> Span:
        known = self._durations.trainings
        alike = [each for each in known if each[0].kind == job.kind]
        near = (
            [each for each in alike if 1 / factor <= each[0].work / job.work <= factor] for factor in _SAME_WORK
        )  # fmt: skip
        same = next(filter(None, near), [])
        rates = [seconds / other.work for other, seconds in same or alike or known]
        found = _quartiles([rate * job.work for rate in rates])
        if found is None:
            guess = _SECONDS_PER_TRAINING * job.work
            return Span(low=guess, typical=guess, high=guess).widened(_GUESS_FACTOR)
        return found if same else found.widened(_OTHER_WORK_FACTOR)

    def _anchors(self, progress: _Progress) -> Span:
        """Returns the seconds of the trainings of anchors and teachers that have no result yet."""
        settings, quality = self._space.quality.anchors, self._space.quality
        jobs = _teachers(quality, self._published, self._corpus)
        further = 0
        if settings is not None:
            config = quality.with_seeds(settings.seeds)
            layouts = [*self._space.references.layouts().values(), *progress.anchors]
            further = 0 if progress.anchors else settings.layouts
            for layout in layouts:
                for found in _ladder(config, layout, self._corpus):
                    jobs |= found
        done = results.get_many(self._store, [*jobs]) if self._store is not None else {}
        left = self._seconds(job for key, job in jobs.items() if key not in done)
        if settings is not None and further:
            one = [job for found in _ladder(config, self._published, self._corpus) for job in found.values()]
            left += self._seconds(one).times(further)
        return left

    def _rescore(self, progress: _Progress, completing: Span) -> Span:
        """Returns the seconds of the re-scoring: of the references, and of half to all candidates that are complete."""
        settings, config = self._space.quality.rescore, self._space.quality
        if settings is None:
            return _NOTHING
        references = len(self._space.references.layouts())
        waiting = sum(each.reference for each in progress.positions)
        candidates = _less(completing, waiting)
        ends = [getattr(candidates, name) + progress.complete for name in ("low", "typical", "high")]
        due = [max(1.0, ends[0] * 0.25), max(1.0, ends[1] * 0.5), max(1.0, ends[2])]
        low, typical, high = (max(0.0, each + references - progress.rescored) for each in due)
        jobs = rung_jobs(config.with_seeds(settings.seeds), len(config.rungs) - 1, self._published, self._corpus)
        return self._seconds(_training_of(job, 0) for job in jobs).times(Span(low=low, typical=typical, high=high))

    def _based_on(self, pace: float | None) -> list[str]:
        count, trained = len(self._runs_used), len(self._durations.trainings)
        found = []
        if count:
            devices = "this device" if len(self._space.devices) == 1 else "these devices"
            found.append(f"{count} measurement{'s' * (count != 1)} of {devices}")
        for name in sorted(self._guessed_devices):
            found.append(f"a guess for {name}: nothing was measured there yet")
        found.append(
            f"{trained} training{'s' * (trained != 1)} of this database" if trained
            else "a guess for trainings: nothing was trained here yet"
        )  # fmt: skip
        return [*found, *(["the pace of this study so far"] if pace is not None else [])]

    def _depends_on(self, progress: _Progress) -> Iterator[str]:
        low, _, high = self._feasible(progress)
        if self._space.budgets:
            yield f"the share of layouts that keep their budgets ({100 * low:.0f} to {100 * high:.0f} % assumed)"
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
        found.append(
            {
                key: _training_of(job, steps.get(job.resume_from or "", 0))
                for key, job in jobs.items()
                if key not in steps
            }
        )
        steps |= {key: job.steps for key, job in jobs.items()}
    return found


def _training_of(job: TrainJob, resumed_at: int) -> _Training:
    run = job.run
    if isinstance(run, LmRun):
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
        positions=[*positions, *[_Position(0, done=False, reference=True)] * missing],
        unproposed=0 if ending(log) else max(0, wanted - len(own)),
        proposed=len(own),
        screened=feasible + sum(row.status.state is TrialState.INFEASIBLE for row in own),
        feasible=feasible,
        complete=sum(row.status.state is TrialState.COMPLETE for row in own),
        ended=sum(row.status.terminal for row in own),
        rescored=len({each.trial for each in log if each.payload.get("what") == RESCORED}),
        calibrated=bool(calibrated_devices(log)),
        anchors=[Layout.from_json(dict(layout)) for layout in chosen[-1].layouts] if chosen else (),
        hours=hours,
    )


def _position(row: Trial, trained: set[tuple[int | None, int]], rungs: int) -> _Position:
    reference, rung = row.origin == "reference", row.status.rung or 0
    match row.status.state:
        case TrialState.PROPOSED:
            return _Position(0, done=False, reference=reference)
        case TrialState.EXPORTED | TrialState.MEASURING | TrialState.BORDERLINE:
            return _Position(1, done=False, reference=reference)
        case TrialState.GATED_IN:
            return _Position(2, done=False, reference=reference)
        case TrialState.TRAINING:
            return _Position(2 + rung, done=(row.number, rung) in trained, reference=reference)
        case _:
            return _Position(2 + rungs, done=False, reference=reference)


def _read_others(store: Store, into: Durations, but: int | None) -> None:
    """Reads the durations of the latest studies of the database."""
    for study in [each for each in studies.all(store) if each.id != but][: -_OTHER_STUDIES - 1 : -1]:
        try:
            space = stored_space(study)
        except InvalidInput:
            continue  # of another version
        corpus = _corpus(notes(events.notes(store, study.id, CORPUS), CorpusUsed))
        _read(store, into, study, space, corpus, trials.all(store, study.id), _TRIALS_READ)


def _read(
    store: Store, into: Durations, study: Study, space: SearchSpace, corpus: CorpusRef, rows: Sequence[Trial], most: int
) -> None:
    """Reads the durations of the references of a study and of its latest trials."""
    begun = [row for row in rows if row.status.state is not TrialState.PROPOSED]
    some = [row for row in begun if row.origin == "reference"] + [r for r in begun if r.origin != "reference"][-most:]
    found = results.summaries(store, study.id, [row.number for row in some])
    for row in some:
        layout = Layout.from_json(row.layout)
        for trained in _ladder(space.quality, layout, corpus):
            for each in found.get(row.number, ()):
                if each.key in trained and each.key not in into.seen and each.seconds > 0:
                    into.seen.add(each.key)
                    into.trainings.append((trained[each.key], each.seconds))
        for each in found.get(row.number, ()):
            if each.key not in into.seen:
                _take(each, layout, into)


def _take(each: ResultSummary, layout: Layout, into: Durations) -> None:
    if each.stage in ("export", "gate") and each.seconds > 0:
        into.seen.add(each.key)
        (into.exports if each.stage == "export" else into.checks).append(each.seconds)
    elif each.stage == "measure" and each.device and each.runtime and each.workload and each.figures:
        into.seen.add(each.key)
        workload, repetitions = json.loads(each.workload), json.loads(each.figures)["ttft"]["n"]
        if repetitions and each.seconds > 0:
            guess = _guessed_run(layout, Workload.model_validate(workload))
            place = (each.device, each.runtime)
            into.runs.append(_Run(place, _workload_key(workload), each.seconds / repetitions, guess))


def _workload_key(workload: Mapping[str, Any]) -> str:
    """Returns what two workloads have in common that take equally long: all but the cores that they are pinned to."""
    return json.dumps({name: value for name, value in workload.items() if name != "affinity"}, sort_keys=True)


def _guessed_run(layout: Layout, workload: Workload) -> float:
    tokens = math.fsum(getattr(workload, name) * rate for name, rate in _SECONDS_PER_WEIGHT.items())
    return _START_S + layout.params.active * tokens / workload.threads


def _quartiles(values: Sequence[float]) -> Span | None:
    if not values:
        return None
    low, typical, high = (float(each) for each in np.quantile(values, (0.25, 0.5, 0.75)))
    found = Span(low=low, typical=typical, high=high)
    return found if len(values) >= _FEW else found.widened(_FEW_FACTOR)


def _sum(spans: Iterable[Span]) -> Span:
    total = _NOTHING
    for span in spans:
        total += span
    return total


def _longer(one: Span, other: Span) -> Span:
    return Span(
        low=max(one.low, other.low), typical=max(one.typical, other.typical), high=max(one.high, other.high)
    )  # fmt: skip


def _less(counts: Span, by: float) -> Span:
    low, typical, high = (max(0.0, each - by) for each in (counts.low, counts.typical, counts.high))
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
