"""A database and the folder of artifacts beside it, shared by the threads of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InfrastructureFailed
from nas.core.paths import home
from nas.store import migrate
from nas.store.engine import WRITE_DEADLINE_S, database_url, make_engine, translated, writing


class Store:
    """Transactions on one database.

    Args:
        engine: of a database whose schema is current; `Store.open` makes one.
        clock: gives every time that is stored or compared.
        artifacts: folder of content-addressed files.
    """

    def __init__(self, engine: Engine, clock: Clock, artifacts: Path) -> None:
        self.engine = engine
        self.clock = clock
        self.artifacts = artifacts
        self._local = threading.local()
        # SQLite has one write lock and waits for it by polling; threads queue for their turn instead.
        self._turn = threading.Lock()

    @staticmethod
    def open(
        url: str | None = None, *, clock: Clock | None = None, artifacts: Path | None = None, create: bool = True
    ) -> Store:
        """Opens a database, by default `$NAS_HOME/hilnas.db`, and builds its tables where there are none.

        Args:
            url: SQLAlchemy URL, or None.
            clock: defaults to the machine's.
            artifacts: defaults to `$NAS_HOME/artifacts`.
            create: whether a missing database is made.

        Raises:
            InvalidInput: no such database, not one of ours, one of a newer hilnas, or an older one that holds studies
                (`nas db upgrade` brings it up to date).
            InfrastructureFailed: it cannot be reached, stayed locked, or the disk is full.
        """
        engine = make_engine(database_url(url), create=create)
        clock = clock or SystemClock()
        try:
            migrate.ensure_current(engine, clock, create=create)
        except BaseException:
            engine.dispose()
            raise
        return Store(engine, clock, artifacts or home() / "artifacts")

    def now(self) -> float:
        """Seconds since the epoch, by the store's clock."""
        return self.clock.now()

    def close(self) -> None:
        """Closes the pooled connections; the store can be used again afterwards."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view; inside `write`, that transaction's.

        Raises:
            InfrastructureFailed: the database cannot be reached.
        """
        if (outer := self._outer()) is not None:
            yield outer
            return
        with translated(self.engine.url), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One atomic change: committed at the end, undone by an exception.

        Inside another `write` of the same thread it is a part of that one (undone alone by an exception that the
        outer one catches). So several calls of this package become one transaction inside `with store.write():`.

        Raises:
            InfrastructureFailed: the write lock was not free in time, the disk is full, or the server is gone.
        """
        if (outer := self._outer()) is not None:
            with outer.begin_nested():
                yield outer
            return
        if not self._turn.acquire(timeout=WRITE_DEADLINE_S):
            raise InfrastructureFailed(f"another thread has been writing to the database for {WRITE_DEADLINE_S:.0f} s")
        try:
            with writing(self.engine, self.clock) as connection:
                self._local.connection = connection
                yield connection
        finally:
            self._local.connection = None
            self._turn.release()

    def _outer(self) -> Connection | None:
        return getattr(self._local, "connection", None)
