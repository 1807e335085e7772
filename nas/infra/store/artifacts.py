"""Artifacts: files named by the SHA-256 of their content, under `ab/cdef...` in the store's folder.

A file appears under its name as a whole or not at all. Where row and file disagree after a crash, the file counts: a
row without a file is repaired by the next `put_file`, a file without a row is deleted by `collect`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Row, delete, exists, func, select, update

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store import agents, jobs
from nas.infra.store.engine import insert_if_absent, lock_tables
from nas.infra.store.models import artifact, artifact_pin
from nas.infra.store.rows import StoredFile
from nas.infra.store.store import Store, retried

INCOMING = "incoming"
"""Folder next to the artifacts where files are written before they are renamed."""

ABANDONED_S = 3600.0
"""Age after which a temporary file, or a file without a row, is taken for the leftover of a killed process."""

_CHUNK = 1 << 20
_TOUCH_S = 60.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


def put_file(store: Store, source: Path) -> StoredFile:
    """Copies a file into the store; content that is stored already is only read.

    Raises:
        InvalidInput: `source` cannot be read.
        InfrastructureFailed: the disk is full, or the store's folder cannot be written.
    """
    try:
        stream = source.open("rb")
    except OSError as error:
        raise InvalidInput(f"cannot read {source}: {error.strerror}") from error
    with stream:
        return _put(store, stream)


def get(store: Store, sha256: str) -> StoredFile | None:
    """Returns an artifact's row; None where there is none."""
    with store.read() as connection:
        row = connection.execute(_select().where(artifact.c.sha256 == sha256)).first()
        return _artifact(row) if row else None


def path(store: Store, sha256: str) -> Path:
    """Returns the path of an artifact's file, always inside the store's folder; updates its last use.

    Raises:
        InvalidInput: not a SHA-256.
        InfrastructureFailed: the store does not have the file.
    """
    file = _place(store, sha256)
    try:
        regular = stat.S_ISREG(file.lstat().st_mode)
    except FileNotFoundError:
        regular = False
    if not regular:
        raise InfrastructureFailed(f"artifact {sha256[:12]} is not in the store; it was collected or never put there")
    used, now = artifact.c.last_used, store.now()
    with store.read() as connection:
        fresh = connection.scalar(select(used > now - _TOUCH_S).where(artifact.c.sha256 == sha256))
    if not fresh:
        with contextlib.suppress(InfrastructureFailed), store.write() as connection:  # a file can be read regardless
            connection.execute(update(artifact).where(artifact.c.sha256 == sha256).values(last_used=now))
    return file


def verify(store: Store, sha256: str) -> Path:
    """Returns `path` after checking the content against its name; a damaged file is deleted.

    Raises:
        InfrastructureFailed: the file is missing or damaged, or the disk does not read it.
    """
    file = path(store, sha256)
    try:
        content = sha256_of(file)
    except OSError as error:  # a collection may have removed it just now
        raise InfrastructureFailed(f"artifact {sha256[:12]} cannot be read: {error.strerror}") from error
    if content != sha256:
        file.unlink(missing_ok=True)
        raise InfrastructureFailed(f"artifact {sha256[:12]} was damaged on disk and has been removed")
    return file


def intact(store: Store, sha256: str) -> bool:
    """Returns whether the store has an artifact's file with the right content; a damaged file is removed."""
    try:
        verify(store, sha256)
    except InfrastructureFailed:
        return False
    return True


@retried
def pin(store: Store, sha256: str, owner: str) -> None:
    """Protects an artifact from garbage collection until `owner` (see `study_owner`) releases it."""
    with store.write() as connection:
        if get(store, sha256) is None:
            raise InfrastructureFailed(f"artifact {sha256[:12]} is not in the store any more, so it cannot be pinned")
        insert_if_absent(connection, artifact_pin, sha256=sha256, owner=owner)


def study_owner(study: int) -> str:
    """Returns the owner name of a study's pins, which are deleted with the study."""
    return f"study:{study}"


@retried
def pin_only(store: Store, owner: str, sha256s: Iterable[str]) -> None:
    """Replaces all pins of `owner` by `sha256s`, such as those of a study's present front."""
    with store.write() as connection:
        connection.execute(delete(artifact_pin).where(artifact_pin.c.owner == owner))
        for sha256 in sorted(set(sha256s)):
            pin(store, sha256, owner)


def all(store: Store) -> list[StoredFile]:
    """Returns every artifact, least recently used first."""
    return [_artifact(row) for row in store.rows(_select().order_by(artifact.c.last_used, artifact.c.sha256))]


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a garbage collection. `kept_bytes` may exceed the limit by the files that must stay."""

    files: int
    freed_bytes: int
    kept_bytes: int


def total_bytes(store: Store) -> int:
    """Returns the size of all artifacts."""
    with store.read() as connection:
        return int(connection.scalar(select(func.coalesce(func.sum(artifact.c.size), 0))) or 0)


@retried
def collect(store: Store, limit_bytes: int) -> Collected:
    """Deletes artifacts, least recently used first, until they take at most `limit_bytes`; and leftover files.

    Pinned artifacts and the files of unfinished jobs stay, whatever the limit. Leftover files are those of killed
    processes.

    Raises:
        InfrastructureFailed: a file cannot be removed.
    """
    assert limit_bytes >= 0, limit_bytes
    with store.write() as connection:
        lock_tables(connection, artifact, artifact_pin)
        stored = all(store)
        victims = _victims(stored, limit_bytes, {sha256 for job in jobs.live(store) for sha256 in job.payload.files})
        for victim in victims:
            connection.execute(delete(artifact).where(artifact.c.sha256 == victim.sha256))
        leftovers = _leftovers(store, set(connection.scalars(select(artifact.c.sha256))))
        files = {**{_place(store, victim.sha256): victim.size for victim in victims}, **leftovers}
        # Nobody can write meanwhile: to remove a large file takes long, to rename it does not.
        aside = [_set_aside(store, file) for file in files]
    for file in aside:
        _remove(file)
    total = sum(one.size for one in stored)
    return Collected(len(files), sum(files.values()), total - sum(victim.size for victim in victims))


def _put(store: Store, stream: BinaryIO) -> StoredFile:
    with _written(store, stream) as (partial, sha256, size):
        target = _place(store, sha256)
        with store.write() as connection:
            # The row first: its lock serialises this with a collection of the same artifact.
            row = {"size": size, "created": store.now(), "last_used": store.now()}
            if not insert_if_absent(connection, artifact, sha256=sha256, **row):
                connection.execute(update(artifact).where(artifact.c.sha256 == sha256).values(last_used=store.now()))
            with _disk_errors(target):
                target.parent.mkdir(exist_ok=True)
                partial.replace(target)
                _sync_folder(target.parent)
        stored = get(store, sha256)
    assert stored is not None
    return stored


@contextmanager
def _written(store: Store, stream: BinaryIO) -> Iterator[tuple[Path, str, int]]:
    """Writes a synced copy of `stream` under a temporary name, deleted unless renamed; yields path, hash and size."""
    folder = store.artifacts / INCOMING
    partial: Path | None = None
    try:
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as target:
                partial = Path(target.name)
                digest = hashlib.sha256()
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
                target.flush()
                os.fsync(target.fileno())
                size = target.tell()
        yield partial, digest.hexdigest(), size
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


@contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InfrastructureFailed(f"the disk is full at {where}; free some with 'nas gc'") from error
        raise InfrastructureFailed(f"cannot write {where}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place(store: Store, sha256: str) -> Path:
    if not _SHA256.fullmatch(sha256):
        raise InvalidInput(f"{sha256!r} is no SHA-256; expected 64 digits 0-9a-f")
    return store.artifacts / sha256[:2] / sha256[2:]


def _victims(stored: list[StoredFile], limit_bytes: int, needed: set[str]) -> list[StoredFile]:
    """Returns the artifacts of `stored`, which is sorted by last use, to delete."""
    excess = sum(one.size for one in stored) - limit_bytes
    victims = []
    for one in stored:
        if excess <= 0:
            break
        if not one.pinned and one.sha256 not in needed:
            victims.append(one)
            excess -= one.size
    return victims


def _leftovers(store: Store, hashes: set[str]) -> dict[Path, int]:
    """Returns the files of killed processes, with their sizes: those that no artifact of this database has.

    In a home with several databases such a file may be an artifact of another one.
    """
    sizes = {}
    for file in store.artifacts.glob(f"{INCOMING}/*" if agents.shares_home(store) else "*/*"):
        if file.parent.name + file.name in hashes:
            continue
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue  # a writer has just renamed it
        if status.st_mtime < store.now() - ABANDONED_S and not stat.S_ISDIR(status.st_mode):  # snapshots of a volume
            sizes[file] = status.st_size
    return sizes


def _set_aside(store: Store, file: Path) -> Path:
    """Moves a file to those that are no artifacts, if it is there, and returns where it can be removed from."""
    folder = store.artifacts / INCOMING
    if file.parent == folder:
        return file
    aside = folder / f"{file.parent.name}{file.name}"
    try:
        folder.mkdir(exist_ok=True)
        file.rename(aside)
    except FileNotFoundError:
        pass
    except OSError:  # such as of a disk on which no name can be added
        _remove(file)
    return aside


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InfrastructureFailed(f"cannot remove {file}: {error.strerror}") from error


def _select() -> Any:
    pinned = exists().where(artifact_pin.c.sha256 == artifact.c.sha256)
    return select(artifact, pinned.label("pinned"))


def _artifact(row: Row[Any]) -> StoredFile:
    return StoredFile(row.sha256, row.size, row.created, row.last_used, bool(row.pinned))
