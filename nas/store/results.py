"""Results of stages, found by the key of all their inputs, whichever study asked first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Text, cast, func, select

from nas.core.errors import InvalidInput
from nas.store.models import result, result_use
from nas.store.rows import Json, Result, Stage
from nas.store.store import Store, retried
from nas.store.upsert import insert_if_absent

_KEYS_PER_QUERY = 500


@retried
def put(
    store: Store,
    key: str,
    stage: Stage,
    payload: Json,
    *,
    seconds: float = 0.0,
    trial: tuple[int, int] | None = None,
) -> Result:
    """Stores a result unless its key has one, and gives the stored one: the first writer wins.

    Args:
        store: where it is kept.
        key: of all the stage's inputs (`nas.core.canonical.result_key`).
        stage: that made it.
        payload: the result's JSON.
        seconds: the work took.
        trial: (study, number) that it serves.

    Raises:
        InvalidInput: the key has a result of another stage.
    """
    assert len(key) == 64, f"not a SHA-256: {key!r}"
    with store.write() as connection:
        values = {"stage": stage, "payload": payload, "seconds": seconds, "created": store.now()}
        first = insert_if_absent(connection, result, result_key=key, **values)
        stored = _get(connection, key)
        assert stored is not None
        if stored.stage != stage:
            raise InvalidInput(f"result {key[:12]} is of stage {stored.stage!r}, not {stage!r}")
        if trial is not None:
            insert_use(connection, key, trial, first=first)
        return stored


def get(store: Store, key: str) -> Result | None:
    """The result under `key`."""
    with store.read() as connection:
        return _get(connection, key)


def find_export(store: Store, sha256: str) -> Result | None:
    """What a stored file is the export of: the oldest result that names its content. Reads through all exports."""
    names_it = cast(result.c.payload, Text).contains(sha256)
    query = select(result).where(result.c.stage == "export", names_it).order_by(result.c.created).limit(1)
    with store.read() as connection:
        row = connection.execute(query).first()
        return _result(row) if row else None


def get_many(store: Store, keys: Sequence[str]) -> dict[str, Result]:
    """The results there are under `keys`."""
    found: dict[str, Result] = {}
    with store.read() as connection:
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            wanted = keys[start : start + _KEYS_PER_QUERY]
            rows = connection.execute(select(result).where(result.c.result_key.in_(wanted)))
            found |= {row.result_key: _result(row) for row in rows}
    return found


@retried
def use(store: Store, key: str, trial: tuple[int, int]) -> None:
    """Notes that the result under `key` also serves (study, number), which did not have to do the work."""
    with store.write() as connection:
        insert_use(connection, key, trial, first=False)


def of_trial(store: Store, study: int, number: int) -> list[Result]:
    """The results that serve one trial, oldest first."""
    with store.read() as connection:
        query = _used(study).where(result_use.c.trial == number)
        return [_result(row) for row in connection.execute(query)]


def of_study(store: Store, study: int, *, stage: Stage | None = None) -> list[tuple[int, Result]]:
    """(trial number, result) of a whole study, by trial, then oldest first."""
    query = _used(study)
    if stage is not None:
        query = query.where(result.c.stage == stage)
    with store.read() as connection:
        return [(row.trial, _result(row)) for row in connection.execute(query)]


def stage_seconds(store: Store, study: int) -> dict[str, float]:
    """Seconds that the study's own work took, by stage; results that it found done cost nothing."""
    query = (
        select(result.c.stage, func.sum(result.c.seconds))
        .join(result_use, result_use.c.result_key == result.c.result_key)
        .where(result_use.c.study == study, result_use.c.first)
        .group_by(result.c.stage)
    )
    with store.read() as connection:
        return {stage: seconds for stage, seconds in connection.execute(query)}


def insert_use(connection: Connection, key: str, trial: tuple[int, int], *, first: bool) -> None:
    """Notes that the result under `key` serves `trial`; again is fine."""
    insert_if_absent(connection, result_use, study=trial[0], trial=trial[1], result_key=key, first=first)


def _get(connection: Connection, key: str) -> Result | None:
    row = connection.execute(select(result).where(result.c.result_key == key)).first()
    return _result(row) if row else None


def _used(study: int) -> Any:
    return (
        select(result, result_use.c.trial)
        .join(result_use, result_use.c.result_key == result.c.result_key)
        .where(result_use.c.study == study)
        .order_by(result_use.c.trial, result.c.created, result.c.result_key)
    )


def _result(row: Row[Any]) -> Result:
    return Result(row.result_key, row.stage, row.payload, row.seconds, row.created)
