"""Attempts: work that gave no result. They hold no result key; the key they were made for is a note."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, select

from nas.store.models import attempt
from nas.store.rows import Attempt, Json, Stage
from nas.store.store import Store, retried


@retried
def record(
    store: Store,
    kind: str,
    message: str,
    *,
    result_key: str | None = None,
    stage: Stage | None = None,
    study: int | None = None,
    trial: int | None = None,
    device: str | None = None,
    payload: Json | None = None,
) -> Attempt:
    """Keeps an attempt that was not valid, with its raw data in `payload`.

    `kind` is a word such as 'invalid'; what failed on a device is recorded by `nas.store.outcomes`.
    """
    with store.write() as connection:
        return insert_attempt(
            connection,
            kind=kind,
            message=message,
            at=store.now(),
            result_key=result_key,
            stage=stage,
            study=study,
            trial=trial,
            device=device,
            payload=payload,
        )


def of_key(store: Store, key: str) -> list[Attempt]:
    """The attempts at the result of `key`, oldest first."""
    return _all(store, select(attempt).where(attempt.c.result_key == key))


def of_study(store: Store, study: int, *, trial: int | None = None) -> list[Attempt]:
    """The attempts of a study, or of one trial, oldest first."""
    query = select(attempt).where(attempt.c.study == study)
    return _all(store, query if trial is None else query.where(attempt.c.trial == trial))


def insert_attempt(connection: Connection, **values: Any) -> Attempt:
    """Stores an attempt under the next id."""
    key = connection.execute(attempt.insert().values(**values)).inserted_primary_key
    assert key is not None
    row = connection.execute(select(attempt).where(attempt.c.id == key[0])).one()
    return Attempt(**row._mapping)


def _all(store: Store, query: Select[Any]) -> list[Attempt]:
    with store.read() as connection:
        return [Attempt(**row._mapping) for row in connection.execute(query.order_by(attempt.c.id))]
