"""Runs tests of the store again on PostgreSQL: each file imports those of one file in tests/unit.

By default only tests marked `sql` run again, whose statements differ between the databases: upserts, row and table
locks, generated ids, JSON, cascades, snapshots. The logic around these statements is the same, and its tests run on
SQLite every time. With HILNAS_TEST_ALL set, all of them run on PostgreSQL too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import store_support

from nas.core.clock import Clock
from nas.infra.store.store import Store
from tests.support.postgres import Server

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents and _is_imported(item) and not item.get_closest_marker("sql"):
            item.add_marker("exhaustive")


def _is_imported(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return (item.cls or item.function).__module__ != item.module.__name__


class Databases:
    """One database for each folder in which a test opens a store; databases are emptied and used again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._free: list[str] = []
        self._used: dict[Path, tuple[str, list[Store]]] = {}
        self._count = 0

    def open(self, folder: Path, clock: Clock) -> Store:
        """Opens the store of `folder`."""
        if folder not in self._used:
            self.give_back([other for other in self._used if not other.exists()])
            self._used[folder] = self._empty_one(), []
        url, stores = self._used[folder]
        stores.append(Store.open(url, clock=clock, artifacts=folder / "artifacts"))
        return stores[-1]

    def give_back(self, folders: Iterable[Path]) -> None:
        """Releases the databases of these folders."""
        for folder in list(folders):
            url, stores = self._used.pop(folder)
            for store in stores:
                store.close()
            self._free.append(url)

    @property
    def folders(self) -> Iterable[Path]:
        """Folders whose databases are in use."""
        return self._used.keys()

    def _empty_one(self) -> str:
        if self._free:
            url = self._free.pop()
            self._server.empty(url)
            return url
        self._count += 1
        return self._server.create_empty(f"store_{self._count}")


@pytest.fixture(scope="session")
def databases(postgres_server: Server) -> Databases:
    return Databases(postgres_server)


@pytest.fixture(autouse=True)
def on_postgres(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores are opened on PostgreSQL."""
    monkeypatch.setattr(store_support, "opener", databases.open)
    yield
    databases.give_back(databases.folders)
