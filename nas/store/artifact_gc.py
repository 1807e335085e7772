"""Collecting artifacts: the least recently used go first, until the rest fits a limit.

Pinned artifacts and the files of unfinished jobs stay, whatever the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, select

from nas.core.errors import InfrastructureFailed
from nas.store import artifacts, jobs
from nas.store.engine import lock_tables
from nas.store.models import artifact, artifact_pin
from nas.store.rows import Artifact
from nas.store.store import Store, retried

ABANDONED_S = 3600.0
"""Age after which a temporary file, or a file that no row knows, is what a killed process left behind."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did. `kept_bytes` may exceed the limit by what must stay."""

    files: int
    freed_bytes: int
    kept_bytes: int


@retried
def collect(store: Store, limit_bytes: int) -> Collected:
    """Removes artifacts until they take at most `limit_bytes`, and what killed processes left behind.

    Raises:
        InfrastructureFailed: a file cannot be removed.
    """
    assert limit_bytes >= 0, limit_bytes
    with store.write() as connection:
        lock_tables(connection, artifact, artifact_pin)
        known = artifacts.all(store)
        victims = _victims(
            known, limit_bytes, {sha256 for job in jobs.live(store) for sha256 in jobs.files(job.payload)}
        )
        for victim in victims:
            connection.execute(delete(artifact).where(artifact.c.sha256 == victim.sha256))
            _remove(store.artifacts / victim.sha256[:2] / victim.sha256[2:])
        swept = _sweep(store, set(connection.scalars(select(artifact.c.sha256))))
    freed = sum(victim.size for victim in victims)
    total = sum(one.size for one in known)
    return Collected(len(victims) + len(swept), freed + sum(swept), total - freed)


def _victims(known: list[Artifact], limit_bytes: int, needed: set[str]) -> list[Artifact]:
    """The artifacts to remove of `known`, which is sorted by last use."""
    excess = sum(one.size for one in known) - limit_bytes
    victims = []
    for one in known:
        if excess <= 0:
            break
        if not one.pinned and one.sha256 not in needed:
            victims.append(one)
            excess -= one.size
    return victims


def _sweep(store: Store, known: set[str]) -> list[int]:
    """Removes abandoned files and gives their sizes."""
    sizes = []
    for file in store.artifacts.glob("*/*"):
        if file.parent.name + file.name in known:
            continue
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue  # a writer has just given it its name
        if status.st_mtime < store.now() - ABANDONED_S:
            _remove(file)
            sizes.append(status.st_size)
    return sizes


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InfrastructureFailed(f"cannot remove {file}: {error.strerror}") from error
