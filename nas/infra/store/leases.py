"""Study leases: one orchestrator per study.

The epoch is a fencing number: it increases with every new holder, and writes under an older one are refused. An expired
lease stays valid for its holder until another one takes it.

Taking a lease locks the row of the study, and so does every write under one (`lock_study`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection, bindparam, select, update

from nas.core.errors import StudyBusy, UnknownName
from nas.infra.store.models import study as study_table
from nas.infra.store.models import study_lease
from nas.infra.store.rows import StudyLease
from nas.infra.store.store import Store, retried

LEASE_S = 30.0
"""Seconds a study lease lasts unless renewed; renew three times as often."""

_END_STATES = ("Z", "X")
_CURRENT = select(study_lease).where(study_lease.c.study == bindparam("of"))
_LOCKED = select(study_table.c.id).where(study_table.c.id == bindparam("of")).with_for_update(key_share=True)


def new_holder(pid: int | None = None) -> str:
    """Returns a name for a running process of this machine, by default this one, unique over hosts and restarts.

    Two machines may have the same host name, and two containers the same kernel. So the name holds a hash of the
    kernel's boot id and the namespace of process ids, and when the process started.
    """
    pid = os.getpid() if pid is None else pid
    _, started = _process(pid)
    return f"{socket.gethostname()}:{pid}:{_process_ids()}-{started}-{secrets.token_hex(4)}"


def has_died(holder: str) -> bool:
    """Returns whether a holder was a process of this machine that does not run any more; False if that is unknown."""
    _, pid, token = holder.rsplit(":", 2)
    process_ids, *rest = token.split("-")
    if len(rest) != 2 or process_ids != _process_ids():
        return False
    try:
        state, started = _process(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    # A zombie has ended; another start time is that of a younger process with the same number.
    return state in _END_STATES or started != rest[0]


def _process_ids() -> str:
    """Returns a name of the set of processes that this one belongs to: one boot of one kernel, one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8", errors="replace").strip()
    return hashlib.sha256(f"{boot} {Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:12]


def _process(pid: int) -> tuple[str, str]:
    """Returns the state of a process, one letter, and its start in ticks since the boot."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


@retried
def acquire(store: Store, study: int, holder: str) -> StudyLease:
    """Takes the lease of `study` under a new epoch.

    Raises:
        StudyBusy: a live lease exists; the message names its holder and when it ends.
        UnknownName: no such study.
    """
    with store.write() as connection:
        lock_study(connection, study)
        now = store.now()
        # Locked, so that it is not renewed meanwhile.
        old = _current(connection, study, lock=True)
        if old is not None and old.expires > now:
            raise StudyBusy(
                f"study {study_name(connection, study)} is run by {old.holder}; its lease ends in "
                f"{old.expires - now:.0f} s unless renewed"
            )
        lease = StudyLease(study, holder, old.epoch + 1 if old else 1, now + LEASE_S)
        values = {"holder": holder, "epoch": lease.epoch, "expires": lease.expires}
        if old is None:
            connection.execute(study_lease.insert().values(study=study, **values))
        else:
            connection.execute(update(study_lease).where(study_lease.c.study == study).values(**values))
        return lease


@retried
def renew(store: Store, lease: StudyLease) -> StudyLease:
    """Extends a lease.

    Raises:
        StudyBusy: another process has taken the study.
    """
    of_study = (study_lease.c.study == lease.study) & (study_lease.c.epoch == lease.epoch)
    of_holder = of_study & (study_lease.c.holder == lease.holder)
    with store.write() as connection:
        renewed = replace(lease, expires=store.now() + LEASE_S)
        if connection.execute(update(study_lease).where(of_holder).values(expires=renewed.expires)).rowcount != 1:
            fence(connection, lease.study, lease)
        return renewed


@retried
def release(store: Store, lease: StudyLease) -> None:
    """Releases the study for the next holder; does nothing where the lease was lost already."""
    with store.write() as connection:
        connection.execute(
            update(study_lease)
            .where(study_lease.c.study == lease.study, study_lease.c.epoch == lease.epoch)
            .values(expires=store.now())
        )


def current(store: Store, study: int) -> StudyLease | None:
    """Returns the present lease, expired or not; None where the study was never run."""
    with store.read() as connection:
        return _current(connection, study)


def holder(store: Store, study: int) -> str | None:
    """Returns who holds a study now; None: nobody."""
    lease = current(store, study)
    return lease.holder if lease is not None and lease.expires > store.now() else None


def expired(connection: Connection, studies: Sequence[int], now: float) -> dict[int, float]:
    """Returns study -> when its lease ended, of those among `studies` that were run and nobody holds."""
    columns = study_lease.c.study, study_lease.c.expires
    query = select(*columns).where(study_lease.c.study.in_(studies), study_lease.c.expires <= now)
    return {study: expires for study, expires in connection.execute(query)}


def lock_study(connection: Connection, study: int, lease: StudyLease | None = None) -> None:
    """Locks the study against other leases and additions, so that ids become visible in order."""
    locked = connection.scalar(_LOCKED, {"of": study}) is not None
    fence(connection, study, lease)
    if not locked:
        raise UnknownName("study", str(study), map(str, connection.scalars(select(study_table.c.id))))


def fence(connection: Connection, study: int, lease: StudyLease | None) -> None:
    """Checks that `lease`, if given, is still the lease of `study`.

    Raises:
        StudyBusy: the lease was lost.
    """
    if lease is None:
        return
    assert lease.study == study, f"lease of study {lease.study} used for study {study}"
    row = _current(connection, study)
    if row is None or (row.epoch, row.holder) != (lease.epoch, lease.holder):
        holder = f"is run by {row.holder} now" if row else "was deleted"
        name = study_name(connection, study)
        raise StudyBusy(f"study {name} {holder}; this process lost its lease (epoch {lease.epoch})")


def study_name(connection: Connection, study: int) -> str:
    """Returns the name of a study, for messages."""
    name = connection.scalar(select(study_table.c.name).where(study_table.c.id == study))
    return str(name or study)


def _current(connection: Connection, study: int, *, lock: bool = False) -> StudyLease | None:
    query = _CURRENT.with_for_update(key_share=True) if lock else _CURRENT
    row = connection.execute(query, {"of": study}).first()
    return StudyLease(**row._mapping) if row else None
