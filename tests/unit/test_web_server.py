"""The server itself, over real TLS: polls that wait, clients that dawdle, what is too large, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from farm_support import Coordinator, registration
from fastapi import FastAPI
from store_support import key, round_of

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.wire import EnrolRequest
from nas.infra.store import devices, jobs
from nas.infra.store.rows import DeviceState, JobState
from nas.infra.web.server import BODY, UNAUTHENTICATED_BODY, BodyLimit, listen_tcp, listen_unix
from nas.measure.farm import agent_api
from tests.support.waiting import until

CHUNK = 16 << 10


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
    until(lambda: lab.monitor.notifier.waited_for() >= set(devices))


def raw(client: httpx.Client, lab: Coordinator) -> ssl.SSLSocket:
    """A connection on which anything can be said."""
    host, port = client.base_url.host, client.base_url.port
    assert port is not None
    plain = socket.create_connection((host, port), timeout=60)
    return lab.trusting().wrap_socket(plain, server_hostname=host)


def limit_bodies(lab: Coordinator, **limits: float) -> None:
    """Has the application limit the bodies of requests otherwise than usual."""
    [body_limit] = [middleware for middleware in lab.app.user_middleware if middleware.cls is BodyLimit]
    body_limit.kwargs.update(limits)
    lab.app.middleware_stack = None


@dataclass
class Upload:
    """A request whose body comes in chunks, given to the application itself, so that what it takes can be counted."""

    app: FastAPI
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    position: int = 0
    status: int = 0

    async def send(self) -> Upload:
        """Sends it; `position` counts the bytes that were read."""
        headers = {"host": "localhost", "content-type": "application/json", **self.headers}
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "https", "path": self.path,
            "raw_path": self.path.encode(), "query_string": b"", "root_path": "", "client": ("192.0.2.1", 1),
            "server": ("localhost", 443), "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }  # fmt: skip
        await self.app(scope, self._next, self._answered)
        return self

    async def _next(self) -> Any:
        start, self.position = self.position, min(self.position + CHUNK, len(self.body))
        more = self.position < len(self.body)
        return {"type": "http.request", "body": self.body[start : self.position], "more_body": more}

    async def _answered(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]


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
    names = [f"box-{number}" for number in range(50)]
    assert client.post("/v1/agents/register", json=registration("host", *names)).status_code == 200

    before = threading.active_count()

    async def wait_for_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, verify=lab.trusting(), auth=client.auth, limits=limits,
                                     timeout=60) as many:  # fmt: skip
            body = {"agent": "host", "wait_s": 20}
            polls = [asyncio.create_task(many.post("/v1/lease", json={**body, "device": name})) for name in names]
            await asyncio.to_thread(waiting, lab, *names)
            assert threading.active_count() < before + 25
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
    until(lambda: not lab.monitor.notifier.waited_for())
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
    limit_bodies(lab, unauthenticated_s=0.2)
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


@pytest.fixture(scope="module")
def posted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every path that takes a POST."""
    document = Coordinator(tmp_path_factory.mktemp("document")).app.openapi()
    paths = [path for path, methods in document["paths"].items() if "post" in methods]
    assert {"/v1/agents/enrol", "/v1/lease"} <= set(paths)
    return paths


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_stranger_cannot_send_much(lab: Coordinator, posted: list[str], declared: bool) -> None:
    body = json.dumps({"token": "x" * (8 << 20), "agent": "host"}).encode()
    headers = {"content-length": str(len(body))} if declared else {"transfer-encoding": "chunked"}
    for path in posted:
        sent = asyncio.run(Upload(lab.app, path, body, headers).send())
        assert sent.status == (413 if path == "/v1/agents/enrol" else 401), path
        assert sent.position <= (0 if declared or sent.status == 401 else CHUNK), path


def test_a_wrong_secret_or_token_allows_no_larger_body(lab: Coordinator, posted: list[str]) -> None:
    lab.enrol("host")
    body = json.dumps({"agent": "x" * (8 << 20)}).encode()
    for scheme in ("Basic aG9zdDp3cm9uZw==", "Bearer hilnas.admin.wrong"):
        for path in posted:
            headers = {"content-length": str(len(body)), "authorization": scheme}
            sent = asyncio.run(Upload(lab.app, path, body, headers).send())
            assert (sent.status, sent.position) == (413 if path == "/v1/agents/enrol" else 401, 0), path


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_what_an_agent_may_send_depends_on_the_route(lab: Coordinator, declared: bool) -> None:
    name, secret = lab.enrol()
    credentials = {"authorization": f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}"}
    answers = {}
    for path in ("/v1/lease", "/v1/jobs/a.0/result"):
        body = json.dumps({"agent": name, "more": "x" * (2 << 20)}).encode()
        size = {"content-length": str(len(body))} if declared else {"transfer-encoding": "chunked"}
        answers[path] = asyncio.run(Upload(lab.app, path, body, credentials | size).send())
    position = 0 if declared else BODY + CHUNK
    assert (answers["/v1/lease"].status, answers["/v1/lease"].position) == (413, position)
    assert answers["/v1/jobs/a.0/result"].status == 422  # read whole, and found to be no result
    assert answers["/v1/jobs/a.0/result"].position > 2 << 20


def test_an_enrolment_fits_in_what_a_stranger_may_send() -> None:
    longest = EnrolRequest(token="x" * 128, agent="x" * 64)
    assert 4 * len(longest.model_dump_json()) < UNAUTHENTICATED_BODY


def test_an_agent_cannot_send_without_end(lab: Coordinator, client: httpx.Client) -> None:
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
        with pytest.raises(OSError) as cut_off:  # reset, broken pipe or end of file
            while True:
                connection.sendall(b"x" * 1000)
        assert not isinstance(cut_off.value, TimeoutError), "nobody cut it off"


def test_a_port_that_is_taken_is_told() -> None:
    with listen_tcp("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(InfrastructureFailed, match=f"port {first.getsockname()[1]}: Address already in use"):
            listen_tcp("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InfrastructureFailed, match=r"cannot listen on 192\.0\.2\.77"):
        listen_tcp("192.0.2.77", 0)


@pytest.mark.parametrize("host", ["", "nowhere.invalid", "a" * 300, "https://box", "fe80::1%none"])
def test_what_is_no_host_is_told(host: str) -> None:
    with pytest.raises(InvalidInput, match=r"^--host: ") as refused:
        listen_tcp(host, 0)
    assert "Unknown error" not in str(refused.value)


def test_a_socket_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="too long for a Unix socket"):
        listen_unix(tmp_path / ("x" * 120))
