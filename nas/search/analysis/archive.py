"""Imports archives (`nas.infra.store.archive`): what a file says must be what the readers of studies expect.

The JSON inside of its records is parsed by the same models that the readers use, numbers must be in the range of what
is measured, and the report of the study must be computable. A file that passes can be shown on every page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from nas.core.canonical import canonical_json
from nas.core.device import DeviceText
from nas.core.errors import FailureReason, InvalidInput
from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement
from nas.core.profile import ProfileSummary
from nas.core.scoring import PUBLISHED, figures_from_json
from nas.core.space import SearchSpace
from nas.infra.store import archive
from nas.infra.store.archive import EventRecord, Header, ResultRecord, TrialRecord
from nas.infra.store.rows import Json, Study
from nas.infra.store.store import Store
from nas.measure.devices.attachments import Tag
from nas.measure.runtimes.base import Artifact
from nas.search.analysis.record import read_study, readable
from nas.search.analysis.report import study_report
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proposers.api import Status
from nas.search.proxy.job import TrainResult
from nas.search.proxy.quality import QualityScale
from nas.search.study.events import (
    ANCHORS,
    CALIBRATED,
    CLOSED,
    CORPUS,
    EXPECTED,
    LAUNCHED,
    MARKED,
    OBSERVED,
    PROFILED,
    QUALITY,
    REFERENCE_POINT,
    RESCORED,
    SPENT,
    UNREADABLE,
    WARM,
    Profiled,
    notes,
    read_space,
)

_LEAST, _MOST = 1e-15, 1e15
"""Of a measured figure in its unit."""
_LEAST_DRIFT = -0.999
"""A reference run that takes a thousandth of its calibration."""
_MOST_REPETITIONS = 1_000_000
_MOST_REPORTED = 2000
"""Trials of a study whose report is computed: the time grows with their square."""
_MOST_COORDINATE = 600.0
"""Its exponential is finite. The logarithm of a ratio of two figures is below 70; a quality is rarely above 2."""
Positive = Annotated[float, Field(ge=_LEAST, le=_MOST)]
Volume = Annotated[float, Field(ge=0, le=_MOST)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Coordinate = Annotated[float, Field(ge=-_MOST_COORDINATE, le=_MOST_COORDINATE)]
Deviation = Annotated[float, Field(ge=0, le=_MOST_COORDINATE)]
Model = TypeVar("Model", bound=BaseModel)


def import_archive(store: Store, source: TextIO, *, name: str | None = None, trust_results: bool = False) -> Study:
    """Creates a study from a file, all or nothing; see `nas.infra.store.archive.import_study`.

    Raises:
        InvalidInput: the file is damaged or of another version, or no reader of studies can show it, with the line.
    """
    return archive.import_study(store, source, StudyChecks(store), name=name, trust_results=trust_results)


class _Strict(BaseModel):
    """Fields have exactly the types that the readers use; others are ignored, as the readers do."""

    model_config = ConfigDict(strict=True, frozen=True)


class _Launched(_Strict):
    trials: Count
    warm_start: tuple[str, ...]


class _Times(_Strict):
    ttft_ms: Positive
    decode_ms: Positive
    run_ms: Positive


class _Calibrated(_Strict):
    device: DeviceText
    id: DeviceText
    runtime: DeviceText
    build: DeviceText
    ms: Positive
    protocol: Count
    conditions: Json
    times: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}$")], _Times]


class _CorpusUsed(_Strict):
    hash: archive.Hash
    versions: Json
    made_of: dict[str, str]


class _Observation(_Strict):
    layout: Json
    status: Status
    objectives: dict[str, Coordinate]
    constraints: dict[str, Coordinate]
    rung: archive.RungNumber | None
    noise: dict[str, Deviation] = {}


class _Observed(_Strict):
    observation: _Observation


class _ReferencePointFixed(_Strict):
    point: dict[str, Coordinate]


class _WarmStudy(_Strict):
    study: str
    layouts: Count


class _WarmStarted(_Strict):
    studies: list[_WarmStudy]
    observations: list[_Observation]


class _Expected(_Strict):
    gain: Coordinate | None
    hypervolume: Volume
    batch: Count


class _Closed(_Strict):
    rule: str
    message: str


class _Quality(_Strict):
    rung: str
    value: Coordinate
    per_group: dict[str, Coordinate]
    sd: Deviation
    n_seeds: Count
    recall: Coordinate | None = None
    recall_sd: Deviation = 0.0


class _QualityKnown(_Strict):
    rung: archive.RungNumber
    quality: _Quality


class _AnchorsChosen(_Strict):
    layouts: list[Json]


class _Rescored(_Strict):
    quality: _Quality
    per_seed: dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Coordinate]


class _Spent(_Strict):
    stage: str
    seconds: archive.Seconds


class _Marked(_Strict):
    trial: Count
    star: bool
    tags: tuple[Tag, ...] = Field(max_length=20)
    text: str = Field(max_length=500)


class _Profiled(_Strict):
    trial: Count
    device: DeviceText
    runtime: DeviceText
    build: DeviceText
    prompt: Count
    gen: Count
    threads: Count
    profile: ProfileSummary


class _Failed(_Strict):
    reason: FailureReason
    message: str


class _Scales(_Strict):
    figures: dict[str, list[Json]]
    quality: dict[str, Json] = {}
    final_quality: dict[str, tuple[Coordinate, Deviation]] = {}


_NOTES: dict[str, type[_Strict]] = {
    LAUNCHED: _Launched,
    CALIBRATED: _Calibrated,
    CORPUS: _CorpusUsed,
    OBSERVED: _Observed,
    REFERENCE_POINT: _ReferencePointFixed,
    WARM: _WarmStarted,
    EXPECTED: _Expected,
    CLOSED: _Closed,
    QUALITY: _QualityKnown,
    SPENT: _Spent,
    ANCHORS: _AnchorsChosen,
    RESCORED: _Rescored,
    MARKED: _Marked,
    PROFILED: _Profiled,
}
_VALUES: dict[str, type[BaseModel]] = {"export": Artifact, "measure": Measurement, "train": TrainResult}
_POINT: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, Coordinate], config=ConfigDict(strict=True))
_TEXT: TypeAdapter[str] = TypeAdapter(DeviceText)


class StudyChecks:
    """Checks the records of one archive; see `nas.infra.store.archive.Checks`.

    Args:
        store: that the study is written to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._space: SearchSpace
        self._references: frozenset[str]

    def header(self, header: Header) -> None:
        """Checks the space, the scales and the reference point."""
        self._space = read_space(header.space)
        self._references = frozenset(layout.id for layout in self._space.references.layouts().values())
        if header.scales is not None:
            _check_scales(header.scales)
        if header.reference_point is not None:
            if header.scales is None:
                raise InvalidInput("a reference point without scales")
            point = _POINT.validate_python(header.reference_point)
            if missing := {objective.name for objective in self._space.objectives} - point.keys():
                raise InvalidInput(f"the reference point has no {', '.join(sorted(missing))}")

    def record(self, record: BaseModel) -> None:
        """Checks the JSON of a trial, an event or a result."""
        match record:
            case TrialRecord():
                if record.origin == "reference" and record.layout_id not in self._references:
                    raise InvalidInput(f"trial {record.number}: the space has no such reference layout")
            case EventRecord():
                self._check_event(record)
            case ResultRecord():
                _check_outcome(record)

    def whole(self, study: int) -> None:
        """Reads the study as its pages do, and computes its report unless it is too large for that."""
        record = read_study(self._store, study)
        with readable(record.study.name):
            snapshot = StudySnapshot(record)
            for note in notes(record.log.notes, Profiled):
                if note.trial not in record.records or not note.profile.is_of(record.records[note.trial].layout):
                    raise InvalidInput(f"a profile of trial {note.trial}, which has another layout")
            if len(snapshot.records) <= _MOST_REPORTED:
                canonical_json(study_report(self._store, snapshot))

    def _check_event(self, record: EventRecord) -> None:
        payload = record.payload
        rungs = [payload.get("rung")]
        note = _NOTES.get(str(payload.get("what")))
        if note is not None:
            checked = _strictly(note, payload)
            observed = [checked.observation] if isinstance(checked, _Observed) else []
            if isinstance(checked, _WarmStarted):
                observed += checked.observations
            for each in observed:
                _check_layout(each.layout)
            rungs += [each.rung for each in observed if isinstance(checked, _Observed)]
        for rung in rungs:
            if isinstance(rung, int) and not 0 <= rung < len(self._space.quality.rungs):
                raise InvalidInput(f"the space has no rung {rung}")


def _check_layout(layout: Json) -> None:
    try:
        Layout.from_json(layout)
    except UNREADABLE as error:
        raise InvalidInput(f"the layout of an observation is malformed: {error}") from error


def _check_outcome(record: ResultRecord) -> None:
    """Checks the payload of a result: a value or the candidate's failure."""
    payload = record.payload
    if ("value" in payload) == ("failed" in payload):
        raise InvalidInput("a result has a value, or says why it failed")
    if "failed" in payload:
        _strictly(_Failed, payload["failed"])
    elif (model := _VALUES.get(record.stage)) is not None:
        value = _strictly(model, payload["value"])
        if isinstance(value, Measurement):
            _check_measurement(value)
    elif not isinstance(payload["value"], dict):
        raise InvalidInput(f"the value of stage {record.stage} is no object")


def _check_measurement(taken: Measurement) -> None:
    for text in (taken.artifact, taken.runtime, taken.build, taken.device):
        _TEXT.validate_python(text)
    if "ttft" not in taken.figures:
        raise InvalidInput("a measurement has a figure 'ttft'")
    _check_figures(taken.figures)
    _require_within(0, 1, "refused_share", taken.refused_share)
    _require_within(_LEAST, _MOST, "calibration_ms", taken.calibration_ms)
    for repetition in taken.repetitions:
        _require_within(_LEAST_DRIFT, _MOST, "drift", taken.drift, repetition.drift)
        for sample in (repetition.sample, repetition.reference):
            if sample is not None:
                _require_within(0, _MOST, "times", sample.load_ms, sample.ttft_ms)
                _require_within(0, 1 << 53, "decode_ns", *sample.decode_ns)


def _check_figures(figures: Mapping[str, Figure]) -> None:
    """Checks that ratios and logarithms of figures can be computed."""
    for name, figure in figures.items():
        _require_within(_LEAST, _MOST, name, figure.value, figure.low, figure.high)
        _require_within(0, _MOST_REPETITIONS, f"n of {name}", figure.n)
        if figure.low is not None and figure.high is not None and figure.high < figure.low:
            raise InvalidInput(f"{name}: its interval ends before it begins")
        _TEXT.validate_python(figure.unit)


def _require_within(low: float, high: float, name: str, *numbers: float | None) -> None:
    for number in numbers:
        if number is not None and not low <= number <= high:
            raise InvalidInput(f"{name}: {number} is not in {low:g} to {high:g}")


def _check_scales(scales: Any) -> None:
    checked = _strictly(_Scales, scales)
    if PUBLISHED not in checked.figures:
        raise InvalidInput(f"scales without figures of the {PUBLISHED} reference")
    for rows in checked.figures.values():
        try:
            taken = figures_from_json(rows)
        except UNREADABLE as error:
            raise InvalidInput(f"figures of the scales are malformed: {error}") from error
        for key, figures in taken.items():
            for part in key:
                _TEXT.validate_python(part)
            _check_figures(figures)
    for scale in checked.quality.values():
        _strictly(QualityScale, scale)


def _strictly(model: type[Model], data: Any) -> Model:
    """Parses JSON whose values have the types of the fields: no text for numbers."""
    return model.model_validate_json(json.dumps(data), strict=True)
