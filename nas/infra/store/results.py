"""Results of stages, stored under the key of all their inputs and shared by all studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, func, select

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.models import result, result_use
from nas.infra.store.rows import Json, Result, Stage
from nas.infra.store.store import Store, retried

_KEYS_PER_QUERY = 500
_ONE = select(result).where(result.c.result_key == bindparam("key"))


@retried
def put(
    store: Store, key: str, stage: Stage, payload: Json, *, seconds: float = 0.0, trial: tuple[int, int] | None = None
) -> Result:
    """Stores a result unless its key has one, and returns the stored one: the first writer wins.

    `key` is of `nas.core.canonical.result_key`, `trial` (study, number) what uses the result.

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
    """Returns the result under `key`; None where there is none."""
    with store.read() as connection:
        return _get(connection, key)


def get_many(store: Store, keys: Sequence[str]) -> dict[str, Result]:
    """Returns the stored results by key, without the keys that have none."""
    results: dict[str, Result] = {}
    with store.read() as connection:
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            page = keys[start : start + _KEYS_PER_QUERY]
            rows = connection.execute(select(result).where(result.c.result_key.in_(page)))
            results |= {row.result_key: Result(**row._mapping) for row in rows}
    return results


def imported_key(study: int, key: str) -> str:
    """Returns the key of a result that `study` was imported with from a file that is not trusted."""
    return content_hash({"imported": study, "result_key": key})


@retried
def use(store: Store, key: str, trial: tuple[int, int]) -> None:
    """Stores that (study, number) uses the result under `key`, which another trial produced."""
    with store.write() as connection:
        insert_use(connection, key, trial, first=False)


def of_trial(store: Store, study: int, number: int) -> list[Result]:
    """Returns the results that one trial uses, oldest first."""
    query = (
        select(result)
        .join(result_use, result_use.c.result_key == result.c.result_key)
        .where(result_use.c.study == study, result_use.c.trial == number)
        .order_by(result.c.created, result.c.result_key)
    )
    return [Result(**row._mapping) for row in store.rows(query)]


class ResultSummary(NamedTuple):
    """A result without the bulk of its payload; what follows `first` is None where its stage has none of it.

    Args:
        key: of the result.
        stage: that made it.
        seconds: it took.
        created: when, in seconds since the epoch.
        first: this trial did the work; others found it done.
        device: id.
        runtime: name.
        workload: as JSON text.
        figures: by name, as JSON text.
        artifact: SHA-256 of the model file that was measured or exported.
        quantisation: of an export.
        foreign_cpu: median CPU share of other processes meanwhile, in cores; None: not known.
    """

    key: str
    stage: Stage
    seconds: float
    created: float
    first: bool
    device: str | None
    runtime: str | None
    workload: str | None
    figures: str | None
    artifact: str | None
    quantisation: str | None
    foreign_cpu: float | None


def summaries(store: Store, study: int, trials: Sequence[int] | None = None) -> dict[int, list[ResultSummary]]:
    """Returns trial number -> its results, oldest first, without the samples of measurements; None: of all trials."""
    value = result.c.payload
    texts = [value[("value", name)].as_string() for name in ("device", "runtime", "workload", "figures")]
    # A measurement names its artifact, which an export is.
    texts.append(func.coalesce(value[("value", "artifact")].as_string(), value[("value", "sha256")].as_string()))
    texts.append(value[("value", "quantisation")].as_string())
    others = value[("value", "foreign_cpu")].as_float()
    columns = (result.c.result_key, result.c.stage, result.c.seconds, result.c.created, result_use.c.first)
    query = (
        select(result_use.c.trial, *columns, *texts, others)
        .join(result, result.c.result_key == result_use.c.result_key)
        .where(result_use.c.study == study)
        .order_by(result_use.c.trial, result.c.created, result.c.result_key)
    )
    queries = [query]
    if trials is not None:
        starts = range(0, len(trials), _KEYS_PER_QUERY)
        queries = [query.where(result_use.c.trial.in_(trials[start : start + _KEYS_PER_QUERY])) for start in starts]
    by_trial: dict[int, list[ResultSummary]] = {}
    with store.read() as connection:
        for page in queries:
            for row in connection.execute(page):
                by_trial.setdefault(row[0], []).append(ResultSummary._make(row[1:]))
    return by_trial


def stage_seconds(store: Store, study: int) -> dict[str, float]:
    """Returns stage -> seconds of the study's own work; reused results cost nothing."""
    query = (
        select(result.c.stage, func.sum(result.c.seconds))
        .join(result_use, result_use.c.result_key == result.c.result_key)
        .where(result_use.c.study == study, result_use.c.first)
        .group_by(result.c.stage)
    )
    return {stage: seconds for stage, seconds in store.rows(query)}


def insert_use(connection: Connection, key: str, trial: tuple[int, int], *, first: bool) -> None:
    """Stores that `trial` uses the result under `key`; idempotent."""
    insert_if_absent(connection, result_use, study=trial[0], trial=trial[1], result_key=key, first=first)


def _get(connection: Connection, key: str) -> Result | None:
    row = connection.execute(_ONE, {"key": key}).first()
    return Result(**row._mapping) if row else None
