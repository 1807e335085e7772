"""Archives: one study as a compressed file that another hilnas can read, without artifacts and jobs.

A file is JSON lines in gzip; an import also reads them uncompressed. The first line is a `Header`. Then follow, each
under the name of its field in `Line`, the trials by number, the events in order, the results, which trials they serve,
the attempts; and an `end` that counts the lines before it, without which the file was cut short.

Anybody may have written a file, so an import trusts nothing. Every record is checked, and the JSON inside of it as
strictly as the readers of studies need it; layouts are parsed and hashed again, states are derived from the events,
numbers have no gaps and are in the range of what is measured, and the report of the study must be computable. A study
that was imported can be shown on every page. Results and attempts get keys of their own, so that no other study reuses
a figure or counts a failure from somebody's file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from sqlalchemy import Connection, Select, select, update

from nas.core.canonical import canonical_json, content_hash
from nas.core.device import DeviceText
from nas.core.errors import FailureReason, InvalidInput
from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement
from nas.core.scoring import PUBLISHED, figures_from_json
from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind, TrialState, TrialStatus, advance
from nas.infra.store import studies
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.events import insert_event
from nas.infra.store.models import attempt, event, result, result_use, trial
from nas.infra.store.models import study as study_table
from nas.infra.store.outcomes import insert_attempt
from nas.infra.store.results import imported_key, insert_use
from nas.infra.store.rows import Json, Origin, Stage, Study, StudyState, Trial
from nas.infra.store.store import Store
from nas.infra.store.trials import insert_trial, status_columns
from nas.measure.runtimes.base import Artifact
from nas.search.analysis.record import read_study, readable
from nas.search.analysis.report import study_report
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proposers.api import MOST_COORDINATE, Coordinate, Deviation, RungNumber
from nas.search.proxy.job import TrainResult
from nas.search.proxy.quality import Quality, QualityScale
from nas.search.study.events import (
    LEAST_FIGURE,
    MOST_FIGURE,
    UNREADABLE,
    Hash,
    Named,
    Note,
    Number,
    Observed,
    Positive,
    Profiled,
    QualityKnown,
    Remeasured,
    Rescored,
    Seconds,
    WarmStarted,
    adapter,
    notes,
    read_space,
)

FORMAT = "hilnas-study"
VERSION = 2

MAX_LINE = 16 << 20
"""Bytes of a line."""
MAX_BYTES = 4 << 30
"""Bytes of a file's lines: a small compressed file must not fill a disk."""
GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""

LARGEST = 1e100
"""Of numbers with a fraction or an exponent: sums and ratios of them are finite. Whole ones have 64 bits."""
LEAST_DRIFT = -0.999
"""Drift of a reference run that takes a thousandth of its calibration."""
MOST_LOG_SD = 100.0
"""Of a figure: the ends of an interval of a ratio of two such figures are finite."""
MOST_REPETITIONS = 1_000_000
"""Repetitions behind one figure."""
MOST_REPORTED = 2000
"""Trials of a study whose report is computed: the time grows with their square."""

Word = Annotated[str, Field(max_length=64)]
JsonObject = dict[str, JsonValue]
T = TypeVar("T")

_RECORDED = Path(__file__).parents[1] / "recorded"
_SUFFIX = ".jsonl.gz"


class _Record(BaseModel):
    """Of a line: all fields, with exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Header(_Record):
    """The study itself."""

    format: Literal["hilnas-study"]
    v: Literal[2]
    name: str
    space: JsonObject
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    version: Word
    created: Seconds
    state: Annotated[StudyState, Field(strict=False)]
    scales: JsonObject | None
    reference_point: JsonObject | None
    proposer: JsonObject | None


class TrialRecord(_Record):
    """A candidate; its status follows from its events."""

    number: Number
    layout_id: Hash
    layout: JsonObject
    origin: Origin
    parents: list[Number]
    operator: Word | None
    record: JsonObject | None
    created: Seconds


class EventRecord(_Record):
    """One event; `trial` is None for the study as a whole."""

    trial: Number | None
    kind: Annotated[EventKind, Field(strict=False)]
    payload: JsonObject
    at: Seconds


class ResultRecord(_Record):
    """A stage's result."""

    result_key: Hash
    stage: Stage
    payload: JsonObject
    seconds: Seconds
    created: Seconds


class UseRecord(_Record):
    """A result serves a trial; `first`: the trial did the work."""

    trial: Number
    result_key: Hash
    first: bool


class AttemptRecord(_Record):
    """Work that gave no result."""

    kind: Annotated[str, Field(max_length=32)]
    message: str
    at: Seconds
    result_key: Hash | None
    stage: Stage | None
    trial: Number | None
    job: Annotated[str, Field(max_length=128)] | None
    device: Word | None
    payload: JsonObject | None


class Line(_Record):
    """Any line but the first: exactly one field is given."""

    trial: TrialRecord | None = None
    event: EventRecord | None = None
    result: ResultRecord | None = None
    use: UseRecord | None = None
    attempt: AttemptRecord | None = None
    end: Number | None = None


class _Transition(BaseModel):
    rung: RungNumber | None = None
    reason: str | None = None
    retryable: bool = False


class _LoggedFigure(BaseModel):
    name: str
    value: Positive
    low: Positive | None
    high: Positive | None
    unit: str


class _Reached(BaseModel):
    """What lines of the log show of a trial that changes its state."""

    quality: Quality | None = None
    figures: list[_LoggedFigure] = []


class _Scales(BaseModel):
    figures: dict[str, list[Json]]
    quality: dict[str, Json] = {}
    final_quality: dict[str, tuple[Coordinate, Deviation]] = {}


class _WarmRow(BaseModel):
    study: str
    layouts: Number


class _Failed(BaseModel):
    reason: FailureReason
    message: str


_HEADER = [name for name in Header.model_fields if name not in ("format", "v")]
_NOTES: dict[str, type[Note]] = {kind.what: kind for kind in Note.__subclasses__()}
_VALUES: dict[str, type[BaseModel]] = {"export": Artifact, "measure": Measurement, "train": TrainResult}
_POINT: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, Coordinate], config=ConfigDict(strict=True))
_TEXT: TypeAdapter[str] = TypeAdapter(DeviceText)


def export_study(store: Store, study_id: int, out: BinaryIO) -> int:
    """Writes a snapshot of a study, compressed, and returns the number of lines.

    Raises:
        UnknownName: no such study.
    """
    with store.read() as connection, gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0) as file:
        study, lines = studies.get(store, study_id), 1
        header = {"format": FORMAT, "v": VERSION} | {name: getattr(study, name) for name in _HEADER}
        file.write(canonical_json(header).encode() + b"\n")
        served = select(result_use.c.result_key).where(result_use.c.study == study.id)
        keys = frozenset(connection.execute(served).scalars())
        for name, query in _queries(study.id).items():
            for row in connection.execute(query):
                values = dict(row._mapping)
                if name == "event":
                    values["payload"] = _with_keys(values["payload"], study.id, keys)
                file.write(canonical_json({name: values}).encode() + b"\n")
                lines += 1
        file.write(canonical_json({"end": lines}).encode() + b"\n")
    return lines + 1


def _with_keys(payload: Json, study: int, keys: frozenset[str]) -> Json:
    """Returns the payload of an event with the keys that results have here: an imported study's events have its file's.

    Args:
        payload: of an event.
        study: its id.
        keys: of the study's results.
    """
    if payload.get("what") != Remeasured.what:
        return payload
    rows = []
    for row in payload["measurements"]:
        key = imported_key(study, row["result"])
        rows.append({**row, "result": key if key in keys else row["result"]})
    return {**payload, "measurements": rows}


def recorded_studies() -> dict[str, Path]:
    """Returns name -> archive of the studies that come with hilnas."""
    return {path.name.removesuffix(_SUFFIX): path for path in sorted(_RECORDED.glob(f"*{_SUFFIX}"))}


def import_study(store: Store, source: BinaryIO, *, name: str | None = None, trust_results: bool = False) -> Study:
    """Creates a study from a file, all or nothing. It is paused; `trust_results` lets it be resumed.

    Args:
        store: the database.
        source: a file or a pipe, as `export_study` wrote it or uncompressed.
        name: of the study, if not its old one.
        trust_results: keep the file's result keys, so that every study here may reuse the results. Only for one's own
            files.

    Raises:
        InvalidInput: the file is damaged, of another version or too large, its records are not what the readers of
            studies expect, or the name is taken; with the file's name and the line.
    """
    with store.write() as connection:
        reader, line = _Reader(store, connection, name, trust_results), 0
        try:
            for line, text in enumerate(_lines(source), start=1):
                reader.read(_parse(text), line)
            line = 0
            return reader.finish()
        except ValueError as error:
            place = [str(getattr(source, "name", "")), f"{line}" if line else ""]
            where = ":".join(filter(None, place)) if place[0] else f"line {line}" if line else None
            raise InvalidInput(_message(error), where=where) from error


def _queries(study: int) -> dict[str, Select[Any]]:
    """Returns field of `Line` -> its rows, in the order in which an import needs them."""
    t, e, r, u, a = trial.c, event.c, result.c, result_use.c, attempt.c
    served = select(u.result_key).where(u.study == study)
    return {
        "trial": select(t.number, t.layout_id, t.layout, t.origin, t.parents, t.operator, t.record, t.created)
        .where(t.study == study)
        .order_by(t.number),
        "event": select(e.trial, e.kind, e.payload, e.at).where(e.study == study).order_by(e.id),
        "result": select(result).where(r.result_key.in_(served)).order_by(r.created, r.result_key),
        "use": select(u.trial, u.result_key, u.first).where(u.study == study).order_by(u.trial, u.result_key),
        "attempt": select(a.kind, a.message, a.at, a.result_key, a.stage, a.trial, a.job, a.device, a.payload)
        .where(a.study == study)
        .order_by(a.id),
    }


class _Reader:
    """Checks and stores the records of one file in their order."""

    def __init__(self, store: Store, connection: Connection, name: str | None, trust_results: bool) -> None:
        self._store, self._connection = store, connection
        self._name, self._trust = name, trust_results
        self._study: Study | None = None
        self._space: SearchSpace
        self._references: frozenset[str]
        self._statuses: list[TrialStatus | None] = []
        self._updated: dict[int, float] = {}
        self._results: set[str] = set()
        self._layouts: set[str] = set()
        self._has_end = False

    @property
    def _id(self) -> int:
        assert self._study is not None, "the header is read first"
        return self._study.id

    def read(self, data: Any, line: int) -> None:
        """Stores the record of line number `line`."""
        if self._has_end:
            raise InvalidInput("there are lines after the end of the file")
        if self._study is None:
            self._create(Header.model_validate(data))
            return
        records = [value for _, value in Line.model_validate(data) if value is not None]
        if len(records) != 1:
            raise InvalidInput("a line holds one of trial, event, result, use, attempt or end")
        match records[0]:
            case int(count):
                if count != line - 1:
                    raise InvalidInput(f"the file should have {count} lines before its end, but has {line - 1}")
                self._has_end = True
            case TrialRecord() as record:
                self._store_trial(record)
            case EventRecord() as record:
                self._store_event(record)
            case ResultRecord() as record:
                _check_outcome(record)
                values = record.model_dump() | {"result_key": self._key(record.result_key)}
                insert_if_absent(self._connection, result, **values)
                self._results.add(record.result_key)
            case UseRecord() as record:
                self._check_trial(record.trial)
                if (key := record.result_key) not in self._results:
                    raise InvalidInput(f"trial {record.trial} uses result {key[:12]}, which is not in the file")
                insert_use(self._connection, self._key(key), (self._id, record.trial), first=record.first)
            case AttemptRecord() as record:
                if record.trial is not None:
                    self._check_trial(record.trial)
                insert_attempt(self._connection, study=self._id, **record.model_dump() | self._renamed(record))

    def finish(self) -> Study:
        """Stores the trials' statuses, which follow from the events, and reads the study as its pages do."""
        if self._study is None:
            raise InvalidInput("the file is empty")
        if not self._has_end:
            raise InvalidInput("the file was cut short: it has no end")
        for number, status in enumerate(self._statuses):
            if status is None:
                raise InvalidInput(f"trial {number} has no events")
            self._connection.execute(
                update(trial)
                .where(trial.c.study == self._id, trial.c.number == number)
                .values(**status_columns(status), updated=self._updated[number])
            )
        self._check_whole()
        return studies.get(self._store, self._id)

    def _create(self, header: Header) -> None:
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
        inputs = header.model_dump(include={"space", "seed", "version"})
        self._study = studies.create(self._store, self._name or header.name, **inputs)
        constants = header.model_dump(include={"created", "scales", "reference_point", "proposer"})
        state = StudyState.PAUSED if header.state in (StudyState.NEW, StudyState.RUNNING) else header.state
        changed = update(study_table).where(study_table.c.id == self._id)
        self._connection.execute(changed.values(state=state, desired_state="pause", **constants))

    def _store_trial(self, record: TrialRecord) -> None:
        if record.number != len(self._statuses):
            raise InvalidInput(f"expected trial {len(self._statuses)}, found {record.number}")
        try:
            layout = Layout.from_json(record.layout)
        except UNREADABLE as error:  # a value of another JSON type than the form has there
            raise InvalidInput(f"trial {record.number}: the layout is malformed: {error}") from error
        if layout.id != record.layout_id:
            raise InvalidInput(f"trial {record.number}: the layout is not the one that its id names")
        if record.layout_id in self._layouts:
            raise InvalidInput(f"trial {record.number}: an earlier trial has the same layout")
        if any(parent >= record.number for parent in record.parents):
            raise InvalidInput(f"trial {record.number}: its parents are not earlier trials: {record.parents[:10]}")
        if record.origin == "reference" and record.layout_id not in self._references:
            raise InvalidInput(f"trial {record.number}: the space has no such reference layout")
        self._layouts.add(record.layout_id)
        values = record.model_dump() | {"parents": tuple(record.parents), "updated": record.created}
        insert_trial(self._connection, Trial(study=self._id, status=TrialStatus(TrialState.PROPOSED), **values))
        self._statuses.append(None)

    def _store_event(self, record: EventRecord) -> None:
        self._check_payload(record.payload)
        if record.kind not in (EventKind.STUDY, EventKind.PROGRESS):
            _strictly(_Reached, record.payload)
        new = Event(record.kind, record.payload, record.trial, self._id, at=record.at)
        if (record.kind is EventKind.STUDY) != (record.trial is None):
            raise InvalidInput(f"an event {record.kind.value!r} of trial {record.trial}: only 'study' has no trial")
        if record.trial is not None:
            self._check_trial(record.trial)
            self._statuses[record.trial] = advance(self._statuses[record.trial], new)
            self._updated[record.trial] = record.at
        insert_event(self._connection, new)

    def _check_payload(self, payload: JsonObject) -> None:
        rungs = [_strictly(_Transition, payload).rung]
        kind = _NOTES.get(str(payload.get("what")))
        match note := None if kind is None else _strictly(kind, payload):
            case Observed():
                rungs.append(note.observation.rung)
            case WarmStarted():
                for row in note.studies:
                    _strictly(_WarmRow, row)
            case QualityKnown(quality=quality) | Rescored(quality=quality):
                values = quality.value, quality.recall, *quality.per_group.values()
                _require_within(-MOST_COORDINATE, MOST_COORDINATE, "quality", *values)
                _require_within(0, MOST_COORDINATE, "sd of the quality", quality.sd, quality.recall_sd)
                _require_within(0, 1 << 31, "n_seeds", quality.n_seeds)
            case Named(trials=named):
                for number in named:
                    self._check_trial(number)
            case Remeasured(measurements=measurements):
                for measurement in measurements:
                    _check_figures(measurement.figures)
        for rung in rungs:
            if rung is not None and rung >= len(self._space.quality.rungs):
                raise InvalidInput(f"the space has no rung {rung}")

    def _check_trial(self, number: int) -> None:
        if number >= len(self._statuses):
            raise InvalidInput(f"there is no trial {number} before this line")

    def _key(self, key: str) -> str:
        return key if self._trust else imported_key(self._id, key)

    def _renamed(self, record: AttemptRecord) -> dict[str, str | None]:
        """Returns names of an attempt's job and result that no job or result here has, also for a trusted file.

        Attempts decide whether a failure is blamed on a candidate, and how often a stage was tried.
        """
        names = {"job": record.job, "result_key": record.result_key}
        return {
            name: None if value is None else content_hash({"imported": self._id, f"attempt's {name}": value})
            for name, value in names.items()
        }

    def _check_whole(self) -> None:
        """Computes the report of the study, unless it is too large for that."""
        record = read_study(self._store, self._id)
        with readable(record.study.name):
            snapshot = StudySnapshot(record)
            for note in notes(record.log.notes, Profiled):
                if note.trial not in record.records or not note.profile.is_of(record.records[note.trial].layout):
                    raise InvalidInput(f"a profile of trial {note.trial}, which has another layout")
            if len(snapshot.records) <= MOST_REPORTED:
                canonical_json(study_report(self._store, snapshot))


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


def _check_measurement(measurement: Measurement) -> None:
    for text in (measurement.artifact, measurement.runtime, measurement.build, measurement.device):
        _TEXT.validate_python(text)
    if "ttft" not in measurement.figures:
        raise InvalidInput("a measurement has a figure 'ttft'")
    _check_figures(measurement.figures)
    _require_within(0, 1, "refused_share", measurement.refused_share)
    _require_within(LEAST_FIGURE, MOST_FIGURE, "calibration_ms", measurement.calibration_ms)
    for repetition in measurement.repetitions:
        _require_within(LEAST_DRIFT, MOST_FIGURE, "drift", measurement.drift, repetition.drift)
        for sample in (repetition.sample, repetition.reference):
            if sample is not None:
                _require_within(0, MOST_FIGURE, "times", sample.load_ms, sample.ttft_ms)
                _require_within(0, 1 << 53, "decode_ns", *sample.decode_ns)


def _check_figures(figures: Mapping[str, Figure]) -> None:
    """Checks that ratios and logarithms of figures can be computed."""
    for name, figure in figures.items():
        _require_within(LEAST_FIGURE, MOST_FIGURE, name, figure.value, figure.low, figure.high)
        _require_within(0, MOST_LOG_SD, f"log_sd of {name}", figure.log_sd, figure.shared_log_sd)
        _require_within(0, MOST_REPETITIONS, f"n of {name}", figure.n)
        if figure.low is not None and figure.high is not None and figure.high < figure.low:
            raise InvalidInput(f"{name}: its interval ends before it begins")
        _TEXT.validate_python(figure.unit)


def _require_within(low: float, high: float, name: str, *numbers: float | None) -> None:
    for number in numbers:
        if number is not None and not low <= number <= high:
            raise InvalidInput(f"{name}: {number} is not in {low:g} to {high:g}")


def _check_scales(data: Any) -> None:
    scales = _strictly(_Scales, data)
    if PUBLISHED not in scales.figures:
        raise InvalidInput(f"scales without figures of the {PUBLISHED} reference")
    for rows in scales.figures.values():
        try:
            by_key = figures_from_json(rows)
        except UNREADABLE as error:
            raise InvalidInput(f"figures of the scales are malformed: {error}") from error
        for key, figures in by_key.items():
            for part in key:
                _TEXT.validate_python(part)
            _check_figures(figures)
    for scale in scales.quality.values():
        _strictly(QualityScale, scale)


def _strictly(kind: type[T], data: Any) -> T:
    """Parses JSON whose values have the types of the fields: no text for numbers; keys that are no field are ignored.

    Raises:
        ValueError: a value of another type, or out of range.
    """
    try:
        return adapter(kind).validate_json(json.dumps(data), strict=True)
    except UNREADABLE as error:  # a layout inside of it with values of another JSON type
        raise InvalidInput(_message(error)) from error


class _Continued(io.RawIOBase):
    """A file of which the first bytes have been read.

    Args:
        start: these bytes.
        rest: the file.
    """

    def __init__(self, start: bytes, rest: BinaryIO) -> None:
        self._start, self._rest = start, rest

    def readable(self) -> bool:
        """Returns true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer; returns the number of bytes."""
        read = self._start or self._rest.read(len(buffer))
        self._start = b""
        buffer[: len(read)] = read
        return len(read)


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Yields the lines, each cut at one byte more than is allowed; decompressed, if they are compressed.

    Raises:
        ValueError: the file cannot be decompressed, or all of it is too long.
    """
    start, total = source.read(len(GZIP)), 0
    whole = io.BufferedReader(_Continued(start, source))  # a pipe cannot be set back to its beginning
    file = gzip.GzipFile(fileobj=whole, mode="rb") if start == GZIP else whole
    try:
        while line := file.readline(MAX_LINE + 1):
            total += len(line)
            if total > MAX_BYTES:
                raise ValueError(f"the file is too long: up to {MAX_BYTES >> 20} MiB are read, decompressed")
            yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"the file cannot be decompressed, it is damaged or was cut short: {error}") from error


def _parse(line: bytes) -> Any:
    if len(line) > MAX_LINE:
        raise ValueError(f"the line is too long: up to {MAX_LINE >> 20} MiB are read")
    try:
        return json.loads(line.decode(), parse_constant=_float, parse_float=_float, parse_int=_whole)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text: an archive of a study is what 'nas study export' writes") from None
    except json.JSONDecodeError as error:
        if not line.endswith(b"\n"):
            raise ValueError("the file ends in the middle of this line: it is not complete") from None
        raise ValueError(f"not JSON ({error.msg}): an archive of a study is what 'nas study export' writes") from None
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) <= LARGEST:
        raise ValueError(f"{text[:40]} is too large, or no number")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 63:
        raise ValueError(f"the whole number {text[:40]} is too large")
    return value


def _message(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
