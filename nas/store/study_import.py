"""Reading a study from a file that anybody may have written.

Nothing is believed: layouts are parsed and hashed again, states follow from the events anew, numbers must be gapless,
and results are filed under keys of their own, so that no other study ever reuses a figure from somebody's file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

from pydantic import ValidationError
from sqlalchemy import Connection, update

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.trial import Event, EventKind, TrialState, TrialStatus, advance
from nas.store import studies
from nas.store.attempts import insert_attempt
from nas.store.events import insert_event
from nas.store.models import result as result_table
from nas.store.models import study as study_table
from nas.store.models import trial as trial_table
from nas.store.results import insert_use
from nas.store.rows import Study, StudyState, Trial
from nas.store.store import Store
from nas.store.study_file import AttemptRecord, EventRecord, Header, Line, ResultRecord, TrialRecord, UseRecord
from nas.store.trials import insert_trial, status_columns
from nas.store.upsert import insert_if_absent

MAX_LINE = 16 << 20
"""Characters in a line."""


def import_study(store: Store, source: TextIO, *, name: str | None = None, trust_results: bool = False) -> Study:
    """Makes a study of a file, all or nothing; it is paused, and its orchestrator may go on with it.

    Args:
        store: where it is kept.
        source: what `export_study` wrote, as a file on disk: the database takes no other writes while it is read.
        name: of the study, if not its old one.
        trust_results: file results under the keys that the file gives, so that every study here may reuse them. Only
            for files of one's own.

    Raises:
        InvalidInput: the file is damaged, of another version or has too long a line, or the name is taken.
    """
    with store.write() as connection:
        reader: _Reader | None = None
        for number, line in enumerate(_lines(source), start=1):
            try:
                data = _parse(line)
                if reader is None:
                    study = _create(store, connection, Header.model_validate(data), name)
                    reader = _Reader(connection, study, trust_results)
                else:
                    reader.take(Line.model_validate(data).only(), number)
            except ValueError as error:
                raise InvalidInput(_message(error), where=f"line {number}") from error
        if reader is None:
            raise InvalidInput("the file is empty")
        reader.finish()
        return studies.get(store, reader.study)


class _Reader:
    """Takes the records of one file in their order."""

    def __init__(self, connection: Connection, study: int, trust_results: bool) -> None:
        self.study = study
        self._connection = connection
        self._trust = trust_results
        self._statuses: list[TrialStatus | None] = []
        self._updated: dict[int, float] = {}
        self._results: set[str] = set()
        self._layouts: set[str] = set()
        self._ended = False

    def take(self, record: Any, line: int) -> None:
        """Stores one record, the file's line `line`."""
        if self._ended:
            raise InvalidInput("the file goes on behind its end")
        if isinstance(record, int):
            if record != line - 1:
                raise InvalidInput(f"the file should have {record} lines before its end, but has {line - 1}")
            self._ended = True
        else:
            self._store(record)

    def finish(self) -> None:
        """Files the statuses that the events led to."""
        if not self._ended:
            raise InvalidInput("the file was cut short: it has no end")
        for number, status in enumerate(self._statuses):
            if status is None:
                raise InvalidInput(f"trial {number} has no events")
            self._connection.execute(
                update(trial_table)
                .where(trial_table.c.study == self.study, trial_table.c.number == number)
                .values(**status_columns(status), updated=self._updated[number])
            )

    def _store(self, record: Any) -> None:
        match record:
            case TrialRecord():
                self._store_trial(record)
            case EventRecord():
                self._store_event(record)
            case ResultRecord():
                values = record.model_dump() | {"result_key": self._key(record.result_key)}
                insert_if_absent(self._connection, result_table, **values)
                self._results.add(record.result_key)
            case UseRecord():
                self._store_use(record)
            case AttemptRecord():
                if record.trial is not None:
                    self._check_trial(record.trial)
                insert_attempt(self._connection, study=self.study, **record.model_dump())

    def _store_trial(self, record: TrialRecord) -> None:
        if record.number != len(self._statuses):
            raise InvalidInput(f"expected trial {len(self._statuses)}, found {record.number}")
        if _layout_id(record) != record.layout_id:
            raise InvalidInput(f"trial {record.number}: the layout is not the one that its id names")
        if record.layout_id in self._layouts:
            raise InvalidInput(f"trial {record.number}: an earlier trial has the same layout")
        self._layouts.add(record.layout_id)
        values = record.model_dump()
        values["parents"] = tuple(values["parents"])
        status = TrialStatus(TrialState.PROPOSED)
        insert_trial(self._connection, Trial(study=self.study, updated=record.created, status=status, **values))
        self._statuses.append(None)

    def _store_event(self, record: EventRecord) -> None:
        event = Event(record.kind, record.payload, record.trial, self.study, at=record.at)
        if (record.kind is EventKind.STUDY) != (record.trial is None):
            raise InvalidInput(f"an event {record.kind.value!r} of trial {record.trial}: only 'study' has no trial")
        if record.trial is not None:
            self._check_trial(record.trial)
            self._statuses[record.trial] = advance(self._statuses[record.trial], event)
            self._updated[record.trial] = record.at
        insert_event(self._connection, event)

    def _store_use(self, record: UseRecord) -> None:
        self._check_trial(record.trial)
        if record.result_key not in self._results:
            raise InvalidInput(f"trial {record.trial} uses result {record.result_key[:12]}, which is not in the file")
        insert_use(self._connection, self._key(record.result_key), (self.study, record.trial), first=record.first)

    def _check_trial(self, number: int) -> None:
        if number >= len(self._statuses):
            raise InvalidInput(f"there is no trial {number} before this line")

    def _key(self, key: str) -> str:
        return key if self._trust else content_hash({"imported": self.study, "result_key": key})


def _create(store: Store, connection: Connection, header: Header, name: str | None) -> int:
    given = header.model_dump(include={"space", "seed", "version", "scales"})
    study = studies.create(store, name or header.name, **given)
    state = StudyState.PAUSED if header.state in (StudyState.NEW, StudyState.RUNNING) else header.state
    connection.execute(
        update(study_table)
        .where(study_table.c.id == study.id)
        .values(
            state=state,
            desired_state="pause",
            created=header.created,
            reference_point=header.reference_point,
            proposer=header.proposer,
        )
    )
    return study.id


def _layout_id(record: TrialRecord) -> str:
    try:
        return Layout.from_json(record.layout).id
    except (TypeError, AttributeError, KeyError) as error:  # a value of another JSON type than the form has there
        raise InvalidInput(f"trial {record.number}: the layout is malformed: {error}") from error


def _lines(source: TextIO) -> Iterator[str]:
    """The lines, each cut at one character more than is allowed."""
    while line := source.readline(MAX_LINE + 1):
        yield line


def _parse(line: str) -> Any:
    if len(line) > MAX_LINE:
        raise ValueError(f"the line is too long: up to {MAX_LINE >> 20} MiB are read")
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _message(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
