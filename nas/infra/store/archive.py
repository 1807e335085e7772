"""Archives: one study as a file of JSON lines that another hilnas can read. Artifacts and jobs are not included.

The first line is a `Header`. Then follow, each under the name of its field in `Line`, the trials by number, the events
in order, the results, which trials they serve, the attempts; and an `end` that counts the lines before it, without
which the file was cut short.

Anybody may have written a file, so an import trusts nothing: every record is checked, layouts are parsed and hashed
again, states are derived from the events, numbers must have no gaps, and results and attempts get keys of their own, so
that no other study reuses a figure or counts a failure from somebody's file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn, Protocol, TextIO

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator
from sqlalchemy import Connection, Select, select, update

from nas.core.canonical import canonical_json, content_hash
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.trial import Event, EventKind, TrialState, TrialStatus, advance
from nas.infra.store import studies
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.events import insert_event
from nas.infra.store.models import attempt, event, result, result_use, trial
from nas.infra.store.models import study as study_table
from nas.infra.store.outcomes import insert_attempt
from nas.infra.store.results import imported_key, insert_use
from nas.infra.store.rows import Origin, Stage, Study, StudyState, Trial
from nas.infra.store.store import Store
from nas.infra.store.trials import insert_trial, status_columns

FORMAT = "hilnas-study"
VERSION = 1

MAX_LINE = 16 << 20
"""Characters in a line."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LARGEST = 1e100
"""Of numbers with a fraction or an exponent: sums and ratios of them are finite. Whole ones have 64 bits."""

Number = Annotated[int, Field(ge=0, lt=1 << 31)]
RungNumber = Annotated[int, Field(ge=0, lt=1 << 15)]
Seconds = Annotated[float, Field(ge=0, lt=1 << 37)]
Word = Annotated[str, Field(max_length=64)]
JsonObject = dict[str, JsonValue]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Header(_Record):
    """The study itself."""

    format: Literal["hilnas-study"]
    v: Literal[1]
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


class _Transition(_Record):
    """The keys of an event's payload that `nas.core.trial` reads."""

    rung: RungNumber | None = None
    reason: str | None = None
    retryable: bool = False


class EventRecord(_Record):
    """One event; `trial` is None for the study as a whole."""

    trial: Number | None
    kind: Annotated[EventKind, Field(strict=False)]
    payload: JsonObject
    at: Seconds

    @field_validator("payload")
    @classmethod
    def _readable(cls, payload: JsonObject) -> JsonObject:
        _Transition.model_validate({key: payload[key] for key in _Transition.model_fields.keys() & payload.keys()})
        return payload


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


class Checks(Protocol):
    """Checks what this package does not know: whether the readers of studies can read the JSON of a file.

    All methods raise `ValueError` where they cannot.
    """

    def header(self, header: Header) -> None:
        """Checks the study itself. Called first."""

    def record(self, record: BaseModel) -> None:
        """Checks one further record."""

    def whole(self, study: int) -> None:
        """Checks the study `study` as it was stored, in the same transaction."""


class Line(_Record):
    """Any line but the first: exactly one field is given."""

    trial: TrialRecord | None = None
    event: EventRecord | None = None
    result: ResultRecord | None = None
    use: UseRecord | None = None
    attempt: AttemptRecord | None = None
    end: Number | None = None

    def only(self) -> Any:
        """Returns the line's record.

        Raises:
            ValueError: none or several are given.
        """
        given = [value for _, value in self if value is not None]
        if len(given) != 1:
            raise ValueError("a line holds one of trial, event, result, use, attempt or end")
        return given[0]


def export_study(store: Store, study_id: int, out: TextIO) -> int:
    """Writes a snapshot of a study to `out` and returns the number of lines.

    Raises:
        UnknownName: no such study.
    """
    with store.read() as connection:
        lines = 0
        for line in _exported(connection, studies.get(store, study_id)):
            out.write(canonical_json(line) + "\n")
            lines += 1
        out.write(canonical_json({"end": lines}) + "\n")
    return lines + 1


def import_study(
    store: Store, source: TextIO, checks: Checks, *, name: str | None = None, trust_results: bool = False
) -> Study:
    """Creates a study from a file, all or nothing. It is paused and can be resumed.

    Args:
        store: the database.
        source: what `export_study` wrote, as a file on disk: nothing else is written to the database meanwhile.
        checks: of the JSON that the records hold.
        name: of the study, if not its old one.
        trust_results: keep the file's result keys, so that every study here may reuse the results. Only for one's own
            files.

    Raises:
        InvalidInput: the file is damaged, of another version or has too long a line, or the name is taken; with the
            file's name and the line.
    """
    file = getattr(source, "name", None)
    with store.write() as connection:
        reader: _Reader | None = None
        for number, line in enumerate(_lines(source), start=1):
            try:
                data = _parse(line)
                if reader is None:
                    header = Header.model_validate(data)
                    checks.header(header)
                    study = _create(store, connection, header, name)
                    reader = _Reader(connection, study, checks, trust_results)
                else:
                    reader.take(Line.model_validate(data).only(), number)
            except ValueError as error:
                raise InvalidInput(_message(error), where=f"{file}:{number}" if file else f"line {number}") from error
        try:
            if reader is None:
                raise InvalidInput("the file is empty")
            reader.finish()
            checks.whole(reader.study)
        except ValueError as error:
            raise InvalidInput(_message(error), where=file) from error
        return studies.get(store, reader.study)


def _exported(connection: Connection, study: Study) -> Iterator[dict[str, Any]]:
    header = ("name", "space", "seed", "version", "created", "state", "scales", "reference_point", "proposer")
    yield {"format": FORMAT, "v": VERSION} | {field: getattr(study, field) for field in header}
    for name, query in _queries(study.id).items():
        for row in connection.execute(query):
            yield {name: dict(row._mapping)}


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
    """Stores the records of one file in their order."""

    def __init__(self, connection: Connection, study: int, checks: Checks, trust_results: bool) -> None:
        self.study = study
        self._connection, self._checks = connection, checks
        self._trust = trust_results
        self._statuses: list[TrialStatus | None] = []
        self._updated: dict[int, float] = {}
        self._results: set[str] = set()
        self._layouts: set[str] = set()
        self._ended = False

    def take(self, record: Any, line: int) -> None:
        """Stores the record of line number `line`."""
        if self._ended:
            raise InvalidInput("there are lines after the end of the file")
        if isinstance(record, BaseModel):
            self._checks.record(record)
        match record:
            case int():
                if record != line - 1:
                    raise InvalidInput(f"the file should have {record} lines before its end, but has {line - 1}")
                self._ended = True
            case TrialRecord():
                self._store_trial(record)
            case EventRecord():
                self._store_event(record)
            case ResultRecord():
                values = record.model_dump() | {"result_key": self._key(record.result_key)}
                insert_if_absent(self._connection, result, **values)
                self._results.add(record.result_key)
            case UseRecord():
                self._store_use(record)
            case AttemptRecord():
                if record.trial is not None:
                    self._check_trial(record.trial)
                insert_attempt(self._connection, study=self.study, **record.model_dump() | self._own_names(record))

    def finish(self) -> None:
        """Stores the trials' statuses, which follow from the events."""
        if not self._ended:
            raise InvalidInput("the file was cut short: it has no end")
        for number, status in enumerate(self._statuses):
            if status is None:
                raise InvalidInput(f"trial {number} has no events")
            self._connection.execute(
                update(trial)
                .where(trial.c.study == self.study, trial.c.number == number)
                .values(**status_columns(status), updated=self._updated[number])
            )

    def _store_trial(self, record: TrialRecord) -> None:
        if record.number != len(self._statuses):
            raise InvalidInput(f"expected trial {len(self._statuses)}, found {record.number}")
        if _layout_id(record) != record.layout_id:
            raise InvalidInput(f"trial {record.number}: the layout is not the one that its id names")
        if record.layout_id in self._layouts:
            raise InvalidInput(f"trial {record.number}: an earlier trial has the same layout")
        if any(parent >= record.number for parent in record.parents):
            raise InvalidInput(f"trial {record.number}: its parents are not earlier trials: {record.parents[:10]}")
        self._layouts.add(record.layout_id)
        values = record.model_dump() | {"parents": tuple(record.parents), "updated": record.created}
        insert_trial(self._connection, Trial(study=self.study, status=TrialStatus(TrialState.PROPOSED), **values))
        self._statuses.append(None)

    def _store_event(self, record: EventRecord) -> None:
        new = Event(record.kind, record.payload, record.trial, self.study, at=record.at)
        if (record.kind is EventKind.STUDY) != (record.trial is None):
            raise InvalidInput(f"an event {record.kind.value!r} of trial {record.trial}: only 'study' has no trial")
        if record.trial is not None:
            self._check_trial(record.trial)
            self._statuses[record.trial] = advance(self._statuses[record.trial], new)
            self._updated[record.trial] = record.at
        insert_event(self._connection, new)

    def _store_use(self, record: UseRecord) -> None:
        self._check_trial(record.trial)
        if record.result_key not in self._results:
            raise InvalidInput(f"trial {record.trial} uses result {record.result_key[:12]}, which is not in the file")
        insert_use(self._connection, self._key(record.result_key), (self.study, record.trial), first=record.first)

    def _check_trial(self, number: int) -> None:
        if number >= len(self._statuses):
            raise InvalidInput(f"there is no trial {number} before this line")

    def _key(self, key: str) -> str:
        return key if self._trust else imported_key(self.study, key)

    def _own_names(self, record: AttemptRecord) -> dict[str, str | None]:
        """Returns names of an attempt's job and result that no job or result here has, also for a trusted file.

        Attempts decide whether a failure is blamed on a candidate, and how often a stage was tried.
        """
        names = {"job": record.job, "result_key": record.result_key}
        return {
            name: None if value is None else content_hash({"imported": self.study, f"attempt's {name}": value})
            for name, value in names.items()
        }


def _create(store: Store, connection: Connection, header: Header, name: str | None) -> int:
    given = header.model_dump(include={"space", "seed", "version"})
    study = studies.create(store, name or header.name, **given)
    kept = header.model_dump(include={"created", "scales", "reference_point", "proposer"})
    state = StudyState.PAUSED if header.state in (StudyState.NEW, StudyState.RUNNING) else header.state
    changed = update(study_table).where(study_table.c.id == study.id)
    connection.execute(changed.values(state=state, desired_state="pause", **kept))
    return study.id


def _layout_id(record: TrialRecord) -> str:
    try:
        return Layout.from_json(record.layout).id
    except (TypeError, AttributeError, KeyError) as error:  # a value of another JSON type than the form has there
        raise InvalidInput(f"trial {record.number}: the layout is malformed: {error}") from error


def _lines(source: TextIO) -> Iterator[str]:
    """Yields the lines, each cut at one character more than is allowed."""
    while line := source.readline(MAX_LINE + 1):
        yield line


def _parse(line: str) -> Any:
    if len(line) > MAX_LINE:
        raise ValueError(f"the line is too long: up to {MAX_LINE >> 20} MiB are read")
    try:
        return json.loads(line, parse_constant=_refuse_constant, parse_float=_float, parse_int=_whole)
    except json.JSONDecodeError as error:
        if not line.endswith("\n"):
            raise ValueError("the file ends in the middle of this line: it is not complete") from None
        raise ValueError(f"not JSON ({error.msg}): an archive of a study is what 'nas study export' writes") from None
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if abs(value) > LARGEST:
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 63:
        raise ValueError(f"the whole number {text[:40]} is too large")
    return value


def _message(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
