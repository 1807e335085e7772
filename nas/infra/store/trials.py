"""Trials: the candidates of a study, numbered from 0 without gaps, with their states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, update

from nas.core.errors import UnknownName
from nas.core.trial import Event, EventKind, TrialState, TrialStatus, advance
from nas.infra.store.events import insert_event
from nas.infra.store.leases import lock_study, study_name
from nas.infra.store.models import trial
from nas.infra.store.rows import NewTrial, StudyLease, Trial
from nas.infra.store.store import Store, retried

_NUMBERS_PER_QUERY = 500
# Built once: to build a statement takes longer than SQLite takes to run it.
_THIS = trial.c.study == bindparam("of_study"), trial.c.number == bindparam("of_number")
_ONE, _CHANGE = select(trial).where(*_THIS), update(trial).where(*_THIS)


@retried
def propose(store: Store, study: int, proposals: Sequence[NewTrial], *, lease: StudyLease | None = None) -> list[Trial]:
    """Creates trials for proposals, all or none; a layout that the study has already keeps its trial."""
    with store.write() as connection:
        lock_study(connection, study, lease)
        return [_propose(connection, study, proposal, store.now()) for proposal in proposals]


def get(store: Store, study: int, number: int) -> Trial:
    """Returns one trial; raises `UnknownName`."""
    with store.read() as connection:
        return _get(connection, study, number)


def all(store: Store, study: int, *, states: Iterable[TrialState] | None = None) -> list[Trial]:
    """Returns the study's trials by number; only those in one of `states`, if given."""
    query = select(trial).where(trial.c.study == study).order_by(trial.c.number)
    if states is not None:
        query = query.where(trial.c.state.in_(list(states)))
    return [_trial(row) for row in store.rows(query)]


def get_many(store: Store, study: int, numbers: Sequence[int]) -> list[Trial]:
    """Returns the trials with these numbers, each once; numbers without a trial are left out."""
    trials: list[Trial] = []
    query = select(trial).where(trial.c.study == study).order_by(trial.c.number)
    with store.read() as connection:
        for start in range(0, len(numbers), _NUMBERS_PER_QUERY):
            page = numbers[start : start + _NUMBERS_PER_QUERY]
            trials += [_trial(row) for row in connection.execute(query.where(trial.c.number.in_(page)))]
    return trials


@retried
def add_event(
    store: Store,
    study: int,
    number: int,
    kind: EventKind,
    payload: Mapping[str, Any] | None = None,
    *,
    lease: StudyLease | None = None,
) -> TrialStatus:
    """Logs an event and returns the status that follows. Repeating the latest transition changes nothing.

    Raises:
        InvalidInput: no legal continuation of the trial's events (it was cancelled meanwhile, say).
        StudyBusy: the lease was lost.
        UnknownName: no such trial.
    """
    with store.write() as connection:
        lock_study(connection, study, lease)
        before = _get(connection, study, number).status
        event = Event(kind, payload or {}, number, study, at=store.now())
        if kind.value == before.state.value and event.payload.get("rung", before.rung) == before.rung:
            return before
        after = advance(before, event)
        insert_event(connection, event)
        changed = status_columns(after) | {"updated": event.at}
        connection.execute(_CHANGE, {"of_study": study, "of_number": number, **changed})
        return after


def insert_trial(connection: Connection, new: Trial) -> None:
    """Stores a trial; the caller has locked the study and stores the events that led to its status."""
    plain = {name: getattr(new, name) for name in Trial.__slots__ if name not in ("parents", "status")}
    connection.execute(trial.insert(), plain | status_columns(new.status) | {"parents": list(new.parents)})


def status_columns(status: TrialStatus) -> dict[str, Any]:
    """Returns the columns that hold a derived status."""
    return {name: getattr(status, name) for name in TrialStatus.__slots__}


def _propose(connection: Connection, study: int, proposal: NewTrial, now: float) -> Trial:
    same_layout = select(trial).where(trial.c.study == study, trial.c.layout_id == proposal.layout_id)
    if (row := connection.execute(same_layout).first()) is not None:
        return _trial(row)
    highest = connection.scalar(select(func.max(trial.c.number)).where(trial.c.study == study))
    number = 0 if highest is None else highest + 1
    event = Event(EventKind.PROPOSED, {}, number, study, at=now)
    values = {name: getattr(proposal, name) for name in NewTrial.__slots__}
    new = Trial(study=study, number=number, created=now, updated=now, status=advance(None, event), **values)
    insert_trial(connection, new)
    insert_event(connection, event)
    return new


def _get(connection: Connection, study: int, number: int) -> Trial:
    row = connection.execute(_ONE, {"of_study": study, "of_number": number}).first()
    if row is None:
        count = connection.scalar(select(func.count()).where(trial.c.study == study)) or 0
        valid = [f"0 to {count - 1}"] if count else []
        raise UnknownName(f"trial of study {study_name(connection, study)}", str(number), valid)
    return _trial(row)


def _trial(row: Row[Any]) -> Trial:
    values = dict(row._mapping)
    status = TrialStatus(**{name: values.pop(name) for name in TrialStatus.__slots__})
    return Trial(**values | {"parents": tuple(values["parents"])}, status=status)
