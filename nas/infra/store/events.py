"""The append-only event log of a study, which resume, pages and replays read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select

from nas.core.trial import Event, EventKind
from nas.infra.store.leases import lock_study
from nas.infra.store.models import event
from nas.infra.store.rows import StudyLease
from nas.infra.store.store import Store, retried


@retried
def append(store: Store, study: int, payload: Mapping[str, Any], *, lease: StudyLease | None = None) -> Event:
    """Logs an event of the study as a whole. Events of trials are logged by `trials.add_event`."""
    with store.write() as connection:
        lock_study(connection, study, lease)
        return insert_event(connection, Event(EventKind.STUDY, payload, None, study, at=store.now()))


def since(store: Store, study: int, after: int = 0, *, limit: int = 1000) -> list[Event]:
    """Returns at most `limit` events after the id `after`, oldest first; the last id continues."""
    query = select(event).where(event.c.study == study, event.c.id > after).order_by(event.c.id).limit(limit)
    return [Event(**row._mapping) for row in store.rows(query)]


def latest(store: Store, study: int, limit: int) -> list[Event]:
    """Returns the newest events, at most `limit`, oldest first."""
    query = select(event).where(event.c.study == study).order_by(event.c.id.desc()).limit(limit)
    return [Event(**row._mapping) for row in reversed(store.rows(query))]


def newest(store: Store, study: int) -> int:
    """Returns the id of the study's newest event; 0 before the first."""
    with store.read() as connection:
        return connection.execute(select(func.max(event.c.id)).where(event.c.study == study)).scalar() or 0


def notes(store: Store, study: int, what: str) -> list[Event]:
    """Returns the events of the study as a whole whose payload has that `what`, oldest first."""
    query = select(event).where(
        event.c.study == study, event.c.trial.is_(None), event.c.payload["what"].as_string() == what
    )
    return [Event(**row._mapping) for row in store.rows(query.order_by(event.c.id))]


def insert_event(connection: Connection, new: Event) -> Event:
    """Stores `new` under the next id; the caller has locked the study (`lock_study`)."""
    values = {"study": new.study, "trial": new.trial, "kind": new.kind, "payload": dict(new.payload), "at": new.at}
    key = connection.execute(event.insert(), values).inserted_primary_key
    assert key is not None
    return Event(new.kind, new.payload, new.trial, new.study, key[0], new.at)
