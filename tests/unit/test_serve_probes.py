"""What load balancers ask without a token: whether the coordinator lives, and whether it is ready."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from store_support import StillClock, open_store

from nas.infra.web.server import web_app
from nas.serve.api import serve
from nas.serve.api.serve import LEAST_FREE_BYTES, probes_router

Usage = namedtuple("Usage", "total used free")


class Farm:
    """A store, and a coordinator that may be stopping."""

    def __init__(self, folder: Path) -> None:
        self.store, self.closed = open_store(folder, StillClock()), False
        app = web_app()
        app.include_router(probes_router(self.store, lambda: self.closed))
        self.client = TestClient(app, base_url="https://127.0.0.1")

    def ready(self) -> tuple[int, list[str]]:
        answer = self.client.get("/readyz")
        return answer.status_code, answer.json()["problems"]


@pytest.fixture
def farm(tmp_path: Path) -> Farm:
    return Farm(tmp_path)


def test_a_stranger_learns_that_it_lives_and_is_ready(farm: Farm) -> None:
    assert farm.client.get("/healthz").json() == {"status": "ok"}
    assert farm.client.get("/readyz").json() == {"status": "ready", "problems": []}


def test_it_is_not_ready_while_it_stops(farm: Farm) -> None:
    farm.closed = True
    assert farm.ready() == (503, ["stopping"]) and farm.client.get("/healthz").status_code == 200


def test_it_is_not_ready_without_its_database(farm: Farm) -> None:
    farm.store.close()
    path = Path(str(farm.store.engine.url.database))
    for file in path.parent.glob(f"{path.name}*"):
        file.write_bytes(b"no database " * 1000)
    assert farm.ready() == (503, ["database"]) and farm.client.get("/healthz").status_code == 200


def test_it_is_not_ready_on_a_full_disk(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.shutil, "disk_usage", lambda folder: Usage(10**12, 10**12, LEAST_FREE_BYTES - 1))
    assert farm.ready() == (503, ["disk"])
