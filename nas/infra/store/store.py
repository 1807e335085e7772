"""The store: a database and its folder of artifacts, shared by the threads of a process."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, Select

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InfrastructureFailed
from nas.core.paths import home
from nas.infra.store import migrate
from nas.infra.store.engine import (
    WRITE_DEADLINE_S,
    Conflict,
    ServerClock,
    database_url,
    make_engine,
    snapshots,
    sqlite_file,
    translated,
    writing,
)

_TRIES = 8
_FIRST_PAUSE_S = 0.01

P = ParamSpec("P")
R = TypeVar("R")


class Store:
    """Transactions on one database.

    Args:
        engine: of a database whose schema is current; `Store.open` makes one.
        clock: of every time that is stored or compared.
        artifacts: folder of content-addressed files.
    """

    def __init__(self, engine: Engine, clock: Clock, artifacts: Path) -> None:
        self.engine = engine
        self.clock = clock
        self.artifacts = artifacts
        self._local = threading.local()
        self._snapshots = snapshots(engine)
        # SQLite waits for its write lock by polling, so threads of this process queue at a lock of ours first.
        self._turn = threading.Lock() if sqlite_file(engine.url) else None

    @staticmethod
    def open(
        url: str | None = None, *, clock: Clock | None = None, artifacts: Path | None = None, create: bool = True
    ) -> Store:
        """Opens a database, by default `$NAS_HOME/hilnas.db`, and builds its tables if it is new.

        Args:
            url: SQLAlchemy URL, or None.
            clock: defaults to the machine's; of a PostgreSQL database, to its server's, which its hosts share.
            artifacts: defaults to `$NAS_HOME/artifacts`.
            create: whether a missing database is created.

        Raises:
            InvalidInput: no such database, not one of hilnas, one of a newer hilnas, or an older one that has studies
                (`nas db upgrade` upgrades it).
            InfrastructureFailed: it cannot be reached, stayed locked, or the disk is full.
        """
        engine = make_engine(database_url(url), create=create)
        clock = clock or (SystemClock() if sqlite_file(engine.url) else ServerClock(SystemClock()))
        store = Store(engine, clock, artifacts or home() / "artifacts")
        try:
            migrate.ensure_current(engine, clock, create=create)
            with store.read():
                pass  # asks for the server's time
        except BaseException:
            engine.dispose()
            raise
        return store

    def now(self) -> float:
        """Returns seconds since the epoch, by the store's clock."""
        return self.clock.now()

    def _follow(self, connection: Connection) -> None:
        if isinstance(self.clock, ServerClock):
            self.clock.follow(connection)

    def close(self) -> None:
        """Closes the pooled connections; the store can be used again afterwards."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Opens a reading transaction, a snapshot; inside `write`, it is part of that transaction.

        Raises:
            InfrastructureFailed: the database cannot be reached.
        """
        if (outer := self._outer()) is not None:
            yield outer
            return
        with translated(self.engine.url), self._snapshots.connect() as connection, connection.begin():
            self._follow(connection)
            yield connection

    def rows(self, query: Select[Any]) -> Sequence[Any]:
        """Returns the rows of a query that is a reading transaction by itself, or part of an outer one."""
        with self.read() as connection:
            return connection.execute(query).all()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Opens a writing transaction, which is committed at the end and rolled back by an exception.

        Inside another `write` of the same thread it is a savepoint of that transaction. So several calls of this
        package become one transaction inside `with store.write():`.

        Raises:
            InfrastructureFailed: a lock was not free in time, the disk is full, or the server is gone.
            Conflict: the database rolled it back in favour of another one (`retried`).
        """
        if (outer := self._outer()) is not None:
            with outer.begin_nested():
                yield outer
            return
        with self._own_turn(), writing(self.engine, self.clock) as connection:
            self._follow(connection)
            self._local.connection = connection
            try:
                yield connection
            finally:
                self._local.connection = None

    def _outer(self) -> Connection | None:
        return getattr(self._local, "connection", None)

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        if self._turn is None:
            yield
            return
        if not self._turn.acquire(timeout=WRITE_DEADLINE_S):
            raise InfrastructureFailed(f"another thread has been writing to the database for {WRITE_DEADLINE_S:.0f} s")
        try:
            yield
        finally:
            self._turn.release()


def retried(function: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Retries a function that is one transaction when the database rolled it back in favour of another one.

    Inside a transaction of its caller no conflict appears: the outer one is rolled back as a whole.
    """

    @functools.wraps(function)
    def call(store: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        failures = 0
        while True:
            try:
                return function(store, *args, **kwargs)
            except Conflict:
                failures += 1
                if failures == _TRIES:
                    raise
            # Jitter: transactions that collided do not collide again.
            store.clock.sleep(_FIRST_PAUSE_S * 2**failures * random.random())

    return call
