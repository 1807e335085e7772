"""What tests with real servers and devices share."""

from __future__ import annotations

from collections.abc import Iterator

import postgres_lab
import pytest


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres_lab.Server]:
    """One PostgreSQL server for the whole run."""
    with postgres_lab.server() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: postgres_lab.Server) -> Iterator[postgres_lab.Server]:
    """The same; the databases that a test makes on it are removed afterwards."""
    yield postgres_server
    postgres_server.drop_all()
