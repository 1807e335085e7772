"""Narrow reads of many trials at once: what a table of a study needs, without raw samples.

`trials` are everywhere the numbers that are wanted: a few hundred, or a `range`, which is one condition however long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic_core import from_json
from sqlalchemy import ColumnElement, and_, func, or_, select

from nas.core.trial import EventKind
from nas.store.models import event, result, result_use, trial
from nas.store.rows import Json
from nas.store.store import Store


class TrialRow(NamedTuple):
    """A trial without its layout."""

    number: int
    layout_id: str
    origin: str
    state: str
    rung: int | None


class LayoutRow(NamedTuple):
    """A trial's layout, in its JSON form, where it came from and why it ended so."""

    number: int
    origin: str
    operator: str | None
    reason: str | None
    layout: Json


class ActiveRow(NamedTuple):
    """A trial that has not ended; `updated` is when it came into its state."""

    number: int
    state: str
    rung: int | None
    origin: str
    operator: str | None
    updated: float


class MeasuredRow(NamedTuple):
    """A result of stage `measure` that serves a trial.

    Args:
        trial: its number.
        key: of the result.
        device: its id.
        runtime: its name.
        workload: its JSON, as text: there are few, and they need not be read again and again.
        figures: by name.
        noisy: whether refused repetitions count.
        seconds: it took.
        created: when.
        first: this trial had it done, so its seconds are its own.
    """

    trial: int
    key: str
    device: str
    runtime: str
    workload: str
    figures: Json
    noisy: bool
    seconds: float
    created: float
    first: bool


class QualityRow(NamedTuple):
    """The last quality that was noted of a trial."""

    trial: int
    value: float
    sd: float


class Note(NamedTuple):
    """An event of the study as a whole."""

    id: int
    payload: Json


class Completion(NamedTuple):
    """A trial that became complete, by the event that said so."""

    event: int
    trial: int
    at: float


def count(store: Store, study: int) -> int:
    """How many trials the study has: their numbers are below."""
    with store.read() as connection:
        highest: int | None = connection.scalar(select(func.max(trial.c.number)).where(trial.c.study == study))
        return 0 if highest is None else highest + 1


def states(store: Store, study: int, trials: Sequence[int]) -> list[TrialRow]:
    """The trials, by number."""
    columns = (trial.c.number, trial.c.layout_id, trial.c.origin, trial.c.state, trial.c.rung)
    query = select(*columns).where(trial.c.study == study, _among(trial.c.number, trials)).order_by(trial.c.number)
    with store.read() as connection:
        return [TrialRow(*row) for row in connection.execute(query)]


def layouts(store: Store, study: int, trials: Sequence[int]) -> list[LayoutRow]:
    """The trials' layouts, by number."""
    columns = [trial.c[name] for name in LayoutRow._fields]
    query = select(*columns).where(trial.c.study == study, _among(trial.c.number, trials)).order_by(trial.c.number)
    with store.read() as connection:
        return [LayoutRow(*row) for row in connection.execute(query)]


def active(store: Store, study: int, trials: Sequence[int]) -> list[ActiveRow]:
    """What there is to say of trials that have not ended, by number."""
    columns = [trial.c[name] for name in ActiveRow._fields]
    query = select(*columns).where(trial.c.study == study, _among(trial.c.number, trials)).order_by(trial.c.number)
    with store.read() as connection:
        return [ActiveRow(*row) for row in connection.execute(query)]


def last_progress(store: Store, study: int, trials: Sequence[int], what: str) -> Json | None:
    """The newest of the trials' events of progress that has this `what`; None where none has."""
    query = (
        select(event.c.payload)
        .where(event.c.study == study, _among(event.c.trial, trials), event.c.kind == EventKind.PROGRESS)
        .where(event.c.payload["what"].as_string() == what)
        .order_by(event.c.id.desc())
        .limit(1)
    )
    with store.read() as connection:
        found: Json | None = connection.scalar(query)
        return found


def measured(store: Store, study: int, trials: Sequence[int]) -> list[MeasuredRow]:
    """What was measured of the trials, by trial, then oldest first."""
    value = result.c.payload
    device, *parts = (value[("value", name)].as_string() for name in ("device", "runtime", "workload", "figures"))
    noisy = value[("value", "noisy")].as_boolean()
    row = (device, *parts, noisy, result.c.seconds, result.c.created, result_use.c.first)
    query = (
        select(result_use.c.trial, result.c.result_key, *row)
        .join(result, result.c.result_key == result_use.c.result_key)
        .where(result_use.c.study == study, _among(result_use.c.trial, trials), result.c.stage == "measure")
        .where(device.is_not(None))  # else it is a failure, kept as the result
        .order_by(result_use.c.trial, result.c.created, result.c.result_key)
    )
    with store.read() as connection:
        # The figures are most of it; this parser takes a third of the time of the database layer's own.
        return [MeasuredRow._make((*row[:5], from_json(row[5]), *row[6:])) for row in connection.execute(query)]


def qualities(store: Store, study: int, trials: Sequence[int]) -> list[QualityRow]:
    """The last quality of each of the trials that has one."""
    of_these = and_(event.c.study == study, _among(event.c.trial, trials), event.c.kind == EventKind.PROGRESS)
    newest = (
        select(func.max(event.c.id))
        .where(of_these, event.c.payload["what"].as_string() == "quality")
        .group_by(event.c.trial)
    )
    value, sd = (event.c.payload[("quality", name)].as_float() for name in ("value", "sd"))
    query = select(event.c.trial, value, sd).where(event.c.id.in_(newest)).order_by(event.c.trial)
    with store.read() as connection:
        return [QualityRow(*row) for row in connection.execute(query)]


def last_events(store: Store, study: int, trials: Sequence[int]) -> dict[int, int]:
    """Trial -> the id of its newest event."""
    query = (
        select(event.c.trial, func.max(event.c.id))
        .where(event.c.study == study, _among(event.c.trial, trials))
        .group_by(event.c.trial)
    )
    with store.read() as connection:
        return {number: id for number, id in connection.execute(query)}


def completions(store: Store, study: int, *, up_to: int) -> list[Completion]:
    """The trials that became complete, in that order, as far as the event `up_to`."""
    query = (
        select(event.c.id, event.c.trial, event.c.at)
        .where(event.c.study == study, event.c.kind == EventKind.COMPLETE, event.c.id <= up_to)
        .order_by(event.c.id)
    )
    with store.read() as connection:
        return [Completion(*row) for row in connection.execute(query)]


def notes(store: Store, study: int, whats: Sequence[str], fields: Sequence[str], *, up_to: int) -> list[Note]:
    """The study's own events whose `what` is one of `whats` or that have one of `fields`, oldest first."""
    has = [event.c.payload[name].as_string().is_not(None) for name in fields]
    wanted = or_(event.c.payload["what"].as_string().in_(whats), *has)
    query = (
        select(event.c.id, event.c.payload)
        .where(event.c.study == study, event.c.kind == EventKind.STUDY, event.c.id <= up_to, wanted)
        .order_by(event.c.id)
    )
    with store.read() as connection:
        return [Note(*row) for row in connection.execute(query)]


def _among(column: ColumnElement[int], trials: Sequence[int]) -> ColumnElement[bool]:
    if isinstance(trials, range) and trials.step == 1:
        return and_(column >= trials.start, column < trials.stop)
    return column.in_(trials)
