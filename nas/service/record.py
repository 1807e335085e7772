"""A trial as the database remembers it: its measurements, its quality, its objectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement
from nas.core.scoring import Axis, Place, QualityValue, axis
from nas.core.space import SearchSpace
from nas.core.trial import Event
from nas.proxy.ladder import proxy_of
from nas.proxy.quality import Quality
from nas.search import Observation
from nas.service.asking import TOLD, WARM
from nas.service.ledger import all_events
from nas.service.scales import PUBLISHED, figures_from_json
from nas.service.stored_space import stored_space
from nas.store import events, results, studies, trials
from nas.store.rows import Result, Study, Trial
from nas.store.store import Store

LAUNCHED = "launched"
"""Events that say when a process began to run the study, and with which options."""
CALIBRATED = "calibrated"
"""Events that say which device a name of the space means, and its calibration."""
CORPUS = "corpus"
"""Events that say what language models are trained on."""

Figures = dict[Place, dict[str, Figure]]


@dataclass
class Record:
    """What is on record of one trial."""

    trial: Trial
    layout: Layout
    measurements: dict[Place, Measurement] = field(default_factory=dict)
    """The one with the most repetitions that count, where there are several of a place."""
    quality: Quality | None = None
    told: Observation | None = None
    """What the proposer was last told of it."""
    told_after_s: float | None = None
    """When, in seconds while an orchestrator ran."""
    rungs: dict[str, Quality] = field(default_factory=dict)
    """Rung -> quality there, in the order in which they were reached."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> what its results took, whoever worked for them; one that an earlier trial uses too is counted there."""

    @property
    def noisy(self) -> bool:
        """Whether a figure rests on refused repetitions."""
        return any(measurement.noisy for measurement in self.measurements.values())

    @property
    def figures(self) -> Figures:
        """The figures by place; what needs no workload stands under none, too."""
        found: Figures = {}
        for place, measurement in self.measurements.items():
            found[place] = measurement.figures
            found[place._replace(workload="")] = {"file_size": measurement.figures["file_size"]}
        return found

    def axes(self, space: SearchSpace, published: Figures | None) -> list[Axis | None]:
        """The objectives in the space's order; None where one is not known."""
        if published is None:
            return [None] * len(space.objectives)
        quality = QualityValue(0.0, 0.0, "")
        if self.quality:
            quality = QualityValue(self.quality.value, self.quality.sd, proxy_of(self.layout, space.quality).id)
        return [
            None
            if objective.metric == "quality" and self.quality is None
            else axis(space, objective, self.figures, published, quality)
            for objective in space.objectives
        ]


@dataclass(frozen=True)
class StudyRecord:
    """A whole study."""

    study: Study
    space: SearchSpace
    records: dict[int, Record]
    published: Figures | None
    reference_point: list[float] | None
    elapsed_s: float
    """While an orchestrator ran; nights in between do not count."""
    propose_seconds: float
    log: Sequence[Event]
    warm_start: list[dict[str, Any]]
    """What was learnt from earlier studies, one row each (`nas.service.warm_start`)."""

    @property
    def references(self) -> dict[str, Record]:
        """Name -> the reference's record, of those that have been proposed."""
        names = {layout.id: name for name, layout in self.space.references.layouts().items()}
        return {
            names[record.layout.id]: record for record in self.records.values() if record.trial.origin == "reference"
        }


def read_study(store: Store, name: str) -> StudyRecord:
    """Reads a study from the database.

    Raises:
        UnknownName: no such study.
        InvalidInput: its space is none of this version's.
    """
    study = studies.get(store, name)
    space = stored_space(study)
    records = {row.number: Record(row, Layout.from_json(row.layout)) for row in trials.all(store, study.id)}
    log = all_events(store, study.id)
    devices = _devices(event for event in log if event.payload.get("what") == CALIBRATED)
    counted: set[str] = set()
    for number, row in results.of_study(store, study.id):
        _keep(records[number], space, devices, row)
        if row.result_key not in counted:
            counted.add(row.result_key)
            seconds = records[number].seconds
            seconds[row.stage] = seconds.get(row.stage, 0.0) + row.seconds
    running = elapsed(log)
    for event, after_s in zip(log, running, strict=True):
        if event.trial is not None:
            _learn(records[event.trial], event.payload, after_s)
    scales, point = study.scales, study.reference_point
    return StudyRecord(
        study=study,
        space=space,
        records=records,
        published=figures_from_json(scales["figures"][PUBLISHED]) if scales else None,
        reference_point=[point[objective.name] for objective in space.objectives] if point else None,
        elapsed_s=running[-1] if running else 0.0,
        propose_seconds=_spent(event.payload for event in log),
        log=log,
        warm_start=[row for event in log if event.payload.get("what") == WARM for row in event.payload["studies"]],
    )


def read_trials(store: Store, study: Study, space: SearchSpace, numbers: Iterable[int]) -> dict[int, Record]:
    """Reads some trials of a study, whatever its size; without when they were told and what they took.

    Args:
        store: the database.
        study: its row.
        space: of the study.
        numbers: of the trials, each once.

    Raises:
        UnknownName: no such trial.
    """
    devices = _devices(events.notes(store, study.id, CALIBRATED))
    found = {}
    for number in numbers:
        row = trials.get(store, study.id, number)
        record = found[number] = Record(row, Layout.from_json(row.layout))
        for result in results.of_trial(store, study.id, number):
            _keep(record, space, devices, result)
        for event in events.of_trial(store, study.id, number):
            _learn(record, event.payload, None)
    return found


def _devices(calibrated: Iterable[Event]) -> list[tuple[str, str]]:
    """(id, name in the space) of every device that took part."""
    return sorted({(event.payload["id"], event.payload["device"]) for event in calibrated})


def _keep(record: Record, space: SearchSpace, devices: Iterable[tuple[str, str]], result: Result) -> None:
    """Files a measurement under every place that it is of: a space may name one device or workload twice."""
    if result.stage != "measure" or "value" not in result.payload:
        return
    measurement = Measurement.model_validate(result.payload["value"])
    key = measurement.workload.key()
    for device in (name for id, name in devices if id == measurement.device):
        for workload in (name for name, each in space.workloads.items() if each.key() == key):
            place = Place(device, measurement.runtime, workload)
            before = record.measurements.get(place)
            if before is None or measurement.figures["ttft"].n >= before.figures["ttft"].n:
                record.measurements[place] = measurement


def _learn(record: Record, payload: Mapping[str, Any], after_s: float | None) -> None:
    what = payload.get("what")
    if what == "quality":
        record.quality = Quality.model_validate(payload["quality"])
        record.rungs[record.quality.rung] = record.quality
    elif what == TOLD:
        record.told, record.told_after_s = Observation.from_json(payload["observation"]), after_s


def elapsed(log: Sequence[Event]) -> list[float]:
    """Seconds that an orchestrator had run at each event: from each launch to the last event before the next one."""
    total, begun, found = 0.0, False, []
    for before, event in zip([None, *log], log, strict=False):
        launched = event.payload.get("what") == LAUNCHED
        if begun and before is not None and not launched:
            total += event.at - before.at
        begun = begun or launched
        found.append(total)
    return found


def _spent(payloads: Iterable[Mapping[str, Any]]) -> float:
    return float(sum(payload["seconds"] for payload in payloads if payload.get("what") == "spent"))
