"""The append-only log of a study: what resume, the live pages and replays read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, func, select

from nas.core.trial import Event, EventKind
from nas.store.leases import lock_study
from nas.store.models import event
from nas.store.rows import StudyLease
from nas.store.store import Store, retried


@retried
def append(store: Store, study: int, payload: Mapping[str, Any], *, lease: StudyLease | None = None) -> Event:
    """Logs something about the study as a whole. Events of trials go through `trials.add_event`.

    Raises:
        StudyBusy: the lease was lost.
        UnknownName: no such study.
    """
    with store.write() as connection:
        lock_study(connection, study, lease)
        return insert_event(connection, Event(EventKind.STUDY, payload, None, study, at=store.now()))


def since(store: Store, study: int, after: int = 0, *, limit: int = 1000) -> list[Event]:
    """The events behind id `after`, oldest first: at most `limit`; call again with the last one's id."""
    with store.read() as connection:
        rows = connection.execute(
            select(event).where(event.c.study == study, event.c.id > after).order_by(event.c.id).limit(limit)
        )
        return [_event(row) for row in rows]


def of_trial(store: Store, study: int, number: int) -> list[Event]:
    """All events of one trial, oldest first."""
    with store.read() as connection:
        rows = connection.execute(
            select(event).where(event.c.study == study, event.c.trial == number).order_by(event.c.id)
        )
        return [_event(row) for row in rows]


def notes(store: Store, study: int, what: str) -> list[Event]:
    """Events of the study as a whole whose payload has that `what`, oldest first."""
    query = select(event).where(
        event.c.study == study, event.c.trial.is_(None), event.c.payload["what"].as_string() == what
    )
    with store.read() as connection:
        return [_event(row) for row in connection.execute(query.order_by(event.c.id))]


def last_id(store: Store, study: int) -> int:
    """The id of the newest event, 0 where there is none."""
    with store.read() as connection:
        return connection.scalar(select(func.max(event.c.id)).where(event.c.study == study)) or 0


def insert_event(connection: Connection, new: Event) -> Event:
    """Stores `new` under the next id; the caller holds the study (`lock_study`)."""
    values = {"study": new.study, "trial": new.trial, "kind": new.kind, "payload": dict(new.payload), "at": new.at}
    key = connection.execute(event.insert().values(**values)).inserted_primary_key
    assert key is not None
    return Event(new.kind, new.payload, new.trial, new.study, key[0], new.at)


def _event(row: Row[Any]) -> Event:
    return Event(EventKind(row.kind), row.payload, row.trial, row.study, row.id, row.at)
