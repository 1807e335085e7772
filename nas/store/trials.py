"""Trials: the candidates of a study, numbered from 0 without gaps, with their derived states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from nas.core.errors import UnknownName
from nas.core.trial import Event, EventKind, TrialState, TrialStatus, advance
from nas.store.events import insert_event
from nas.store.leases import lock_study
from nas.store.models import study as study_table
from nas.store.models import trial
from nas.store.rows import Json, Proposal, StudyLease, Trial
from nas.store.store import Store, retried


@retried
def propose(
    store: Store,
    study: int,
    proposals: Sequence[Proposal],
    *,
    proposer: Json | None = None,
    lease: StudyLease | None = None,
) -> list[Trial]:
    """Makes trials of proposals, all or none, and keeps the proposer's new state with them.

    A layout that the study has already gives its present trial and uses no number, so that a proposal may be repeated.

    Raises:
        StudyBusy: the lease was lost.
        UnknownName: no such study.
    """
    with store.write() as connection:
        lock_study(connection, study, lease)
        trials = [_propose(connection, study, proposal, store.now()) for proposal in proposals]
        if proposer is not None:
            connection.execute(update(study_table).where(study_table.c.id == study).values(proposer=proposer))
        return trials


def get(store: Store, study: int, number: int) -> Trial:
    """One trial.

    Raises:
        UnknownName: no such trial.
    """
    with store.read() as connection:
        return _get(connection, study, number)


def by_layout(store: Store, study: int, layout_id: str) -> Trial | None:
    """The study's trial of that layout."""
    with store.read() as connection:
        return _by_layout(connection, study, layout_id)


def find_layout(store: Store, layout_id: str) -> Json | None:
    """The layout of that id, from any study that has a trial of it."""
    with store.read() as connection:
        found: Json | None = connection.scalar(select(trial.c.layout).where(trial.c.layout_id == layout_id).limit(1))
        return found


def all(store: Store, study: int, *, states: Iterable[TrialState] | None = None) -> list[Trial]:
    """The study's trials in the order of their numbers; only those in one of `states`, if given."""
    query = select(trial).where(trial.c.study == study).order_by(trial.c.number)
    if states is not None:
        query = query.where(trial.c.state.in_(list(states)))
    with store.read() as connection:
        return [_trial(row) for row in connection.execute(query)]


def counts(store: Store, study: int) -> dict[TrialState, int]:
    """How many trials are in each state; states without trials are left out."""
    query = select(trial.c.state, func.count()).where(trial.c.study == study).group_by(trial.c.state)
    with store.read() as connection:
        return {TrialState(state): count for state, count in connection.execute(query)}


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
    """Logs an event and gives the status that follows. Repeating the transition that came last changes nothing.

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
        connection.execute(
            update(trial)
            .where(trial.c.study == study, trial.c.number == number)
            .values(**status_columns(after), updated=event.at)
        )
        return after


def insert_trial(connection: Connection, new: Trial) -> None:
    """Stores a trial as it is; the caller holds the study and stores the events that led to its status."""
    connection.execute(
        trial.insert().values(
            study=new.study,
            number=new.number,
            layout_id=new.layout_id,
            layout=new.layout,
            origin=new.origin,
            parents=list(new.parents),
            operator=new.operator,
            record=new.record,
            created=new.created,
            updated=new.updated,
            **status_columns(new.status),
        )
    )


def status_columns(status: TrialStatus) -> dict[str, Any]:
    """The columns that keep a derived status."""
    return {
        "state": status.state,
        "rung": status.rung,
        "reason": status.reason,
        "retryable": status.retryable,
    }


def _propose(connection: Connection, study: int, proposal: Proposal, now: float) -> Trial:
    known = _by_layout(connection, study, proposal.layout_id)
    if known is not None:
        return known
    highest = connection.scalar(select(func.max(trial.c.number)).where(trial.c.study == study))
    number = 0 if highest is None else highest + 1
    event = Event(EventKind.PROPOSED, {}, number, study, at=now)
    new = Trial(
        study,
        number,
        proposal.layout_id,
        proposal.layout,
        proposal.origin,
        proposal.parents,
        proposal.operator,
        proposal.record,
        now,
        now,
        advance(None, event),
    )
    insert_trial(connection, new)
    insert_event(connection, event)
    return new


def _get(connection: Connection, study: int, number: int) -> Trial:
    row = connection.execute(select(trial).where(trial.c.study == study, trial.c.number == number)).first()
    if row is None:
        count = connection.scalar(select(func.count()).where(trial.c.study == study)) or 0
        valid = [f"0 to {count - 1}"] if count else []
        raise UnknownName(f"trial of study {study}", str(number), valid)
    return _trial(row)


def _by_layout(connection: Connection, study: int, layout_id: str) -> Trial | None:
    query = select(trial).where(trial.c.study == study, trial.c.layout_id == layout_id)
    row = connection.execute(query).first()
    return _trial(row) if row else None


def _trial(row: Row[Any]) -> Trial:
    return Trial(
        row.study,
        row.number,
        row.layout_id,
        row.layout,
        row.origin,
        tuple(row.parents),
        row.operator,
        row.record,
        row.created,
        row.updated,
        TrialStatus(TrialState(row.state), row.rung, row.reason, row.retryable),
    )
