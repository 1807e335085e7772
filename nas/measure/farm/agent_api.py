"""The coordinator's API for agents (`nas.core.wire`): authentication, jobs, and the files that jobs need.

This machine's agent connects by a Unix socket, agents of other hosts by TLS with the secrets of their enrolment.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, HTTPException
from fastapi.openapi.models import HTTPBase as HTTPBaseModel
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from nas.core import wire as p
from nas.core.canonical import canonical_json, sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.trust import SignedManifest
from nas.infra.store import agents, devices, jobs, outcomes
from nas.infra.store.outcomes import Verdict
from nas.infra.store.rows import JobRow
from nas.infra.store.store import Store
from nas.infra.web.errors import documented
from nas.infra.web.metrics import RESULTS
from nas.infra.web.off_loop import off_loop
from nas.infra.web.server import allow_body, max_body, web_app
from nas.measure.farm.queue import JobNotifier

log = logging.getLogger(__name__)

POLL_S = 20.0
"""Longest wait of a lease request."""

HEARTBEAT_S = 5.0
"""Interval in which agents send heartbeats."""

_JOB_OVERHEAD_S = 120.0
_MAX_REGISTRATION = 8 << 20
_MAX_RESULT = 64 << 20
"""Bytes of a round's result: the output of a run is kept up to 1 MiB."""
_PARSED_ON_LOOP = 64 << 10
"""Bytes of a body that the event loop parses itself: less work than changing threads."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REALM = {"WWW-Authenticate": 'Basic realm="hilnas"'}
_BYTES: dict[str, Any] = {"content": {"application/octet-stream": {}}}

_FILE_RESPONSES: dict[int | str, dict[str, Any]] = {200: _BYTES, 206: _BYTES, 416: {"description": "No such range"}}
"""Responses to a request for a file, for OpenAPI."""

FindFile = Callable[[str], Path | None]
ReadManifest = Callable[[], SignedManifest | None]


class Access(Protocol):
    """Authenticates the agent of a request."""

    async def caller(self, request: Request) -> str | None:
        """Returns the name of the requesting agent; None for one that may act as any agent.

        Raises:
            HTTPException: 401, name and secret do not match.
        """


class SocketAccess:
    """A Unix socket: every process that may open it may act as any agent."""

    async def caller(self, request: Request) -> None:
        """Returns None: any agent."""


class SecretAccess:
    """HTTP Basic with the secrets of enrolment.

    The hashes of all secrets are read together and cached for a moment. A secret that does not match them is looked up,
    so an agent that enrolled just now is accepted at once.

    Args:
        store: has the secrets' hashes.
    """

    FRESH_S = 2.0
    """Time for which a secret that another process revoked is still accepted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hashes: dict[str, str] = {}
        self._until = 0.0
        self._reading = asyncio.Lock()

    def forget(self) -> None:
        """Drops the cache, after a secret was changed."""
        self._until = 0.0

    async def caller(self, request: Request) -> str:
        name, secret = _basic(request.headers.get("Authorization", ""))
        if not agents.matches((await self._secret_hashes()).get(name), secret) and not await off_loop(
            agents.authenticate, self._store, name, secret
        ):
            raise HTTPException(401, "no such agent, or not its secret; enrol it with 'nas agent enrol'", _REALM)
        return name

    async def _secret_hashes(self) -> dict[str, str]:
        async with self._reading:
            if time.monotonic() >= self._until:
                self._until = time.monotonic() + self.FRESH_S
                self._hashes = await off_loop(agents.secret_hashes, self._store)
            return self._hashes


def make_app(store: Store, find_file: FindFile, notifier: JobNotifier, manifest: ReadManifest) -> FastAPI:
    """Makes the application for a Unix socket, whose permissions are its access control; see `router`."""
    app = web_app(openapi_url=None)
    app.include_router(router(store, find_file, notifier, manifest, SocketAccess()))
    return app


def router(
    store: Store, find_file: FindFile, notifier: JobNotifier, manifest: ReadManifest, access: Access
) -> APIRouter:
    """Makes the routes of agents that are enrolled; `notifier` wakes lease requests and is notified when jobs end."""
    settings: dict[str, Any] = {"dependencies": [_DOCUMENTED], "responses": documented(401, 403, 404)}
    routes = APIRouter(route_class=guarded(access), tags=["agents"], **settings)

    @routes.post(p.REGISTER_PATH)
    @max_body(_MAX_REGISTRATION)
    async def register(request: p.RegisterRequest, caller: Caller) -> p.RegisterReply:
        """Register an agent and its devices; replaces its earlier registration.

        A device that is not listed any more is offline, and a lease request that waits for it is answered.
        """
        _require_own(caller, request.agent)
        reply = await off_loop(_register, store, request, local=caller is None)
        notifier.cancel(request.agent, {device.id for device in request.devices})
        notifier.notify()
        return reply

    @routes.post(p.LEASE_PATH)
    async def lease(request: p.LeaseRequest, caller: Caller, http: Request) -> p.LeaseReply:
        """Wait for a job for one device, and take it."""
        _require_own(caller, request.agent)
        row = await _claim(store, notifier, request, http)
        return p.LeaseReply(job=_job(row) if row else None)

    @routes.post(p.HEARTBEAT_PATH)
    async def heartbeat(request: p.HeartbeatRequest, caller: Caller) -> p.HeartbeatReply:
        """Renew the lease of a running job, and learn whether to cancel it."""
        _require_own(caller, request.agent)
        of = (request.job, request.device, request.agent, request.epoch)
        return p.HeartbeatReply(cancel=not await off_loop(jobs.renew, store, *of, phase=request.phase))

    @routes.post(p.RESULT_PATH)
    @max_body(_MAX_RESULT)
    async def result(job: p.JobId, request: p.ResultRequest, caller: Caller) -> p.ResultReply:
        """Submit a job's result or failure; repeating it is accepted and counts once."""
        _require_own(caller, request.agent)
        verdict = await off_loop(_end, store, find_file, job, request)
        notifier.notify()
        RESULTS.labels("accepted" if verdict.accepted else "refused").inc()
        return p.ResultReply(accepted=verdict.accepted, reason=verdict.reason)

    @routes.get(p.MANIFEST_PATH)
    async def runners() -> SignedManifest:
        """The signed list of runners that agents may run."""
        signed = await off_loop(manifest)
        if signed is None:
            raise HTTPException(404, "no runner was admitted yet")
        return signed

    @routes.get(p.FILE_PATH, response_class=Response, responses=_FILE_RESPONSES)
    async def file(sha256: str, caller: Caller) -> Response:
        """Download a file that a job of this agent needs, or a range of it."""
        return await off_loop(_send_file, store, find_file, sha256, caller)

    return routes


def end_if_damaged(store: Store, find_file: FindFile, id: str) -> None:
    """Fails a job whose files are damaged or missing on the coordinator: no other attempt can succeed."""
    job = jobs.get(store, id)
    if job is None or job.state not in jobs.LIVE:
        return
    runners = {file.sha256 for plan in job.payload.plans for file in plan.runner.files.values()}
    for sha256 in sorted(job.payload.files):
        if (fault := _fault(find_file(sha256), sha256)) is not None:
            remedy = "build the runtime again" if sha256 in runners else "run or resume this again to export it again"
            message = f"{p.OWN_FILE}{fault}; {remedy}"
            log.error("%s", message)
            jobs.give_up(store, id, message)
            return


def guarded(access: Access) -> type[APIRoute]:
    """Makes a route class that authenticates before it reads a request's body, and parses large ones in a thread."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()
            model = self.body_field.field_info.annotation if self.body_field else None

            async def authenticate_first(request: Request) -> Response:
                request.state.caller = await access.caller(request)
                allow_body(request, self.endpoint)
                return await handle(_ParsingRequest(model, request))

            return authenticate_first

    return Guarded


class _ParsingRequest(Request):
    """A request whose JSON, if it is large, is parsed and validated in a thread, so that others are answered meanwhile.

    Args:
        model: of the body; None if there is none.
        request: the original one.
    """

    def __init__(self, model: Any, request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Returns the body's JSON, or the model that FastAPI would make of it.

        Raises:
            HTTPException: 422, a large body does not match the model.
        """
        body = await self.body()
        if self._model is None or len(body) <= _PARSED_ON_LOOP:
            return await super().json()
        try:
            return await off_loop(TypeAdapter(self._model).validate_json, body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise HTTPException(422, f"{'.'.join(map(str, ('body', *problem['loc'])))}: {problem['msg']}") from None


class _Documented(SecurityBase):
    """Describes the agents' authentication in OpenAPI; `guarded` routes do the work."""

    def __init__(self) -> None:
        self.model = HTTPBaseModel(scheme="basic", description="an agent's name, and the secret of its enrolment")
        self.scheme_name = "agent"

    async def __call__(self) -> None: ...


_DOCUMENTED = Depends(_Documented())
"""Dependency of a router of guarded routes."""


async def _caller(request: Request) -> Any:  # a plain function would be called in a thread
    return request.state.caller


Caller = Annotated[str | None, Depends(_caller)]
"""Parameter of a guarded route: the requesting agent; None if it may act as any."""


def _require_own(caller: str | None, agent: str) -> None:
    """Raises `HTTPException` (403) if an agent acts as another one."""
    if caller not in (None, agent):
        raise HTTPException(403, f"agent {caller!r} may not speak for {agent!r}")


def _basic(header: str) -> tuple[str, str]:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        raise HTTPException(401, "give the agent's name and secret (HTTP Basic)", _REALM)
    try:
        name, _, secret = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise HTTPException(401, "this is no HTTP Basic authentication", _REALM) from None
    return name, secret


def _register(store: Store, request: p.RegisterRequest, *, local: bool) -> p.RegisterReply:
    _require_storable(request)
    if local:
        agents.register_local(store, request.agent)
    devices.register(store, request.agent, request.devices, boot_id=request.boot_id)
    return p.RegisterReply(authority=agents.authority(store), poll_s=POLL_S, heartbeat_s=HEARTBEAT_S)


def _end(store: Store, find_file: FindFile, job: str, request: p.ResultRequest) -> Verdict:
    _require_storable(request)
    of = (store, job, request.device, request.agent, request.epoch)
    if request.result is not None:
        return outcomes.submit(*of, request.result)
    assert request.failure is not None, "the message holds one of both"
    verdict = outcomes.fail(*of, request.failure)
    if verdict.accepted and not request.failure.reached_device:
        end_if_damaged(store, find_file, job)
    return verdict


def _fault(path: Path | None, sha256: str) -> str | None:
    if path is None:
        return f"file {sha256[:12]} is missing"
    try:
        return None if sha256_of(path) == sha256 else f"{path} is damaged: its content is not {sha256[:12]}"
    except OSError as error:
        return f"{path}: {error.strerror}"


async def _claim(store: Store, notifier: JobNotifier, request: p.LeaseRequest, http: Request) -> JobRow | None:
    deadline = time.monotonic() + min(request.wait_s, POLL_S)
    while True:
        with notifier.waiting(request.device, request.agent) as waiter:
            row = await off_loop(jobs.claim, store, request.device, request.agent)
            remaining = deadline - time.monotonic()
            if row is not None or remaining <= 0 or notifier.closed or waiter.cancelled():
                return row
            try:
                await asyncio.wait_for(waiter.woken.wait(), remaining)
            except TimeoutError:
                return None
            if waiter.cancelled():
                return None
        if notifier.closed or await http.is_disconnected():  # a job must not be leased to an agent that is gone
            return None


def _job(row: JobRow) -> p.Job:
    assert row.epoch is not None, "a claimed job has an epoch"
    deadline_s = row.payload.deadline_s + row.payload.cool_down_s + _JOB_OVERHEAD_S
    return p.Job(id=row.id, epoch=row.epoch, round=row.payload, deadline_s=deadline_s)


def _require_storable(message: BaseModel) -> None:
    """Refuses values that are JSON in Python only: NaN, lone surrogates."""
    try:
        canonical_json(message.model_dump(mode="json")).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"no JSON that can be stored: {str(error)!a}") from None


class _File(FileResponse):
    """Streams the file, or the requested range; an `If-Range` of another content gets all of it."""

    media_type = "application/octet-stream"
    chunk_size = 256 << 10
    max_ranges = 1


def _send_file(store: Store, find_file: FindFile, sha256: str, caller: str | None) -> Response:
    """Sends a file to the agent `caller`; to this machine's agent (None) only its path.

    Raises:
        HTTPException: 403, no job that the agent holds needs it; 404, there is no such file.
        InfrastructureFailed: a job needs it, and it is gone.
    """
    if caller is not None and not any(sha256 in job.payload.files for job in jobs.held(store, caller)):
        raise HTTPException(403, f"no job that agent {caller!r} holds needs {sha256[:12]!r}")
    path = find_file(sha256) if _SHA256.fullmatch(sha256) else None
    if path is None or not path.exists():
        if any(sha256 in job.payload.files for job in jobs.live(store)):
            raise InfrastructureFailed(f"file {sha256[:12]}, which a job needs, is not here any more")
        raise HTTPException(404, f"no file {sha256[:12]!r} here")
    if caller is None:
        # The agent runs on this machine: it reads the file by path and verifies its hash.
        return Response(headers={p.LOCAL_PATH_HEADER: quote(str(path))})
    return _File(path, headers={"ETag": f'"{sha256}"'}, stat_result=path.stat())
