"""The agent's HTTP client for the coordinator, with an outbox for results and a cache for downloads."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.plan import PlanFile
from nas.core.trust import SignedManifest, certificate_fault
from nas.core.wire import (
    ENROL_PATH,
    FILE_PATH,
    HEARTBEAT_PATH,
    LEASE_PATH,
    LOCAL_PATH_HEADER,
    MANIFEST_PATH,
    REGISTER_PATH,
    RESULT_PATH,
    Authority,
    EnrolReply,
    EnrolRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JobId,
    LeaseReply,
    LeaseRequest,
    RegisterReply,
    RegisterRequest,
    ResultReply,
    ResultRequest,
)
from nas.measure.devices.files import ContentFolder

Reply = TypeVar("Reply", bound=BaseModel)

_TIMEOUT_S = 10.0
_KEPT_S = 60.0
"""Idle connections: longer than between heartbeats, so that they need no new handshakes; the coordinator keeps 75 s."""

_LONGEST_WHY = 1000
_RETRYABLE = {408, 425, 429}


class NotReached(InfrastructureFailed):
    """The connection to the coordinator was refused or timed out."""


class NotAdmitted(NasError):
    """The coordinator rejects this agent: its secret was revoked, or is unknown there."""


class NotTheCoordinator(NotAdmitted):
    """This agent rejects the coordinator: its certificate is from another CA, or for other names."""


class JobClient:
    """Client of one coordinator. Thread-safe.

    Every method raises `InfrastructureFailed` if the coordinator cannot be reached or has a server error (a retry can
    help), `NotAdmitted` if it rejects the agent itself, and `NasError` if it refuses a request.

    Args:
        http: a client whose base URL is the coordinator's; tests pass one with their own transport.
        local: whether the coordinator is on this machine, so that files can be taken by path.
        verify: the TLS context of `http`.
    """

    def __init__(self, http: httpx.Client, *, local: bool = False, verify: ssl.SSLContext | None = None) -> None:
        self._http, self._verify = http, verify
        self.local = local

    @classmethod
    def open(cls, url: str, *, auth: tuple[str, str] | None = None, verify: ssl.SSLContext | None = None) -> JobClient:
        """Returns a client for `http+unix:///path/of.sock`, `https://host` or `http://host`; `InvalidInput` for others.

        `auth` is the agent's name and secret; without `verify`, the CAs that this machine trusts are trusted.
        """
        # Every device uses one connection for its long poll, and one for the heartbeats of its job.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_S)
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            transport = httpx.HTTPTransport(uds=unquote(parts.path), limits=limits)
            http = httpx.Client(base_url="http://coordinator", transport=transport)
        elif parts.scheme in ("http", "https") and parts.netloc:
            # Proxies and passwords of the user's environment are ignored.
            verify = verify or ssl.create_default_context()
            http = httpx.Client(base_url=url, verify=verify, auth=auth, limits=limits, trust_env=False)
        else:
            raise InvalidInput(f"server {url!r}: give http+unix:///path/of.sock, https://host or http://host")
        return cls(http, local=parts.scheme == "http+unix", verify=verify)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def enrol(self, request: EnrolRequest) -> EnrolReply:
        """Exchanges a token for the agent's secret; a token works once."""
        return self._post(ENROL_PATH, request, EnrolReply)

    def register(self, request: RegisterRequest) -> RegisterReply:
        """Registers the agent and its devices; idempotent."""
        return self._post(REGISTER_PATH, request, RegisterReply)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Requests a job; waits for one up to `request.wait_s`."""
        return self._post(LEASE_PATH, request, LeaseReply, timeout_s=request.wait_s + _TIMEOUT_S)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Renews a lease."""
        return self._post(HEARTBEAT_PATH, request, HeartbeatReply)

    def submit(self, job: str, request: ResultRequest) -> ResultReply:
        """Submits a result; idempotent."""
        return self._post(RESULT_PATH.format(job=job), request, ResultReply, timeout_s=60.0)

    def manifest(self) -> SignedManifest:
        """Returns the current runner manifest; the caller must verify it."""
        with self._explained():
            response = self._http.get(MANIFEST_PATH, timeout=_TIMEOUT_S)
        return _read(response, SignedManifest)

    @contextmanager
    def file(self, sha256: str, start: int = 0) -> Iterator[httpx.Response]:
        """Yields the streamed answer to a download, from byte `start` if the coordinator can (status 206)."""
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
        raise NasError(f"coordinator: {path}: not the protocol of this agent: {error}") from error


def _refusal(response: httpx.Response) -> NasError:
    message = f"coordinator: {response.request.url.path}: {response.status_code} {_why(response)}"
    if response.is_server_error or response.status_code in _RETRYABLE:
        return InfrastructureFailed(message)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return NotAdmitted(f"{message}; enrol this host again: get a line with 'nas agent token' at the coordinator")
    return NasError(message)


def _why(response: httpx.Response) -> str:
    """Returns the coordinator's error message, or the text of whatever answered instead."""
    try:
        return str(response.json()["error"])[:_LONGEST_WHY]
    except (ValueError, KeyError, TypeError):
        return response.text[:_LONGEST_WHY]


log = logging.getLogger(__name__)


class PendingResult(BaseModel):
    """The result of a job and the authority it is for: an epoch is meaningful only to the authority that counted it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    authority: Authority
    job: JobId
    request: ResultRequest

    @property
    def file_name(self) -> str:
        """One per lease, so that a result written twice is stored once."""
        return f"{self.authority}.{self.request.device}.{self.request.epoch}.json"


class Outbox:
    """Results on disk until the coordinator accepts them, so that a killed agent loses none. Thread-safe.

    Args:
        folder: outlives the agent; created if missing.
        agent: name; results of other agents in the same folder are left alone.
    """

    def __init__(self, folder: Path, agent: str) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        results = (_read_pending(path) for path in sorted(folder.glob("*.json")))
        self._pending = {
            pending.file_name: pending for pending in results if pending and pending.request.agent == agent
        }

    def put(self, pending: PendingResult) -> None:
        """Stores a result until `drop`; in memory only if the disk fails."""
        with self._lock:
            self._pending[pending.file_name] = pending
        try:
            write_durably(self._folder / pending.file_name, pending.model_dump_json().encode())
        except OSError as error:
            log.warning("a result is kept only in memory, and is lost with this process: %s", error)

    def of(self, authority: str, device: str) -> list[PendingResult]:
        """Returns the results for an authority about a device, oldest epoch first."""
        waiting = [
            pending for pending in self._all() if (pending.authority, pending.request.device) == (authority, device)
        ]
        return sorted(waiting, key=lambda pending: pending.request.epoch)

    def devices(self, authority: str) -> set[str]:
        """Returns the ids of devices with results for an authority."""
        return {pending.request.device for pending in self._all() if pending.authority == authority}

    def drop(self, pending: PendingResult) -> None:
        """Deletes a result that was accepted or refused."""
        with self._lock:
            self._pending.pop(pending.file_name, None)
        try:
            (self._folder / pending.file_name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a result is submitted again by the next agent, which changes nothing: %s", error)

    def _all(self) -> list[PendingResult]:
        with self._lock:
            return list(self._pending.values())


def _read_pending(path: Path) -> PendingResult | None:
    try:
        return PendingResult.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        log.error("%s is not a valid result: %s", path, error)
        return None


_TRANSFER_S = 600.0
"""Longest duration of one attempt. What it fetched is kept, so that the next one ends sooner."""

_KEPT_BYTES = 8 << 30


class Downloads:
    """Plan files fetched from the coordinator once, resumed after interruptions, and verified before use.

    Safe for several threads and processes: a second request for a file waits for the first.

    Args:
        client: the source.
        folder: the cache; may be shared with a local device.
    """

    def __init__(self, client: JobClient, folder: ContentFolder) -> None:
        self._client = client
        self._folder = folder
        self._locks = folder.root / "locks"
        self._locks.mkdir(exist_ok=True)
        self._verified: set[str] = set()

    def fetch(self, file: PlanFile) -> Path:
        """Fetches a file unless it is in the cache, undamaged: one of an earlier process is hashed, once.

        Raises:
            InfrastructureFailed: the transfer broke off, the disk failed, or the bytes are wrong.
        """
        try:
            with self._turn(file):
                return self._cached_file(file) or self._download(file)
        except OSError as error:
            raise InfrastructureFailed(f"download of {file.sha256[:12]}: {error}") from error

    def doubt(self, file: PlanFile) -> None:
        """Has the next `fetch` hash the file again."""
        self._verified.discard(file.sha256)

    @contextmanager
    def _turn(self, file: PlanFile) -> Iterator[None]:
        """Waits while others fetch the file, or one whose hash begins alike."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self._locks / file.sha256[:2], deadline_s=_TRANSFER_S))
            except InfrastructureFailed as error:  # no device had a part in it: see `nas.core.wire.on_the_way`
                raise InfrastructureFailed(f"download of {file.sha256[:12]}: {error}") from error
            yield

    def _cached_file(self, file: PlanFile) -> Path | None:
        target = self._folder.path(file.sha256)
        if not target.exists() or target.stat().st_size != file.size:
            return None
        if file.sha256 not in self._verified:
            try:
                self._folder.verify(file.sha256)
            except InfrastructureFailed as error:
                log.warning("%s; it is fetched again", error)
                return None
            self._verified.add(file.sha256)
        os.utime(target)
        return target

    def _download(self, file: PlanFile) -> Path:
        part = self._folder.partial(file.sha256)
        have = part.stat().st_size if part.exists() else 0
        with self._client.file(file.sha256, have if have < file.size else 0) as response:
            local = response.headers.get(LOCAL_PATH_HEADER)
            if local and self._client.local:
                target = self._folder.add(Path(unquote(local)), file.sha256)
            else:
                _save(response, part, file.size)
                target = self._folder.settle(part, file.sha256)
        self._folder.trim(_KEPT_BYTES, keep=[file.sha256])
        return target


def _save(response: httpx.Response, part: Path, size: int) -> None:
    resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
    end = time.monotonic() + _TRANSFER_S
    with part.open("ab" if resumed else "wb") as out:
        for chunk in response.iter_bytes():
            out.write(chunk)
            if out.tell() > size:
                part.unlink()
                raise InfrastructureFailed(f"download: more than the {size} bytes that the plan names")
            if time.monotonic() > end:
                break
    if (have := part.stat().st_size) < size:
        raise InfrastructureFailed(f"download broke off after {have} of {size} bytes; the next attempt resumes there")
