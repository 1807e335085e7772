"""Paginated lists of jobs and studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, and_, case, func, or_, select

from nas.core.errors import UnknownName
from nas.infra.store import devices
from nas.infra.store.models import calibration, job, study, trial
from nas.infra.store.models import device as device_table
from nas.infra.store.rows import Blame, DeviceState, JobKind, JobState, Study, StudyState
from nas.infra.store.store import Store
from nas.infra.store.studies import Condition, conditions


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job without what it runs and what came of it. `study` is the study's name."""

    id: str
    kind: JobKind
    study: str | None
    trial: int | None
    device: str
    priority: int
    state: JobState
    attempts: int
    epoch: int | None
    lease_until: float | None
    not_before: float
    created: float
    updated: float
    blame: Blame | None
    reason: str | None
    message: str | None


@dataclass(frozen=True, slots=True)
class StudySummary:
    """A study without its space; `trials` counts all it has, `condition` is what users see of its state.

    `problem` says why the name of its space is unknown.
    """

    id: int
    name: str
    space: str
    state: StudyState
    desired_state: str
    created: float
    trials: int
    condition: Condition
    problem: str | None


@dataclass(frozen=True, slots=True)
class StudyFilter:
    """What a listed study must match; '' matches all.

    Args:
        text: a part of its name, of any case.
        space: name of its space.
        state: as users see it, such as `interrupted`.
    """

    text: str = ""
    space: str = ""
    state: str = ""

    def matches(self, summary: StudySummary) -> bool:
        """Returns whether a study matches all of it."""
        return (
            self.text.lower() in summary.name.lower()
            and self.space in ("", summary.space)
            and self.state in ("", summary.condition.state)
        )


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits for its device: position in the queue, from 1, and name of its study; None for checks."""

    id: str
    kind: JobKind
    study: str | None
    position: int
    since: float


_ALL = StudyFilter()
_BATCH = 200
"""Studies that are read at a time to find those that match."""

JobPlace = tuple[float, str]
"""Position of a job in the list, newest first: when it was created, and its id."""


def jobs(
    store: Store,
    *,
    limit: int,
    after: JobPlace | None = None,
    state: JobState | None = None,
    device: str | None = None,
    study_name: str | None = None,
) -> list[JobSummary]:
    """Returns at most `limit` jobs, newest first, that come after `after` and match what is given."""
    columns = [column for column in job.c if column.name in JobSummary.__slots__ and column.name != "study"]
    query: Select[Any] = select(*columns, study.c.name.label("study")).outerjoin(study, study.c.id == job.c.study)
    filters = {job.c.state: state, job.c.device: device, study.c.name: study_name}
    query = query.where(*(column == value for column, value in filters.items() if value is not None))
    if after is not None:
        created, id = after
        query = query.where(or_(job.c.created < created, and_(job.c.created == created, job.c.id < id)))
    query = query.order_by(job.c.created.desc(), job.c.id.desc()).limit(limit)
    return [JobSummary(**row._mapping) for row in store.rows(query)]


def queues(store: Store) -> dict[str, list[QueuedJob]]:
    """Returns device -> the jobs that wait for it, in the order in which it takes them."""
    order = (job.c.device, job.c.priority.desc(), job.c.created, job.c.id)
    columns = (job.c.id, job.c.kind, job.c.device, job.c.created, study.c.name)
    query = select(*columns).outerjoin(study, study.c.id == job.c.study).where(job.c.state == JobState.QUEUED)
    by_device: dict[str, list[QueuedJob]] = {}
    for row in store.rows(query.order_by(*order)):
        waiting = by_device.setdefault(row.device, [])
        waiting.append(QueuedJob(row.id, row.kind, row.name, len(waiting) + 1, row.created))
    return by_device


def running(store: Store) -> dict[str, str | None]:
    """Returns device -> study of the job that it runs; None: of no study."""
    query = select(job.c.device, study.c.name).outerjoin(study, study.c.id == job.c.study)
    return {device: name for device, name in store.rows(query.where(job.c.state == JobState.LEASED))}


def studies(store: Store, *, limit: int, after: int = 0, matching: StudyFilter = _ALL) -> list[StudySummary]:
    """Returns at most `limit` studies that match, with an id above `after`, oldest first."""
    query = select(study).order_by(study.c.id)
    return _matching(store, limit, matching, lambda last: query.where(study.c.id > (after if last is None else last)))


def latest_studies(
    store: Store, *, limit: int, before: int | None = None, matching: StudyFilter = _ALL
) -> list[StudySummary]:
    """Returns at most `limit` studies that match and are older than the id `before`, newest first."""
    query = select(study).order_by(study.c.id.desc())

    def older(last: int | None) -> Select[Any]:
        oldest = before if last is None else last
        return query if oldest is None else query.where(study.c.id < oldest)

    return _matching(store, limit, matching, older)


def _matching(
    store: Store, limit: int, matching: StudyFilter, beyond: Callable[[int | None], Select[Any]]
) -> list[StudySummary]:
    """Returns at most `limit` studies that match; `beyond`: the query for those after a study, None: for the first."""
    matches: list[StudySummary] = []
    last = None
    while len(matches) < limit:
        size = limit if matching == _ALL else max(limit, _BATCH)
        rows = _summaries(store, beyond(last).limit(size))
        matches += filter(matching.matches, rows)
        if len(rows) < size:
            break
        last = rows[-1].id
    return matches[:limit]


def _summaries(store: Store, query: Select[Any]) -> list[StudySummary]:
    with store.read() as connection:
        rows = connection.execute(query).all()
        ids = [row.id for row in rows]
        trials = select(trial.c.study, func.count()).where(trial.c.study.in_(ids)).group_by(trial.c.study)
        counts = {id: count for id, count in connection.execute(trials)}
    states = conditions(store, [(row.id, row.name, row.state) for row in rows])
    return [_study_summary(row, counts.get(row.id, 0), states[row.id]) for row in rows]


def _study_summary(row: Row[Any], trials: int, condition: Condition) -> StudySummary:
    name = row.space.get("name") if isinstance(row.space, dict) else None
    problem = None if isinstance(name, str) else "its search space is malformed"
    space = name if isinstance(name, str) else ""
    return StudySummary(row.id, row.name, space, row.state, row.desired_state, row.created, trials, condition, problem)


def summary(store: Store, row: Study) -> StudySummary:
    """Returns one study, as `studies` lists it; raises `UnknownName`."""
    listed = studies(store, limit=1, after=row.id - 1)
    if not listed or listed[0].id != row.id:
        raise UnknownName("study", row.name, [])
    return listed[0]


def devices_by_condition(store: Store) -> dict[tuple[str, str], int]:
    """Returns (state, health) -> how many devices; combinations without devices are left out."""
    silent = devices.silent(store.now()).self_group()
    state = case((silent, DeviceState.OFFLINE.value), else_=device_table.c.state).label("state_now")
    query = select(state, device_table.c.health, func.count()).group_by(state, device_table.c.health)
    return {(state, health): count for state, health, count in store.rows(query)}


def studies_by_condition(store: Store) -> dict[str, int]:
    """Returns state as users see it -> how many studies; states without studies are left out."""
    rows = [(row.id, row.name, row.state) for row in store.rows(select(study.c.id, study.c.name, study.c.state))]
    return dict(Counter(condition.state for condition in conditions(store, rows).values()))


def calibrated_devices(store: Store) -> list[str]:
    """Returns the ids of the devices that have a calibration."""
    with store.read() as connection:
        return list(connection.scalars(select(calibration.c.device).distinct().order_by(calibration.c.device)))


def jobs_by_state(store: Store) -> dict[str, int]:
    """Returns state -> how many jobs; states without jobs are left out."""
    return {state: count for state, count in store.rows(select(job.c.state, func.count()).group_by(job.c.state))}


def longest_wait_s(store: Store) -> float:
    """Returns how long the job that has been due longest has waited for its device, in seconds; 0 if none waits."""
    due = func.min(case((job.c.created > job.c.not_before, job.c.created), else_=job.c.not_before))
    with store.read() as connection:
        since = connection.scalar(select(due).where(job.c.state == JobState.QUEUED))
    return 0.0 if since is None else max(0.0, store.now() - since)


def leases_granted(store: Store) -> dict[str, int]:
    """Returns device -> leases granted for it in all: its epoch."""
    return {id: epoch for id, epoch in store.rows(select(device_table.c.id, device_table.c.epoch))}
