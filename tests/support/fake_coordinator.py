"""A coordinator in memory that speaks the job protocol, for tests of agents over a mock transport or a real socket.

Like the real one, it checks that agent and device are registered and that the epoch is current.
"""

from __future__ import annotations

import hashlib
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from nas.core.plan import InputFile, Plan, Round, Runner
from nas.core.trust import SignedManifest
from nas.core.wire import (
    HEARTBEAT_PATH,
    LEASE_PATH,
    LOCAL_PATH_HEADER,
    MANIFEST_PATH,
    REGISTER_PATH,
    HeartbeatReply,
    HeartbeatRequest,
    Job,
    LeaseReply,
    LeaseRequest,
    RegisterReply,
    RegisterRequest,
    ResultReply,
    ResultRequest,
)

_FILES, _JOBS = "/v1/files/", "/v1/jobs/"


class FakeCoordinator:
    """Leases `jobs` in order to any registered device, or to the one that a job is for.

    Args:
        files: served by content hash.
        local_paths: answer downloads with the path of the file instead of its content.
        heartbeat_s: interval of heartbeats, sent to agents.
        poll_s: interval of polls, sent to agents.
    """

    def __init__(
        self, files: Path, *, local_paths: bool = False, heartbeat_s: float = 0.05, poll_s: float = 0.2
    ) -> None:
        self.files, self.local_paths, self.heartbeat_s, self.poll_s = files, local_paths, heartbeat_s, poll_s
        self.jobs: list[Job] = []
        self.manifest: SignedManifest | None = None
        """Served unchecked; `nas.measure.farm.trust` makes valid ones."""
        self.registered: list[RegisterRequest] = []
        self.heartbeats: list[HeartbeatRequest] = []
        self.polls: list[LeaseRequest] = []
        self.results: dict[str, ResultRequest] = {}
        self.cancelled: set[str] = set()
        self.trouble: list[httpx.Response | httpx.TransportError] = []
        """Responses to, or errors of, the next requests."""
        self.refuses_results = False
        """Whether results are answered with 503."""
        self._leased: dict[str, int] = {}
        self._meant: dict[str, str] = {}
        self._changed = threading.Condition()

    def client(self) -> httpx.Client:
        """Returns a client that reaches this coordinator without a network."""
        return httpx.Client(
            base_url="http://coordinator", transport=httpx.MockTransport(lambda request: self.handle(request))
        )

    def offer(self, job: Job, device: str | None = None) -> None:
        """Queues a job, for one device or for any."""
        with self._changed:
            self.jobs.append(job)
            if device is not None:
                self._meant[job.id] = device
            self._changed.notify_all()

    def script(self, text: str, main: str = "main.sh") -> Runner:
        """Returns a runner that is a shell script, whose file can be fetched from now on."""
        data = f"#!/bin/sh\n{text}\n".encode()
        file = InputFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        (self.files / file.sha256).write_bytes(data)
        return Runner(runtime="script", build="b", target="x86_64-linux", files={main: file}, main=main)

    def offer_script(
        self, text: str, name: str = "1", device: str | None = None, main: str = "main.sh", deadline_s: float = 60
    ) -> None:
        """Queues a job of epoch 7 that runs a shell script."""
        plan = Plan(runner=self.script(text, main), inputs={}, args=(), deadline_s=60)
        self.offer(Job(id=name, epoch=7, deadline_s=deadline_s, round=Round(candidate=plan, repetitions=1)), device)

    def wait_for(self, *, results: int = 0, heartbeats: int = 0, timeout_s: float = 60.0) -> None:
        """Waits until that many results and heartbeats came in."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.results) >= results and len(self.heartbeats) >= heartbeats, timeout_s
            ), f"{len(self.results)} results and {len(self.heartbeats)} heartbeats within {timeout_s} s"

    def serving(self) -> list[str]:
        """Returns ids of the devices that are registered now."""
        return [device.id for device in self.registered[-1].devices] if self.registered else []

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answers one request."""
        with self._changed:
            if self.trouble:
                trouble = self.trouble.pop(0)
                if isinstance(trouble, httpx.TransportError):
                    raise trouble
                return trouble
        path = request.url.path
        if path == MANIFEST_PATH:
            return _json(self.manifest) if self.manifest else httpx.Response(404, text="no runner was admitted yet")
        if path.startswith(_FILES):
            return self._file(path.removeprefix(_FILES), request)
        body = request.read()
        with self._changed:
            self._changed.notify_all()
            if path == REGISTER_PATH:
                return self._register(RegisterRequest.model_validate_json(body))
            if path == LEASE_PATH:
                return self._lease(LeaseRequest.model_validate_json(body))
            if path == HEARTBEAT_PATH:
                return self._heartbeat(HeartbeatRequest.model_validate_json(body))
            if path.startswith(_JOBS) and path.endswith("/result"):
                job = path.removeprefix(_JOBS).removesuffix("/result")
                return self._result(job, ResultRequest.model_validate_json(body))
        return httpx.Response(404, text=f"no such path: {path}")

    def _register(self, request: RegisterRequest) -> httpx.Response:
        self.registered.append(request)
        return _json(RegisterReply(authority="fake", poll_s=self.poll_s, heartbeat_s=self.heartbeat_s))

    def _lease(self, request: LeaseRequest) -> httpx.Response:
        def mine() -> Job | None:
            return next((job for job in self.jobs if self._meant.get(job.id, request.device) == request.device), None)

        self.polls.append(request)
        devices = {(agent.agent, device.id) for agent in self.registered for device in agent.devices}
        if (request.agent, request.device) not in devices:
            return httpx.Response(404, text="unknown agent or device: register first")
        self._changed.wait_for(lambda: mine() is not None or request.device not in self.serving(), request.wait_s)
        job = mine()
        if job:
            self.jobs.remove(job)
            self._leased[job.id] = job.epoch
        return _json(LeaseReply(job=job))

    def _heartbeat(self, request: HeartbeatRequest) -> httpx.Response:
        self.heartbeats.append(request)
        stale = self._leased.get(request.job) != request.epoch
        return _json(HeartbeatReply(cancel=stale or request.job in self.cancelled))

    def _result(self, job: str, request: ResultRequest) -> httpx.Response:
        if self.refuses_results:
            return httpx.Response(503)
        if self._leased.get(job) != request.epoch:
            return _json(ResultReply(accepted=False, reason=f"epoch {request.epoch} is not the current one"))
        self.results[job] = request
        return _json(ResultReply(accepted=True))

    def _file(self, sha256: str, request: httpx.Request) -> httpx.Response:
        path = self.files / sha256
        if not path.exists():
            return httpx.Response(404, text=f"no file {sha256}")
        if self.local_paths:
            return httpx.Response(200, headers={LOCAL_PATH_HEADER: quote(str(path))})
        data = path.read_bytes()
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        return httpx.Response(206 if start else 200, content=data[start:])


@contextmanager
def served(coordinator: FakeCoordinator, socket: Path) -> Iterator[str]:
    """Serves the coordinator on a Unix socket; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
            url = f"http://coordinator{self.path}"
            response = coordinator.handle(httpx.Request(self.command, url, headers=headers, content=body))
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_POST = _answer

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignores errors of killed clients, which these tests are about."""

    with Server(str(socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http+unix://{quote(str(socket))}"
        finally:
            server.shutdown()


def _json(message: BaseModel) -> httpx.Response:
    return httpx.Response(200, content=message.model_dump_json(), headers={"Content-Type": "application/json"})
