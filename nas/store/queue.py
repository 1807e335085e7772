"""Which job a device does next: of the kinds that its health allows, by priority, then by age."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, Row, Select, bindparam, exists, or_, select

from nas.store.models import device as device_table
from nas.store.models import job as job_table
from nas.store.rows import DeviceRow, DeviceState, Health, JobKind, JobState
from nas.store.store import Store

TAKES_JOBS = frozenset({DeviceState.IDLE, DeviceState.LEASED, DeviceState.PREPARING, DeviceState.COOLING})
"""States of devices that may be given one."""

_KINDS = {
    Health.GOOD: (JobKind.MEASURE, JobKind.CHECK),
    Health.UNKNOWN: (JobKind.MEASURE, JobKind.CHECK),
    Health.BAD: (JobKind.CHECK,),
    Health.MAINTENANCE: (),
    Health.RETIRED: (),
}


def _has_work() -> ColumnElement[bool]:
    """Whether `jobs.claim` would find a job for a device."""
    of_device = (job_table.c.device == device_table.c.id) & (job_table.c.state == JobState.QUEUED)
    by_health = or_(
        *((device_table.c.health == health) & job_table.c.kind.in_(kinds) for health, kinds in _KINDS.items() if kinds)
    )
    due = job_table.c.not_before <= bindparam("now")
    return device_table.c.state.in_(TAKES_JOBS) & exists().where(of_device, by_health, due)


def _first() -> Select[Any]:
    """Of the highest priority that there is, the oldest; one look each into the index, however long the queue."""

    def ready(job: FromClause) -> ColumnElement[bool]:
        queued = (job.c.device == bindparam("device")) & (job.c.state == JobState.QUEUED)
        return queued & job.c.kind.in_(bindparam("kinds", expanding=True)) & (job.c.not_before <= bindparam("now"))

    other = job_table.alias()
    highest = select(other.c.priority).where(ready(other)).order_by(other.c.priority.desc()).limit(1).scalar_subquery()
    first = ready(job_table) & (job_table.c.priority == highest)
    return select(job_table).where(first).order_by(job_table.c.created, job_table.c.id).limit(1)


# Made once: they are asked at every poll, and to make them costs more than to ask.
_WITH_WORK = select(device_table.c.id).where(device_table.c.id.in_(bindparam("among", expanding=True)), _has_work())
_NEXT = _first().with_for_update(key_share=True, skip_locked=True)
_QUIET = select(device_table.c.id).where(
    device_table.c.id == bindparam("device"),
    device_table.c.agent == bindparam("agent"),
    device_table.c.state == DeviceState.IDLE,
    device_table.c.lease_until.is_(None),
    device_table.c.last_seen > bindparam("heard_since"),
    ~_has_work(),
)


def with_work(store: Store, among: Collection[str]) -> frozenset[str]:
    """Those of the devices `among` for which `jobs.claim` would find a job."""
    with store.read() as connection:
        return frozenset(connection.scalars(_WITH_WORK, {"among": list(among), "now": store.now()}))


def quiet(store: Store, device: str, agent: str, *, heard_within_s: float) -> bool:
    """Whether a device of `agent` is idle, was heard from lately, and has nothing to do: a claim changes nothing."""
    now = store.now()
    with store.read() as connection:
        of = {"device": device, "agent": agent, "heard_since": now - heard_within_s, "now": now}
        return connection.scalar(_QUIET, of) is not None


def next_job(connection: Connection, device: DeviceRow, now: float) -> Row[Any] | None:
    """The job that the device should do next, held; one that somebody else holds is left out."""
    return connection.execute(_NEXT, {"device": device.id, "kinds": _KINDS[device.health], "now": now}).first()
