"""What happened to a device: what people ask when it is bad. Bounded, oldest goes first."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, select

from nas.store.models import device_event
from nas.store.rows import DeviceEventKind

KEEP = 100
"""Events kept of one device and kind."""

_LONGEST_REASON = 1000


def record(
    connection: Connection,
    device: str,
    at: float,
    kind: DeviceEventKind,
    what: str,
    reason: str | None = None,
    job: str | None = None,
) -> None:
    """Notes that something happened to a device."""
    columns = device_event.c
    told = reason[:_LONGEST_REASON] if reason else None
    connection.execute(device_event.insert().values(device=device, at=at, kind=kind, what=what, reason=told, job=job))
    alike = (columns.device == device) & (columns.kind == kind)
    oldest_kept = select(columns.id).where(alike).order_by(columns.id.desc()).offset(KEEP - 1).limit(1)
    connection.execute(delete(device_event).where(alike, columns.id < oldest_kept.scalar_subquery()))


def failed_jobs(connection: Connection, device: str, since: float) -> int:
    """How many different jobs failed on a device since then."""
    columns = device_event.c
    failures = (columns.device == device) & (columns.kind == DeviceEventKind.FAILURE) & (columns.at >= since)
    return connection.scalar(select(func.count(columns.job.distinct())).where(failures)) or 0
