"""Strangers who hold connections, in small forms of attacks: who is served meanwhile, and when theirs end.

`benchmarks/server_attacks.py` repeats them in full.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from farm_support import Coordinator, registration

from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.web import connections, server
from nas.infra.web.connections import address_of
from nas.serve.api.serve import make_service_app
from nas.serve.dashboard.access import AccessRules
from nas.serve.dashboard.app import dashboard_router

HEAD_S = 0.4
OF_ONE = 8
OTHER_ADDRESS = "127.0.0.2"
LOGIN = (
    b"POST /login HTTP/1.1\r\nHost: box\r\nOrigin: https://box\r\nContent-Type: application/x-www-form-urlencoded\r\n"
)


class Lab(Coordinator):
    """A coordinator with pages, an agent that is connected, and an admin's token."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        pages = dashboard_router(self.store, AccessRules())
        self.app = make_service_app(self.service, lambda service: pages)
        self.token = agents.create_api_token(self.store, "boss", Role.ADMIN)

    def connect(self, url: str, *, tls: bool = True, address: str = "127.0.0.1") -> socket.socket:
        """A stranger's connection."""
        port = httpx.URL(url).port
        assert port is not None
        plain = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(address, 0))
        return self.trusting().wrap_socket(plain, server_hostname="localhost") if tls else plain

    def log_in(self, url: str, token: str | None = None) -> int:
        """The status of a login on a new connection."""
        form = {"token": self.token if token is None else token}
        return httpx.post(
            f"{url}/login", data=form, headers={"Origin": url}, verify=self.trusting(), timeout=20
        ).status_code


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller limits than usual."""
    monkeypatch.setattr(connections, "HEAD_S", HEAD_S)
    monkeypatch.setattr(connections, "STALLED_S", HEAD_S)
    monkeypatch.setattr(server, "STRANGERS_OF_ONE", OF_ONE)
    monkeypatch.setattr(server, "STRANGERS_OF_ALL", 2 * OF_ONE)
    monkeypatch.setattr(server, "UNAUTHENTICATED_BODY_S", HEAD_S)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def url(lab: Lab) -> Iterator[str]:
    with lab.listening() as url:
        yield url


@pytest.fixture
def agent(lab: Lab, url: str) -> Iterator[httpx.Client]:
    """An agent with a connection of its own."""
    with httpx.Client(base_url=url, verify=lab.trusting(), auth=lab.enrol(), timeout=20) as client:
        beats(client)
        yield client


def beats(agent: httpx.Client) -> bool:
    return agent.post("/v1/agents/register", json=registration("host", "box")).status_code == 200


def has_ended(stranger: socket.socket) -> bool:
    """Waits for the server to end the connection."""
    try:
        while stranger.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "tcp"])
def test_who_connects_and_says_nothing_keeps_nobody_out_and_is_ended(
    lab: Lab, url: str, agent: httpx.Client, tls: bool
) -> None:
    with contextlib.ExitStack() as stack:
        stream = agent.post("/v1/agents/register", json=registration("host", "box")).extensions["network_stream"]
        idle = [stack.enter_context(lab.connect(url, tls=tls)) for _ in range(3 * OF_ONE)]
        answer = agent.post("/v1/agents/register", json=registration("host", "box"))
        assert answer.status_code == 200 and answer.extensions["network_stream"] is stream
        assert lab.log_in(url) == 303
        start = time.monotonic()
        assert all(map(has_ended, idle))
        assert time.monotonic() - start < 10
        assert beats(agent)


@pytest.mark.parametrize(
    "head",
    [b"", b"GET /login HTTP/1.1\r\nHost: box\r\n\r\n", b"GET /login HTTP/1.1\r\nHost: box\r\nX: "],
    ids=["first", "second", "begun"],
)
@pytest.mark.parametrize("byte", [b"x", b"\r\n"], ids=["letters", "empty lines"])
def test_a_head_that_comes_slowly_is_given_up(lab: Lab, url: str, head: bytes, byte: bytes) -> None:
    """The first one, the one after an answer, and one of which half came at once."""
    with lab.connect(url) as stranger:
        stranger.sendall(head)
        if head.endswith(b"\r\n\r\n"):
            assert stranger.recv(4096).startswith(b"HTTP/1.1 200")
        stranger.settimeout(0.02)
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 20:
                stranger.sendall(byte)
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(4096):
                        break
                if byte == b"\r\n" and b"X: " in head:
                    break  # it is whole, and answered
        assert time.monotonic() - start < 15


def test_bodies_that_come_slowly_keep_nobody_from_logging_in(lab: Lab, url: str, agent: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(lab.connect(url)) for _ in range(OF_ONE)]
        for stranger in slow:
            stranger.sendall(LOGIN + b"Content-Length: 10\r\n\r\na")
        assert lab.log_in(url) == 303
        assert beats(agent)
        assert slow[-1].recv(4096).startswith(b"HTTP/1.1 408")
        assert all(map(has_ended, slow))


def test_who_takes_nothing_of_what_it_asks_for_is_ended(lab: Lab, url: str) -> None:
    with lab.connect(url) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = b"GET /assets/uplot.esm.js HTTP/1.1\r\nHost: box\r\n\r\n"
        start = time.monotonic()
        with pytest.raises(OSError) as ended_by:  # reset, broken pipe or end of file
            while time.monotonic() - start < 20:
                stranger.sendall(request * 10)
        assert not isinstance(ended_by.value, TimeoutError), "nobody ended it"


def test_a_flood_of_wrong_tokens_keeps_nobody_out(lab: Lab, url: str, agent: httpx.Client) -> None:
    until = threading.Event()

    def guess(number: int) -> None:
        with httpx.Client(base_url=url, verify=lab.trusting(), timeout=20) as client:
            while not until.is_set():
                form = {"token": f"hilnas.boss.{number}"}
                assert client.post("/login", data=form, headers={"Origin": url}).status_code == 403

    with ThreadPoolExecutor() as threads:
        guesses = [threads.submit(guess, number) for number in range(OF_ONE // 2)]
        try:
            assert lab.log_in(url) == 303
            assert beats(agent)
        finally:
            until.set()
        for done in guesses:
            done.result()


def test_an_address_with_many_connections_ends_none_of_another(lab: Lab, url: str) -> None:
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(lab.connect(url))
        for address in (OTHER_ADDRESS, "127.0.0.3"):
            for _ in range(2 * OF_ONE):
                stack.enter_context(lab.connect(url, tls=False, address=address))
        mine.sendall(b"GET /login HTTP/1.1\r\nHost: box\r\n\r\n")
        assert mine.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(host: str, address: str) -> None:
    assert address_of(host) == address


def test_the_limit_of_open_files_is_raised_to_what_is_allowed() -> None:
    script = (
        "import resource; from nas.infra.web.server import raise_file_limit; raise_file_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))

    done = subprocess.run([sys.executable, "-c", script], preexec_fn=lower, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(2048, 2048)"


def test_a_client_that_gives_up_the_handshake_leaves_nothing(lab: Lab, url: str) -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"):
        with lab.connect(url, tls=False) as stranger:
            stranger.sendall(data)
    old = lab.trusting()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, verify=old)
    assert lab.log_in(url) == 303


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "no TLS"])
def test_memory_of_a_failed_handshake_is_free_at_once(lab: Lab, url: str, data: bytes) -> None:
    """Not when all objects are next looked at for unused cycles, which a coordinator with many objects does rarely."""

    def handshakes() -> int:
        return sum(kind is SSLProtocol for kind in map(type, gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        before = handshakes()
        for _ in range(20):
            with lab.connect(url, tls=False) as stranger:
                stranger.sendall(data)
        assert lab.log_in(url) == 303
        assert handshakes() - before < 5
    finally:
        gc.enable()
