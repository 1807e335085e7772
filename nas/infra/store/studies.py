"""Studies: launched searches, with their states and frozen constants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, select, update

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput, StudyBusy, UnknownName
from nas.core.trial import Event, EventKind
from nas.infra.store import leases
from nas.infra.store.artifacts import pin_only, study_owner
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.events import insert_event
from nas.infra.store.leases import lock_study
from nas.infra.store.models import event, study
from nas.infra.store.rows import DesiredState, Json, Study, StudyLease, StudyState
from nas.infra.store.store import Store, retried

INTERRUPTED = "interrupted"
"""State that users see of a study whose process is gone without having ended it; never stored."""

_AT_WORK = (StudyState.NEW, StudyState.RUNNING, StudyState.PAUSED)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Condition:
    """The state of a study as users see it.

    Args:
        state: of the study, or `INTERRUPTED`.
        reason: why it failed or was interrupted; None in other states.
        resume: the command that continues it where it was launched; None while it runs and once it is complete.
    """

    state: str
    reason: str | None = None
    resume: str | None = None


@retried
def create(store: Store, name: str, space: Json, *, seed: int, version: str) -> Study:
    """Creates a study; `version` is that of hilnas.

    Raises:
        InvalidInput: the name is taken, or no name that a new study can have (`check_new_name`).
    """
    check_new_name(name)
    with store.write() as connection:
        created = insert_if_absent(
            connection,
            study,
            name=name,
            space=space,
            space_hash=content_hash(space),
            state=StudyState.NEW,
            desired_state="run",
            seed=seed,
            version=version,
            created=store.now(),
        )
        if not created:
            raise duplicate_study(name)
        return get(store, name)


def duplicate_study(name: str) -> InvalidInput:
    """Returns the error of a name that a study has."""
    again = f"or continue it with 'nas launch --study {name} --resume'"
    return InvalidInput(f"a study named {name!r} exists; choose another name, {again}")


def check_name(name: str) -> None:
    """Raises `InvalidInput` unless `name` is a valid name of a study."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no study name; use up to 64 letters, digits, '.', '_' and '-'")


def check_new_name(name: str) -> None:
    """Raises `InvalidInput` unless a new study can have the name: `NAME.json` is the address of the data of `NAME`."""
    check_name(name)
    if name.endswith(".json"):
        raise InvalidInput(f"{name!r} is the address of another study's data; choose one that does not end in '.json'")


def get(store: Store, study_or_name: int | str) -> Study:
    """Returns the study of that name or id.

    Raises:
        UnknownName: there is none.
    """
    column = study.c.id if isinstance(study_or_name, int) else study.c.name
    with store.read() as connection:
        row = connection.execute(select(study).where(column == study_or_name)).first()
        if row is None:
            raise UnknownName("study", str(study_or_name), connection.scalars(select(study.c.name)))
        return Study(**row._mapping)


def find_id(store: Store, name: str) -> int:
    """Returns the id of the study of that name, without reading its space; raises `UnknownName`."""
    with store.read() as connection:
        id: int | None = connection.scalar(select(study.c.id).where(study.c.name == name))
    return get(store, name).id if id is None else id


def all(store: Store) -> list[Study]:
    """Returns every study, oldest first."""
    return [Study(**row._mapping) for row in store.rows(select(study).order_by(study.c.id))]


def condition(store: Store, row: Study) -> Condition:
    """Returns the present condition of a study."""
    return conditions(store, [(row.id, row.name, row.state)])[row.id]


def conditions(store: Store, rows: Sequence[tuple[int, str, StudyState]]) -> dict[int, Condition]:
    """Returns the present condition of each study, given as (id, name, state)."""
    now = store.now()
    with store.read() as connection:
        # A process renews its lease three times before it expires, and lets it expire only when it ends.
        expiries = leases.expired(connection, [id for id, _, state in rows if state in _AT_WORK], now)
        # One that ended after `expiries` was read gave its lease back, too.
        still = select(study.c.id).where(study.c.id.in_(expiries), study.c.state.in_(_AT_WORK))
        expiries = {id: expiries[id] for id in connection.scalars(still)}
        reasons = _reasons(connection, [id for id, _, state in rows if state is StudyState.FAILED])
    return {id: _condition(name, state, expiries.get(id), reasons.get(id)) for id, name, state in rows}


def _condition(name: str, state: StudyState, expiry: float | None, reason: str | None) -> Condition:
    resume = f"nas launch --study {name} --resume"
    if expiry is not None:
        at = datetime.fromtimestamp(expiry, UTC).isoformat(sep=" ", timespec="seconds")
        return Condition(INTERRUPTED, f"its process is gone; it held the study until {at}", resume)
    if state is StudyState.FAILED:
        return Condition(state.value, reason or "the version of hilnas that ran it stored no reason", resume)
    return Condition(state.value, None, resume if state is StudyState.STOPPED else None)


def _reasons(connection: Connection, failed: Sequence[int]) -> dict[int, str]:
    """Returns id -> the reason in the last event that set the state of a failed study."""
    state = event.c.payload["state"].as_string()
    last = select(func.max(event.c.id)).where(
        event.c.study.in_(failed), event.c.kind == EventKind.STUDY.value, state == StudyState.FAILED.value
    )
    query = select(event.c.study, event.c.payload).where(event.c.id.in_(last.group_by(event.c.study)))
    rows = connection.execute(query) if failed else ()
    return {study_id: payload["reason"] for study_id, payload in rows if payload.get("reason")}


@retried
def set_desired_state(store: Store, study_id: int, desired: DesiredState) -> None:
    """Requests a state from the orchestrator, which polls for it."""
    _set(store, study_id, None, desired_state=desired)


@retried
def set_state(
    store: Store, study_id: int, state: StudyState, *, lease: StudyLease | None = None, reason: str | None = None
) -> None:
    """Sets the state of a study; a change, and a reason in any case, is logged as an event.

    Raises:
        StudyBusy: the lease was lost.
    """
    with store.write() as connection:
        lock_study(connection, study_id, lease)
        if get(store, study_id).state is not state or reason is not None:
            _set(store, study_id, lease, state=state)
            _log(connection, store, study_id, {"state": state.value} | ({"reason": reason} if reason else {}))


def set_scales(store: Store, study_id: int, scales: Json, *, lease: StudyLease | None = None) -> Study:
    """Freezes the constants that objectives are scaled by; idempotent, but `InvalidInput` for other ones."""
    return _freeze(store, study_id, "scales", scales, lease)


def freeze_reference(store: Store, study_id: int, point: Json, *, lease: StudyLease | None = None) -> Study:
    """Freezes the reference point of the hypervolume; idempotent, but `InvalidInput` for another one."""
    return _freeze(store, study_id, "reference_point", point, lease)


@retried
def delete(store: Store, study_id: int) -> None:
    """Deletes a study with its trials, events, attempts and jobs, but not its results, which other studies find.

    Raises:
        StudyBusy: an orchestrator runs it.
        UnknownName: no such study.
    """
    with store.write() as connection:
        lock_study(connection, study_id)
        if (holder := leases.holder(store, study_id)) is not None:
            raise StudyBusy(f"study {leases.study_name(connection, study_id)} is run by {holder}; stop it first")
        pin_only(store, study_owner(study_id), ())
        connection.execute(study.delete().where(study.c.id == study_id))


def _set(store: Store, study_id: int, lease: StudyLease | None, **values: Any) -> None:
    with store.write() as connection:
        lock_study(connection, study_id, lease)
        connection.execute(update(study).where(study.c.id == study_id).values(**values))


@retried
def _freeze(store: Store, study_id: int, field: str, value: Json, lease: StudyLease | None) -> Study:
    with store.write() as connection:
        lock_study(connection, study_id, lease)
        frozen = getattr(get(store, study_id), field)
        if frozen is None:
            _set(store, study_id, lease, **{field: value})
            _log(connection, store, study_id, {field: value})
        elif content_hash(frozen) != content_hash(value):
            raise InvalidInput(f"study {study_id}: {field} is frozen as {frozen}; it cannot become {value}")
        return get(store, study_id)


def _log(connection: Connection, store: Store, study_id: int, payload: Json) -> None:
    insert_event(connection, Event(EventKind.STUDY, payload, None, study_id, at=store.now()))
