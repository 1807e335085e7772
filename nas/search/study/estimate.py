"""How long a study takes, or what remains of it: rough seconds of its work, times a pace.

Rough seconds follow from tokens, weights and repetitions, with the share of layouts that get to a stage. The pace is
the time that passed for a rough second: of this study once some of its trials have ended, else the median of earlier
studies of the same devices, else a guess. Of the stages that trials are in, what the time since the last event is worth
counts as done, up to half of them.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.quality_config import QualityConfig
from nas.core.scoring import PUBLISHED
from nas.core.space import SearchSpace
from nas.core.task import MediaTask, make_task, text_length
from nas.core.trial import Event, TrialState
from nas.core.units import show_duration
from nas.core.workload import Workload
from nas.infra.store import studies, trials
from nas.infra.store.rows import Study, Trial
from nas.infra.store.store import Store
from nas.measure.protocol.reference import CALIBRATION_RUNS
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.job import LibraryRun, LmRun, TrainJob, proxy_layout
from nas.search.proxy.ladder import rung_jobs
from nas.search.study.events import (
    BY_PEOPLE,
    Launched,
    Named,
    QualityKnown,
    Remeasured,
    Rescored,
    all_events,
    calibrated_devices,
    closing,
    elapsed,
    notes,
    stored_space,
)

_OTHER_STUDIES = 8
"""Latest other studies whose pace is read."""
_START_S = 1.5
"""Rough seconds of a repetition that do not grow with the model: two processes, and the reference model's run."""
_PROMPT_S = 3e-11
"""Rough seconds per weight and token of the prompt, on one thread."""
_DECODE_S = 8e-11
"""Rough seconds per weight and decoded token, on one thread."""
_TRAINING_S = 6e-10
"""Rough seconds per token and weight of a proxy on one core (6 operations at 10 billion a second)."""
_LIBRARY_TOKENS = 1 << 12
"""Rough number of tokens of held-out text that a part of an assembled mix is evaluated on."""
_EXPORT_S = 2.0
"""Rough seconds of an export."""
_CHECK_S = 5.0
"""Rough seconds of a check of the exported graph."""
_STARTING_S = 35.0
"""Rough seconds from the launch to the first run of the reference model: Ray, runners, the reference's export."""
_CALIBRATION_RUN_S = 1.5
"""Rough seconds of a run of the reference model."""
_FEASIBLE = 0.75
"""Share of layouts within their budgets that is assumed, before any was measured."""
_PRIOR_TRIALS = 4.0
"""Trials that the assumed share is worth."""
_RESCORED = 0.5
"""Share of complete candidates that is assumed to be near the front."""
_ON_FRONT = 0.3
"""Share of complete candidates that is assumed to be on the front."""
_UNDER_WAY = 0.5
"""Share of the stages under way that may count as done."""
_PACE_AFTER = 3
"""Trials that must have ended before a study's pace counts."""
_OWN_FACTOR = 1.4
"""Factor between the typical duration and both ends of its range, by the pace of the study itself."""
_EARLIER_FACTOR = 1.8
"""The same by the pace of earlier studies."""
_GUESSED_FACTOR = 3.0
"""The same by a guess."""


class Span(BaseModel):
    """A duration in seconds, as a range."""

    model_config = ConfigDict(frozen=True)

    low: float
    typical: float
    high: float

    @property
    def text(self) -> str:
        """The range in words, such as 'about 2 h 10 min (1 h 30 min to 3 h)'."""
        low, typical, high = (show_duration(end, rough=True) for end in (self.low, self.typical, self.high))
        return f"about {typical}" + (f" ({low} to {high})" if low != high else "")


class EstimatePart(BaseModel):
    """One kind of work of a study."""

    name: str = Field(description="calibration, anchors, export, screen, training, confirm, re-measure or re-score")
    seconds: Span


_SPAN: JsonDict = {"low": 900.0, "typical": 1500.0, "high": 2900.0}
_EXAMPLE: JsonDict = {
    "seconds": _SPAN,
    "parts": [{"name": "training", "seconds": _SPAN}],
    "based_on": ["trainings of this database"],
    "depends_on": ["half of the layouts keep the budgets"],
    "text": "about 25 min (15 to 48 min): training 25 min",
}


class Estimate(BaseModel):
    """How long a study takes, or what remains of it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    seconds: Span = Field(description="of time that passes")
    parts: list[EstimatePart] = Field(description="in the order in which they begin")
    based_on: list[str] = Field(description="what the durations were taken from")
    depends_on: list[str] = Field(description="what was assumed of the layouts, and other conditions")
    text: str = Field(description="the range and its larger parts")


def estimate(store: Store | None, space: SearchSpace, trials: int, ids: Mapping[str, str], workers: int) -> Estimate:
    """Estimates a study that has not begun: `ids` are those of registered devices by their names in the space."""
    devices = {ids.get(name, name) for name in space.devices}
    paces = [] if store is None else _earlier_paces(store, devices, None, workers)
    unproposed = min(trials, len(space.listed()) or trials)
    return _estimate(_Progress(space, unproposed, feasible=_feasible_share(space)), None, paces, workers)


def estimate_left(store: Store, study: Study, workers: int | None = None) -> Estimate | None:
    """Estimates what remains of a study; None before it was launched.

    Raises:
        InvalidInput: its space cannot be read.
    """
    workers = workers or len(os.sched_getaffinity(0))  # as a launch
    log = all_events(store, study.id)
    progress = _read(store, study, log)
    if progress is None:
        return None
    newest = max(event.at for event in log if event.payload.get("what") not in BY_PEOPLE)
    progress = replace(progress, since_s=max(0.0, store.now() - newest))
    pace = progress.pace(workers)
    paces = [] if pace is not None else _earlier_paces(store, progress.devices, study.id, workers)
    return _estimate(progress, pace, paces, workers, slowest=progress.pace(workers, after=0) or 0.0)


class _Position(NamedTuple):
    """How many stages a trial has passed, of export, screen, each rung, and confirmation."""

    done: int = 0
    waits: bool = False  # it is not decided that it enters the next one
    has_ended: bool = False


@dataclass(frozen=True)
class _Progress:
    """How far a study is; the default is one that has not begun."""

    space: SearchSpace
    unproposed: int = 0
    candidates: Sequence[_Position] = ()
    references: Sequence[_Position] = ()
    feasible: float = 1.0
    anchored: int = 0  # lowest rungs that have a scale, so that their anchors and teachers are trained
    rescored: int = 0
    named: int | None = None  # layouts that are measured again; None: not known yet
    remeasured: int = 0  # rounds of the second measurement, of all trials together
    devices: frozenset[str] = frozenset()  # ids of those that were calibrated
    elapsed_s: float = 0.0  # until the newest event
    since_s: float = 0.0  # since then

    def pace(self, workers: int, after: int = _PACE_AFTER) -> float | None:
        """Returns the time that passed for a rough second of work; None before `after` trials have ended.

        Less than all of the work under way counts: the fewer trials have ended, the more this is too slow.
        """
        if sum(position.has_ended for position in self.candidates) < after:
            return None
        counts = [float(sum(position.done > stage for position in self._positions)) for stage in self._stages]
        done = sum(self._parts(counts, range(self.anchored), self.rescored, self.remeasured, 1, workers).values())
        under_way_s = sum(self.seconds_under_way(self.elapsed_s / done, workers).values()) if self.elapsed_s else 0.0
        return (self.elapsed_s + self.since_s) / (done + under_way_s)

    def seconds_under_way(self, pace: float, workers: int) -> dict[str, float]:
        """Returns the rough seconds of each part that the time since the last event is worth at a pace."""
        counts = [
            float(
                sum(
                    position.done == stage and not (position.has_ended or position.waits)
                    for position in self._positions
                )
            )
            for stage in self._stages
        ]
        rungs = range(self.anchored, len(self.space.quality.rungs))
        if any(counts):
            parts = self._parts(counts, [rung for rung in rungs if counts[2 + rung]], 0, 0, 0, workers)
        else:  # the second measurement and fresh seeds, once nothing else is left
            parts = {} if self.unproposed or not self.candidates else self.seconds_left(0, workers)
        share = min(_UNDER_WAY, self.since_s / max(pace * sum(parts.values()), 1e-9))
        return {name: share * seconds for name, seconds in parts.items()}

    @property
    def _positions(self) -> Sequence[_Position]:
        return *self.candidates, *self.references

    @property
    def _stages(self) -> range:
        return range(3 + len(self.space.quality.rungs))

    def seconds_left(self, unproposed: int, workers: int, *, rescore: bool = True) -> dict[str, float]:
        """Returns the rough seconds of each part of the work that remains, with so many layouts to be proposed."""
        rungs, references = self.space.quality.rungs, len(self.space.references.layouts())
        entering = max(1, round((len(self.candidates) + unproposed) * self.feasible))
        shares = [1.0, self.feasible]  # of the trials of each stage that enter the next one
        for rung in rungs[:-1]:
            promoted = rung.promoted(entering)
            shares.append(promoted / entering)
            entering = max(1, promoted)
        shares.append(1.0)
        counts, all_enter = [0.0] * (3 + len(rungs)), [1.0] * len(shares)
        groups = [
            *((position, 1, shares) for position in self.candidates),
            (_Position(), unproposed, shares),
            *((position, 1, all_enter) for position in self.references),
            (_Position(), max(0, references - len(self.references)), all_enter),
        ]
        for position, number, entered in groups:
            count = 0.0 if position.has_ended else float(number)
            for stage in range(position.done, len(counts)):
                if stage > position.done or position.waits:
                    count *= entered[stage - 1]
                counts[stage] += count
        complete = counts[-1] + sum(position.done == len(counts) for position in self.candidates)
        rescored = max(0.0, max(1.0, _RESCORED * complete) + references - self.rescored) if rescore else 0.0
        again, rounds = self.space.protocol.remeasure, 0.0
        if again is not None and rescore:
            expected = min(float(again.members), max(1.0, _ON_FRONT * complete))
            members = expected if self.named is None else self.named
            rounds = max(0.0, again.rounds * (1 + members) - self.remeasured)
        return self._parts(counts, range(self.anchored, len(rungs)), rescored, rounds, int(not self.devices), workers)

    def _parts(
        self,
        counts: Sequence[float],
        anchored: Iterable[int],
        rescored: float,
        remeasured: float,
        launches: int,
        workers: int,
    ) -> dict[str, float]:
        """Returns the rough seconds of each part of some work: `counts` are the trials that go through each stage."""
        quality, protocol = self.space.quality, self.space.protocol
        layouts, runtimes = self.space.references.layouts(), len(self.space.runtimes)
        published, targets = layouts[PUBLISHED], len(self.space.targets)
        repetition_s = targets * math.fsum(
            _START_S
            + (_read_weights(published, load) * _PROMPT_S + published.params.active * load.gen * _DECODE_S)
            / load.threads
            for load in (self.space.workloads[name] for name in self.space.measured)
        )

        def jobs(config: QualityConfig, rung: int) -> list[TrainJob]:
            return rung_jobs(config, rung, published, CorpusRef(source="default", hash="0" * 64))

        def rungs_s(config: QualityConfig) -> list[float]:
            steps: dict[str, int] = {}
            seconds = []
            for rung in range(len(config.rungs)):
                new = {job.key: job for job in jobs(config, rung) if job.key not in steps}
                seconds.append(math.fsum(_training_s(job, steps.get(job.resume_from or "", 0)) for job in new.values()))
                steps |= {key: job.steps for key, job in new.items()}
            return seconds

        teachers = {
            job.teacher.job.key: job.teacher.job for rung in anchored for job in jobs(quality, rung) if job.teacher
        }
        anchors_s, rescore_s = math.fsum(_training_s(job, 0) for job in teachers.values()), 0.0
        if quality.anchors is not None:
            seconds = rungs_s(quality.with_seeds(quality.anchors.seeds))
            anchors_s += (len(layouts) + quality.anchors.layouts) * math.fsum(seconds[rung] for rung in anchored)
        if quality.rescore is not None:
            fresh = jobs(quality.rescored, len(quality.rungs) - 1)
            rescore_s = rescored * math.fsum(_training_s(job, 0) for job in fresh)
        exported, screened, *trained, confirmed = counts
        training_s = math.fsum(count * rung_s for count, rung_s in zip(trained, rungs_s(quality), strict=True))
        checks_s = confirmed * runtimes * _CHECK_S / workers
        return {
            "calibration": launches * (_STARTING_S + _CALIBRATION_RUN_S * CALIBRATION_RUNS * targets),
            "anchors": anchors_s / workers,
            "export": exported * runtimes * _EXPORT_S / workers,
            "screen": screened * protocol.screen_repetitions * repetition_s,
            "training": training_s / workers,
            "confirm": confirmed * protocol.confirm_repetitions * repetition_s + checks_s,
            "re-measure": remeasured
            * (0 if protocol.remeasure is None else protocol.remeasure.repetitions)
            * repetition_s,
            "re-score": rescore_s / workers,
        }


def _read_weights(layout: Layout, load: Workload) -> float:
    """Returns how many weights are multiplied until the first token, summed over tokens and what a tower reads."""
    if layout.tower is None:
        return float(layout.params.active * load.prompt)
    encoding = load.tower_flops(layout.tower, layout.d_model) / 2
    return encoding + layout.params.active * (load.prompt + load.tower_tokens(layout.tower))


def _training_s(job: TrainJob, resumed_at: int) -> float:
    """Returns the rough seconds of a training."""
    run = job.run
    if isinstance(run, LibraryRun):
        length = 1 if run.evaluated == "sum" else _LIBRARY_TOKENS
    elif isinstance(run, LmRun):
        length = run.length
    else:
        task, layout = make_task(run.task, run.settings), proxy_layout(job)
        length = text_length(task)
        if isinstance(task, MediaTask) and layout.tower is not None:
            size = task.media.size
            encoding = layout.tower.flops(layout.d_model, *size) / (2 * layout.params.active)
            length += math.ceil(layout.tower.tokens_of(*size) + encoding)
    return _TRAINING_S * max(1, job.steps - resumed_at) * job.batch * length * proxy_layout(job).params.active


def _feasible_share(space: SearchSpace, feasible: int = 0, refused: int = 0) -> float:
    """Returns the share of layouts within their budgets: an assumed one, corrected by those that were measured."""
    if all(METRICS[budget.metric].source == "proxy" for budget in space.budgets):
        return 1.0
    return (feasible + _FEASIBLE * _PRIOR_TRIALS) / (feasible + refused + _PRIOR_TRIALS)


def _read(store: Store, study: Study, log: Sequence[Event]) -> _Progress | None:
    """Reads the progress of a study from its log and trials; None before it was launched."""
    space, rows = stored_space(study), trials.all(store, study.id)
    if not (launched := notes(log, Launched)):
        return None
    trained = {(event.trial, note.rung) for event in log if (note := QualityKnown.read(event.payload))}
    rungs = len(space.quality.rungs)
    references = [row for row in rows if row.origin == "reference"]
    candidates = [row for row in rows if row.origin != "reference" and row.status.state is not TrialState.CANCELLED]
    feasible = sum(row.status.rung is not None for row in candidates)
    refused = sum(row.status.state is TrialState.INFEASIBLE and row.status.rung is None for row in candidates)
    unproposed = 0 if closing(log) else max(0, launched[-1].trials - len(candidates))
    # With more layouts to come, the front that was named, if one was, is not the last.
    named = notes(log, Named)[-1:] if unproposed == 0 else []
    members = {*named[0].trials, *(row.number for row in references)} if named else None
    return _Progress(
        space=space,
        unproposed=unproposed,
        candidates=[_position(row, trained, rungs) for row in candidates],
        references=[_position(row, trained, rungs) for row in references],
        feasible=_feasible_share(space, feasible, refused),
        anchored=max((rung + 1 for _, rung in trained), default=0),
        rescored=len({event.trial for event in log if Rescored.read(event.payload)}),
        named=len(named[0].trials) if named else None,
        remeasured=sum(
            Remeasured.read(event.payload) is not None and (members is None or event.trial in members) for event in log
        ),
        devices=frozenset(device.id for device in calibrated_devices(log)),
        elapsed_s=elapsed(log)[-1],
    )


def _position(row: Trial, trained: set[tuple[int | None, int]], rungs: int) -> _Position:
    """Returns the position of a trial; `trained` are the trials and rungs with a quality."""
    status, rung = row.status, row.status.rung or 0
    match status.state:
        case TrialState.PROPOSED:
            return _Position()
        case TrialState.EXPORTED | TrialState.MEASURING | TrialState.BORDERLINE:
            return _Position(1)
        case TrialState.GATED_IN:
            return _Position(2)
        case TrialState.TRAINING:
            waits = (row.number, rung) in trained
            return _Position(2 + rung + waits, waits)
        case TrialState.CONFIRMING:
            return _Position(2 + rungs)
        case TrialState.COMPLETE:
            return _Position(3 + rungs, has_ended=True)
        case _:
            return _Position(2 if status.rung is None else 3 + rung, has_ended=True)


def _earlier_paces(store: Store, devices: Iterable[str], study: int | None, workers: int) -> list[float]:
    """Returns the paces of the latest studies of these devices, but of `study`."""
    paces = []
    for row in [row for row in studies.all(store) if row.id != study][: -_OTHER_STUDIES - 1 : -1]:
        try:
            progress = _read(store, row, all_events(store, row.id))
        except InvalidInput:
            continue  # its space cannot be read, which `nas study show` says
        if progress is not None and progress.devices.issuperset(devices) and (pace := progress.pace(workers)):
            paces.append(pace)
    return paces


def _estimate(
    progress: _Progress, pace: float | None, earlier: Sequence[float], workers: int, slowest: float = 0.0
) -> Estimate:
    """Returns the estimate by the study's own pace, else by those of earlier studies, else by a guess.

    The end of the range allows for `slowest`, the pace so far: a machine may be busier than was guessed. Where another
    pace than the study's own is used, the typical duration is half way to it, in logarithms.
    """
    if pace is not None:
        factor, based_on = _OWN_FACTOR, "the pace of this study so far"
    elif earlier:
        number = f"{len(earlier)} earlier studies" if len(earlier) > 1 else "an earlier study"
        pace, factor, based_on = statistics.median(earlier), _EARLIER_FACTOR, f"the pace of {number} here"
    else:
        pace, factor, based_on = 1.0, _GUESSED_FACTOR, "a guess: too few trials have ended here yet"
    pace = max(pace, math.sqrt(pace * slowest))

    def span(seconds: float) -> Span:
        return Span(low=seconds * pace / factor, typical=seconds * pace, high=seconds * max(pace * factor, slowest))

    unproposed, hours = progress.unproposed, progress.space.search.stop.hours
    if hours is not None and unproposed:  # proposals end then; work grows evenly with their number
        begun_s, whole_s = (
            pace * sum(progress.seconds_left(n, workers, rescore=False).values()) for n in (0, unproposed)
        )
        share = (hours * 3600 - progress.elapsed_s - progress.since_s - begun_s) / max(whole_s - begun_s, 1e-9)
        unproposed = min(unproposed, max(1, math.ceil(unproposed * share)))
    under_way_s = progress.seconds_under_way(pace, workers)
    remaining = {
        name: seconds - under_way_s.get(name, 0.0)
        for name, seconds in progress.seconds_left(unproposed, workers).items()
    }
    total = span(sum(remaining.values()))
    parts = [EstimatePart(name=name, seconds=span(seconds)) for name, seconds in remaining.items() if seconds > 0]
    large = [part for part in parts if part.seconds.typical >= max(30.0, 0.05 * total.typical)]
    text = ", ".join(f"{part.name} {show_duration(part.seconds.typical, rough=True)}" for part in large)
    return Estimate(
        seconds=total,
        parts=parts,
        based_on=[based_on],
        depends_on=_conditions(progress.space, progress.feasible, workers),
        text=f"{total.text}: {text}" if text else total.text,
    )


def _conditions(space: SearchSpace, feasible: float, workers: int) -> list[str]:
    sources, hours = {METRICS[budget.metric].source for budget in space.budgets}, space.search.stop.hours
    return [
        *[f"the share of layouts that keep their budgets ({100 * feasible:.0f} % assumed)"] * bool(sources - {"proxy"}),
        *["budgets on quality (assumed to be kept by all that reach the top rung)"] * ("proxy" in sources),
        "what else this machine does",
        f"{workers} training{'s' * (workers != 1)} at the same time",
        *([] if hours is None else [f"the end of proposals after {hours:g} h"]),
    ]
