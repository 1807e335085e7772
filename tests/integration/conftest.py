"""What tests with real servers and devices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nas.testing.postgres import CARELESS, Server, server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One PostgreSQL server for the whole run."""
    with server(CARELESS) as started:
        yield started


@pytest.fixture
def postgres(postgres_server: Server) -> Iterator[Server]:
    """The same; the databases that a test makes on it are removed afterwards."""
    with postgres_server.dropping():
        yield postgres_server
