"""The agent's side of the job protocol, over a Unix socket or HTTP(S)."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from nas.core.certificates import certificate_fault
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.manifest import SignedManifest
from nas.core.protocol import (
    ENROL_PATH,
    FILE_PATH,
    HEARTBEAT_PATH,
    LEASE_PATH,
    MANIFEST_PATH,
    REGISTER_PATH,
    RESULT_PATH,
    EnrolReply,
    EnrolRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
    RegisterReply,
    RegisterRequest,
    ResultReply,
    ResultRequest,
)

Reply = TypeVar("Reply", bound=BaseModel)

_TIMEOUT_S = 10.0
_KEPT_S = 60.0
"""Idle connections: longer than between heartbeats, so that they cost no handshakes; the coordinator keeps 75 s."""

_LONGEST_WHY = 1000
_RETRYABLE = {408, 425, 429}


class NotReached(InfrastructureFailed):
    """Nobody answers at the coordinator's address."""


class NotAdmitted(NasError):
    """The coordinator does not let this agent in: its secret was revoked, or was never good there."""


class NotTheCoordinator(NotAdmitted):
    """This agent does not let the coordinator in: its certificate is another's, or for other names."""


class JobClient:
    """Speaks to one coordinator. Safe for use by several threads.

    Every method raises `InfrastructureFailed` where the coordinator cannot be reached or is in trouble (a retry can
    help), `NotAdmitted` where the agent itself is not wanted, and `NasError` where it refuses a request.

    Args:
        http: a client whose base URL is the coordinator's; tests give one with a transport of their own.
        local: whether the coordinator is on this machine, so that files it names by path can be taken.
        verify: whom `http` believes that it is the coordinator.
    """

    def __init__(self, http: httpx.Client, *, local: bool = False, verify: ssl.SSLContext | None = None) -> None:
        self._http, self._verify = http, verify
        self.local = local

    @classmethod
    def open(cls, url: str, *, auth: tuple[str, str] | None = None, verify: ssl.SSLContext | None = None) -> JobClient:
        """A client for `http+unix:///path/of.sock`, `https://host` or `http://host`.

        Args:
            url: of the coordinator.
            auth: the agent's name and secret, where the coordinator asks for them.
            verify: whom to believe that it is the coordinator; None: whom this machine believes.

        Raises:
            InvalidInput: another kind of URL.
        """
        # Every device holds one connection for its long poll, and one for the heartbeats of its job.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_S)
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            transport = httpx.HTTPTransport(uds=unquote(parts.path), limits=limits)
            http = httpx.Client(base_url="http://coordinator", transport=transport)
        elif parts.scheme in ("http", "https") and parts.netloc:
            # Proxies and passwords of the user's environment have no say here.
            verify = verify or ssl.create_default_context()
            http = httpx.Client(base_url=url, verify=verify, auth=auth, limits=limits, trust_env=False)
        else:
            raise InvalidInput(f"server {url!r}: give http+unix:///path/of.sock, https://host or http://host")
        return cls(http, local=parts.scheme == "http+unix", verify=verify)

    def close(self) -> None:
        """Ends the connections."""
        self._http.close()

    def enrol(self, request: EnrolRequest) -> EnrolReply:
        """Spends a token for the agent's own secret. Not to be repeated: the reply comes once."""
        return self._post(ENROL_PATH, request, EnrolReply)

    def register(self, request: RegisterRequest) -> RegisterReply:
        """Makes the agent and its devices known; harmless when repeated."""
        return self._post(REGISTER_PATH, request, RegisterReply)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Asks for a job; waits for one up to `request.wait_s`."""
        return self._post(LEASE_PATH, request, LeaseReply, timeout_s=request.wait_s + _TIMEOUT_S)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Renews a lease."""
        return self._post(HEARTBEAT_PATH, request, HeartbeatReply)

    def submit(self, job: str, request: ResultRequest) -> ResultReply:
        """Hands a result in; harmless when repeated."""
        return self._post(RESULT_PATH.format(job=job), request, ResultReply, timeout_s=60.0)

    def manifest(self) -> SignedManifest:
        """The runner manifest as it is now; whether to believe it is for the caller to find out."""
        with self._explained():
            response = self._http.get(MANIFEST_PATH, timeout=_TIMEOUT_S)
        return _read(response, SignedManifest)

    @contextmanager
    def file(self, sha256: str, start: int = 0) -> Iterator[httpx.Response]:
        """The streamed answer to a download, from byte `start` where the coordinator can do that (status 206)."""
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        path = FILE_PATH.format(sha256=sha256)
        with self._explained(), self._http.stream("GET", path, headers=headers, timeout=_TIMEOUT_S) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield response

    def _post(self, path: str, request: BaseModel, reply: type[Reply], timeout_s: float = _TIMEOUT_S) -> Reply:
        headers = {"Content-Type": "application/json"}
        with self._explained():
            response = self._http.post(path, content=request.model_dump_json(), headers=headers, timeout=timeout_s)
        return _read(response, reply)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            fault = certificate_fault(error, str(self._http.base_url), self._verify)
            if fault is not None and fault.lasting:
                raise NotTheCoordinator(f"coordinator: {fault}") from error
            failure = NotReached if isinstance(error, httpx.ConnectError) else InfrastructureFailed
            raise failure(f"coordinator: {fault or error or type(error).__name__}") from error


def _read(response: httpx.Response, reply: type[Reply]) -> Reply:
    if response.is_error:
        raise _refusal(response)
    try:
        return reply.model_validate_json(response.content)
    except ValidationError as error:
        path = response.request.url.path
        raise NasError(f"coordinator: {path}: not the protocol this agent speaks: {error}") from error


def _refusal(response: httpx.Response) -> NasError:
    message = f"coordinator: {response.request.url.path}: {response.status_code} {_why(response)}"
    if response.is_server_error or response.status_code in _RETRYABLE:
        return InfrastructureFailed(message)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return NotAdmitted(f"{message}; enrol this host again: get a line with 'nas agent token' at the coordinator")
    return NasError(message)


def _why(response: httpx.Response) -> str:
    """The coordinator's own words, or what somebody else said in its place."""
    try:
        return str(response.json()["error"])[:_LONGEST_WHY]
    except (ValueError, KeyError, TypeError):
        return response.text[:_LONGEST_WHY]
