"""Here the tests of the store run over again, on PostgreSQL; each file names the ones that it repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import store_support

from nas.core.clock import Clock
from nas.store.store import Store
from nas.testing.postgres import Server


class Databases:
    """One for every folder that a test opens a store in; made once, and emptied for whoever comes next."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._free: list[str] = []
        self._used: dict[Path, tuple[str, list[Store]]] = {}
        self._made = 0

    def open(self, folder: Path, clock: Clock) -> Store:
        """The store of `folder`."""
        if folder not in self._used:
            self.give_back([other for other in self._used if not other.exists()])
            self._used[folder] = self._empty_one(), []
        url, stores = self._used[folder]
        stores.append(Store.open(url, clock=clock, artifacts=folder / "artifacts"))
        return stores[-1]

    def give_back(self, folders: Iterable[Path]) -> None:
        """These folders' databases are not needed any more."""
        for folder in list(folders):
            url, stores = self._used.pop(folder)
            for store in stores:
                store.close()
            self._free.append(url)

    @property
    def folders(self) -> Iterable[Path]:
        """Those whose databases are in use."""
        return self._used.keys()

    def _empty_one(self) -> str:
        if self._free:
            url = self._free.pop()
            self._server.empty(url)
            return url
        self._made += 1
        return self._server.create_empty(f"store_{self._made}")


@pytest.fixture(scope="session")
def databases(postgres_server: Server) -> Databases:
    return Databases(postgres_server)


@pytest.fixture(autouse=True)
def on_postgres(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores are opened on PostgreSQL."""
    monkeypatch.setattr(store_support, "opener", databases.open)
    yield
    databases.give_back(databases.folders)
