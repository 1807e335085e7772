"""The time of a database server, as hosts with clocks of their own compute it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import Connection
from store_support import StillClock

from nas.infra.store.engine import ServerClock


@dataclass
class HostClock(StillClock):
    """A clock that somebody may set: `monotonic` does not change with it."""

    up: float = 0.0

    def monotonic(self) -> float:
        return self.up

    def pass_by(self, seconds: float) -> None:
        self.time += seconds
        self.up += seconds


class Server:
    """Answers with its time; counts how often it was asked."""

    def __init__(self, clock: HostClock, ahead_s: float) -> None:
        self.clock, self.ahead_s, self.queries = clock, ahead_s, 0

    def execute(self, statement: Any) -> Any:
        self.queries += 1
        time = self.clock.time + self.ahead_s
        self.clock.pass_by(0.2)  # half of it until the server reads its clock
        return SimpleNamespace(scalar_one=lambda: time + 0.1)

    @property
    def connection(self) -> Connection:
        return cast(Connection, self)


@pytest.fixture
def host() -> HostClock:
    return HostClock()


def test_a_host_whose_clock_is_wrong_computes_the_servers_time(host: HostClock) -> None:
    server, clock = Server(host, -35.0), ServerClock(host)
    clock.follow(server.connection)
    host.pass_by(10)
    assert clock.now() == pytest.approx(host.time - 35.0)
    assert clock.monotonic() == host.up


def test_the_server_is_asked_from_time_to_time(host: HostClock) -> None:
    server, clock = Server(host, 5.0), ServerClock(host)
    for _ in range(10):
        clock.follow(server.connection)
    assert server.queries == 1
    server.ahead_s = 6.0
    host.pass_by(31)
    clock.follow(server.connection)
    assert (server.queries, clock.now()) == (2, pytest.approx(host.time + 6.0))


@pytest.mark.parametrize("seconds", [-3600.0, 35.0])
def test_a_clock_that_is_set_changes_nothing(host: HostClock, seconds: float) -> None:
    server, clock = Server(host, 0.0), ServerClock(host)
    clock.follow(server.connection)
    before = clock.now()
    host.time += seconds
    server.ahead_s -= seconds
    clock.follow(server.connection)
    assert clock.now() == pytest.approx(before, abs=1.0)
