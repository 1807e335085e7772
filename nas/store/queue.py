"""Which job a device does next: of the kinds that its health allows, by priority, then by age."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, FromClause, Select, bindparam, exists, or_, select

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


def with_work(store: Store) -> frozenset[str]:
    """Devices for which `jobs.claim` would find a job."""
    of_device = (job_table.c.device == device_table.c.id) & (job_table.c.state == JobState.QUEUED)
    by_health = or_(
        *((device_table.c.health == health) & job_table.c.kind.in_(kinds) for health, kinds in _KINDS.items() if kinds)
    )
    work = exists().where(of_device, by_health, job_table.c.not_before <= store.now())
    with store.read() as connection:
        return frozenset(
            connection.scalars(select(device_table.c.id).where(device_table.c.state.in_(TAKES_JOBS), work))
        )


def _first() -> Select[str]:
    """Of the highest priority that there is, the oldest; one look each into the index, however long the queue."""

    def ready(job: FromClause) -> ColumnElement[bool]:
        queued = (job.c.device == bindparam("device")) & (job.c.state == JobState.QUEUED)
        return queued & job.c.kind.in_(bindparam("kinds", expanding=True)) & (job.c.not_before <= bindparam("now"))

    other = job_table.alias()
    highest = select(other.c.priority).where(ready(other)).order_by(other.c.priority.desc()).limit(1).scalar_subquery()
    first = ready(job_table) & (job_table.c.priority == highest)
    return select(job_table.c.id).where(first).order_by(job_table.c.created, job_table.c.id).limit(1)


# Made once: they are asked at every poll, and to make them costs more than to ask.
_NEXT = _first()
_NEXT_HELD = _NEXT.with_for_update(key_share=True, skip_locked=True)


def next_job(connection: Connection, device: DeviceRow, now: float, *, held: bool = False) -> str | None:
    """The id of the job that the device should do next; to hold one leaves out those that others hold."""
    wanted = {"device": device.id, "kinds": _KINDS[device.health], "now": now}
    return connection.scalar(_NEXT_HELD if held else _NEXT, wanted)
