"""The server itself, over real TLS: polls that wait, clients that dawdle, what is too large, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from farm_support import Coordinator, registration
from store_support import key, round_of

from nas.core.errors import InfrastructureFailed
from nas.farm import agent_api
from nas.store import devices, jobs
from nas.store.rows import DeviceState, JobState
from nas.web.server import BodyLimit, listen_tcp, listen_unix


@pytest.fixture
def lab(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


def enrolled(lab: Coordinator, url: str) -> httpx.Client:
    """An agent that is enrolled."""
    return httpx.Client(base_url=url, verify=lab.trusting(), auth=lab.enrol(), timeout=60)


@pytest.fixture
def client(lab: Coordinator) -> Iterator[httpx.Client]:
    """An agent with one device."""
    with lab.listening() as url, enrolled(lab, url) as client:
        assert client.post("/v1/agents/register", json=registration("host", "box")).status_code == 200
        yield client


def poll(client: httpx.Client, wait_s: float = 20.0, device: str = "box") -> Any:
    answer = client.post("/v1/lease", json={"agent": "host", "device": device, "wait_s": wait_s}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["job"]


def waiting(lab: Coordinator, *devices: str) -> None:
    """Waits until somebody waits for each of them."""
    while not lab.monitor.notifier.waited_for() >= set(devices):
        pass


def raw(client: httpx.Client, lab: Coordinator) -> ssl.SSLSocket:
    """A connection on which anything can be said."""
    host, port = client.base_url.host, client.base_url.port
    assert port is not None
    plain = socket.create_connection((host, port), timeout=60)
    return lab.trusting().wrap_socket(plain, server_hostname=host)


def limit_bodies(lab: Coordinator, **limits: float) -> None:
    """Has the application limit the bodies of requests otherwise than usual."""
    [body_limit] = [each for each in lab.app.user_middleware if each.cls is BodyLimit]
    body_limit.kwargs.update(limits)
    lab.app.middleware_stack = None


def until_closed(connection: ssl.SSLSocket) -> bytes:
    """What comes until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while more := connection.recv(4096):
            answer += more
    return answer


def test_a_waiting_agent_gets_a_job_that_comes(lab: Coordinator, client: httpx.Client) -> None:
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(poll, client)
        waiting(lab, "box")
        jobs.enqueue(lab.store, key(1), round_of(), device="box")
        assert answer.result()["id"] == f"{key(1)}.0"


def test_waiting_ends_when_the_time_is_over(client: httpx.Client) -> None:
    assert poll(client, wait_s=0.05) is None


def test_waiting_agents_take_no_threads(lab: Coordinator, client: httpx.Client) -> None:
    names = [f"box-{number}" for number in range(100)]
    assert client.post("/v1/agents/register", json=registration("host", *names)).status_code == 200

    before = threading.active_count()

    async def wait_for_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, verify=lab.trusting(), auth=client.auth, limits=limits,
                                     timeout=60) as many:  # fmt: skip
            body = {"agent": "host", "wait_s": 20}
            polls = [asyncio.create_task(many.post("/v1/lease", json={**body, "device": name})) for name in names]
            await asyncio.to_thread(waiting, lab, *names)
            assert threading.active_count() < before + 50
            assert client.get("/v1/ca").status_code == 200  # others are answered meanwhile
            lab.monitor.notifier.close()
            assert {(await answer).json()["job"] for answer in polls} == {None}

    asyncio.run(wait_for_all())


def test_who_hung_up_is_given_no_job(lab: Coordinator, client: httpx.Client) -> None:
    hasty = httpx.Timeout(60, read=0.5)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/lease", json={"agent": "host", "device": "box", "wait_s": 20}, timeout=hasty)
    waiting(lab, "box")
    jobs.enqueue(lab.store, key(1), round_of(), device="box")
    lab.monitor.notifier.notify()
    while lab.monitor.notifier.waited_for():
        pass
    job = jobs.get(lab.store, f"{key(1)}.0")
    assert job is not None
    assert (job.state, job.attempts) == (JobState.QUEUED, 0)
    assert poll(client)["id"] == job.id


def test_an_agent_that_lets_a_device_go_is_answered_at_once(
    lab: Coordinator, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_api, "POLL_S", 3600.0)
    client.post("/v1/agents/register", json=registration("host", "box", "phone"))
    with ThreadPoolExecutor() as threads:
        box, phone = (threads.submit(poll, client, 3600.0, name) for name in ("box", "phone"))
        waiting(lab, "box", "phone")
        client.post("/v1/agents/register", json=registration("host", "phone"))
        assert box.result() is None
        jobs.enqueue(lab.store, key(1), round_of(), device="box")
        jobs.enqueue(lab.store, key(2), round_of(), device="phone")
        assert phone.result()["id"] == f"{key(2)}.0"
    assert devices.get(lab.store, "box").state is DeviceState.OFFLINE


def test_a_server_that_ends_answers_those_who_wait(lab: Coordinator) -> None:
    with ThreadPoolExecutor() as threads:
        with lab.listening() as url, enrolled(lab, url) as client:
            client.post("/v1/agents/register", json=registration("host", "box"))
            answer = threads.submit(poll, client)
            waiting(lab, "box")
            lab.monitor.notifier.close()
            assert answer.result() is None
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, verify=lab.trusting(), timeout=60)


def test_a_body_that_never_comes_whole_is_given_up(lab: Coordinator, client: httpx.Client) -> None:
    limit_bodies(lab, seconds=0.2)
    with raw(client, lab) as connection:
        head = b"POST /v1/agents/enrol HTTP/1.1\r\nHost: box\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b'Content-Length: 100\r\n\r\n{"token": ')
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"not whole after 0.2 s" in answer


def test_a_head_without_end_is_cut_off(lab: Coordinator, client: httpx.Client) -> None:
    with raw(client, lab) as connection:
        with contextlib.suppress(OSError):  # closed while it was still sending
            connection.sendall(b"GET /v1/ca HTTP/1.1\r\nX-Large: " + b"x" * 1_000_000)
        assert until_closed(connection)[:12] in (b"", b"HTTP/1.1 400")  # an answer may be lost in the reset


def test_a_stranger_cannot_send_much(lab: Coordinator, client: httpx.Client) -> None:
    body = b'{"token": "' + b"x" * (1 << 20)
    assert client.post("/v1/agents/enrol", content=body, auth=None).status_code in (413, 422)
    assert client.post("/v1/lease", content=body, headers={"Authorization": ""}, auth=None).status_code == 401


def test_an_agent_cannot_send_without_end(lab: Coordinator, client: httpx.Client) -> None:
    limit_bodies(lab, limit=1 << 20)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # closed while it was still sending
        assert client.post("/v1/lease", content=endless(), timeout=60).status_code == 413
    assert poll(client, wait_s=0) is None


@pytest.mark.parametrize(("path", "status"), [("/v1/lease", b"401"), ("/v1/nowhere", b"404")])
def test_who_is_refused_and_goes_on_sending_is_cut_off(
    lab: Coordinator, client: httpx.Client, path: str, status: bytes
) -> None:
    with raw(client, lab) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: box\r\nContent-Length: 1000000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)
        with pytest.raises(OSError):  # reset, broken pipe or end of file
            while True:
                connection.sendall(b"x" * 1000)


def test_a_port_that_is_taken_is_told() -> None:
    with listen_tcp("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(InfrastructureFailed, match=f"port {first.getsockname()[1]}: Address already in use"):
            listen_tcp("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InfrastructureFailed, match=r"cannot listen on 192\.0\.2\.77"):
        listen_tcp("192.0.2.77", 0)


def test_a_socket_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailed, match="too long for a Unix socket"):
        listen_unix(tmp_path / ("x" * 120))
