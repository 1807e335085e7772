"""The records of an exported study: JSON lines, one object each.

The first line is a `Header`; then, each under the name of its field in `Line`, the trials by number, the events in
order, the results, which trial they serve, the attempts; and an `end` that counts the lines before it, without which
the file was cut short. Files come from anywhere, so every record is checked as it is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from nas.core.trial import EventKind
from nas.store.rows import Origin, Stage, StudyState

FORMAT = "hilnas-study"
VERSION = 1

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
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
    rung: Number | None = None
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
        # What `nas.core.trial` reads from it.
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


class Line(_Record):
    """Any line but the first: one field is given."""

    trial: TrialRecord | None = None
    event: EventRecord | None = None
    result: ResultRecord | None = None
    use: UseRecord | None = None
    attempt: AttemptRecord | None = None
    end: Number | None = None

    def only(self) -> Any:
        """The one record of the line.

        Raises:
            ValueError: none or several are given.
        """
        given = [value for _, value in self if value is not None]
        if len(given) != 1:
            raise ValueError("a line holds one of trial, event, result, use, attempt or end")
        return given[0]
