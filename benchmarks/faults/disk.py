"""The disk of the coordinator's home and database: an ext4 file system in a file, which can be filled and emptied."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
from device_lab import within

from nas.infra.store.engine import sqlite_file
from nas.infra.store.store import Store
from tests.support.postgres import CARELESS, Server, server

DISK_MB = 512
_SMALLEST = 4096
_FILLER = "filler"
_DETACHED_S = 30.0
_REVIVED_S = 60.0


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[None]:
    """Mounts a file as a disk while the context is open; makes the file system if there is none.

    The disk is that of the mount namespace, so it is also unmounted when all processes of the campaign are killed.
    """
    if not image.exists():
        new = image.with_suffix(".new")
        with new.open("wb") as file:
            file.truncate(DISK_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(new)], check=True)
        new.rename(image)
    # A disk that is mounted twice is damaged: that of a killed campaign must be gone.
    assert within(_DETACHED_S, lambda: not _attached(image)), f"{image} is still mounted elsewhere"
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _attached(image: Path) -> bool:
    loop_devices = subprocess.run(["losetup", "--associated", str(image)], check=True, capture_output=True, text=True)
    return bool(loop_devices.stdout.strip())


class Disk:
    """The mounted disk.

    Args:
        folder: where it is mounted.
        before: is done before the disk is filled, so that the database needs room for its next change.
        after: is done after that, for the same reason.
        revive: starts the database's server again if it ended, as a service manager does.
    """

    def __init__(
        self,
        folder: Path,
        before: Callable[[Store], None] = lambda store: None,
        after: Callable[[], None] = lambda: None,
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        self._filler = folder / _FILLER
        self._before, self._after, self._revive = before, after, revive

    @contextlib.contextmanager
    def full(self, store: Store) -> Iterator[Callable[[], None]]:
        """Fills the disk while the context is open; yields what fills it again where files were removed."""
        self._before(store)
        with self._filler.open("wb") as filler:
            try:
                _fill(filler.fileno())
                self._after()
                yield lambda: _fill(filler.fileno())
            finally:
                self._filler.unlink()
        self._revive()


def _fill(file: int) -> None:
    """Makes a file larger until nothing fits on its disk any more."""
    size = DISK_MB << 20
    while size >= _SMALLEST:
        try:
            os.posix_fallocate(file, os.fstat(file).st_size, size)
        except OSError:
            size //= 2


@contextlib.contextmanager
def database(home: Path, kind: str) -> Iterator[tuple[str, Disk]]:
    """Yields the URL of the coordinator's database and the disk it is on; a server runs while the context is open."""
    (home / _FILLER).unlink(missing_ok=True)  # of a campaign that was killed
    if kind == "sqlite":
        yield f"sqlite:///{home / 'hilnas.db'}", Disk(home, before=_empty_log)
        return
    new = not (home / "postgres" / "data").exists()
    with server(CARELESS | {"wal_recycle": "off"}, home / "postgres") as running:
        disk = Disk(home, after=lambda: _switch_log(running), revive=lambda: _revive(running))
        yield running.create("farm") if new else running.url("farm"), disk


def _empty_log(store: Store) -> None:
    """Cuts SQLite's write-ahead log: the next transaction needs room for it."""
    assert sqlite_file(store.engine.url), store.engine.url
    connection = store.engine.raw_connection()
    try:
        connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def _switch_log(running: Server) -> None:
    """Ends the segment of PostgreSQL's write-ahead log: the next one has no room, and without it the server ends."""
    with contextlib.suppress(psycopg.OperationalError), running.connect() as connection:
        connection.execute("SELECT pg_switch_wal()")


def _revive(running: Server) -> None:
    def serves() -> bool:
        if not running.alive:
            running.start()
        with contextlib.suppress(psycopg.OperationalError), running.connect():
            return True
        return False

    assert within(_REVIVED_S, serves), running.log()[-2000:]
