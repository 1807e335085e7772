"""Study leases: one orchestrator per study.

The epoch fences: it grows with every new holder, and every write that carries an older one is refused. A lease that
expired stays good for its holder until somebody else takes it.

Who takes a lease holds the row of the study, and so does who writes under one (`lock_study`).
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import replace

from sqlalchemy import Connection, select, update

from nas.core.errors import StudyBusy, UnknownName
from nas.store.models import study as study_table
from nas.store.models import study_lease
from nas.store.rows import StudyLease
from nas.store.store import Store, retried

LEASE_S = 30.0
"""Seconds a study lease lasts unless renewed; renew three times as often."""


def new_holder() -> str:
    """A name for this process as a holder, unique over hosts and restarts."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@retried
def acquire(store: Store, study: int, holder: str, ttl_s: float = LEASE_S) -> StudyLease:
    """The lease of `study` under a new epoch.

    Raises:
        StudyBusy: a live lease exists; the message names its holder and when it ends.
        UnknownName: no such study.
    """
    with store.write() as connection:
        lock_study(connection, study)
        now = store.now()
        # Held, so that it is not renewed meanwhile.
        old = _current(connection, study, held=True)
        if old is not None and old.expires > now:
            raise StudyBusy(
                f"study {study} is run by {old.holder}; its lease ends in {old.expires - now:.0f} s unless renewed"
            )
        lease = StudyLease(study, holder, old.epoch + 1 if old else 1, now + ttl_s)
        values = {"holder": holder, "epoch": lease.epoch, "expires": lease.expires}
        if old is None:
            connection.execute(study_lease.insert().values(study=study, **values))
        else:
            connection.execute(update(study_lease).where(study_lease.c.study == study).values(**values))
        return lease


@retried
def renew(store: Store, lease: StudyLease, ttl_s: float = LEASE_S) -> StudyLease:
    """The same lease with a later end.

    Raises:
        StudyBusy: somebody else has taken the study.
    """
    renewed = replace(lease, expires=store.now() + ttl_s)
    of_study = (study_lease.c.study == lease.study) & (study_lease.c.epoch == lease.epoch)
    ours = of_study & (study_lease.c.holder == lease.holder)
    with store.write() as connection:
        if connection.execute(update(study_lease).where(ours).values(expires=renewed.expires)).rowcount != 1:
            fence(connection, lease.study, lease)
        return renewed


@retried
def release(store: Store, lease: StudyLease) -> None:
    """Frees the study for the next holder; nothing happens where the lease was lost already."""
    with store.write() as connection:
        connection.execute(
            update(study_lease)
            .where(study_lease.c.study == lease.study, study_lease.c.epoch == lease.epoch)
            .values(expires=store.now())
        )


def current(store: Store, study: int) -> StudyLease | None:
    """The lease as it stands, live or not; None where nobody ever ran the study."""
    with store.read() as connection:
        return _current(connection, study)


def check(store: Store, lease: StudyLease) -> None:
    """Raises `StudyBusy` where the lease was lost."""
    with store.read() as connection:
        fence(connection, lease.study, lease)


def lock_study(connection: Connection, study: int, lease: StudyLease | None = None) -> None:
    """Makes this transaction the only one that leases the study or adds to it, so that ids become visible in order.

    Raises:
        StudyBusy: `lease` was lost.
        UnknownName: no such study, and no lease.
    """
    held = select(study_table.c.id).where(study_table.c.id == study).with_for_update(key_share=True)
    found = connection.scalar(held) is not None
    fence(connection, study, lease)
    if not found:
        raise UnknownName("study", str(study), map(str, connection.scalars(select(study_table.c.id))))


def fence(connection: Connection, study: int, lease: StudyLease | None) -> None:
    """Refuses what is done to `study` under a lease that was lost; None is not fenced.

    Raises:
        StudyBusy: the lease was lost.
    """
    if lease is None:
        return
    assert lease.study == study, f"lease of study {lease.study} used for study {study}"
    row = _current(connection, study)
    if row is None or (row.epoch, row.holder) != (lease.epoch, lease.holder):
        holder = f"is run by {row.holder} now" if row else "was deleted"
        raise StudyBusy(f"study {study} {holder}; this process lost its lease (epoch {lease.epoch})")


def _current(connection: Connection, study: int, *, held: bool = False) -> StudyLease | None:
    query = select(study_lease).where(study_lease.c.study == study)
    row = connection.execute(query.with_for_update(key_share=True) if held else query).first()
    return StudyLease(**row._mapping) if row else None
