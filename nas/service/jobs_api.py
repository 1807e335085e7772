"""The coordinator's job API: what agents talk to (`nas.core.protocol`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from nas.core import protocol as p
from nas.core.canonical import canonical_json
from nas.core.errors import InvalidInput
from nas.core.manifest import SignedManifest
from nas.service import downloads
from nas.service.agent_access import DOCUMENTED, Access, Caller, SocketAccess, guarded, require_own
from nas.service.api_errors import documented
from nas.service.downloads import FindFile
from nas.service.metrics import RESULTS
from nas.service.off_loop import off_loop
from nas.service.watch import Watch
from nas.service.web import web_app
from nas.store import agents, devices, identity, jobs, outcomes, presence
from nas.store.outcomes import Verdict
from nas.store.presence import Renewal
from nas.store.rows import JobRow
from nas.store.store import Store

POLL_S = 20.0
HEARTBEAT_S = 5.0

_RENEW_BELOW_S = jobs.LEASE_S * 2 / 3
"""Left of a lease when a heartbeat prolongs it; others only ask whether the job is still wanted."""

_JOB_OVERHEAD_S = 120.0

ReadManifest = Callable[[], SignedManifest | None]
Suspect = Callable[[str], None]
"""Takes the id of a job."""


def make_app(
    store: Store, find_file: FindFile, watch: Watch, manifest: ReadManifest, suspect: Suspect | None = None
) -> FastAPI:
    """The application for a Unix socket, whose permissions are its access control; see `router`."""
    app = web_app(openapi_url=None)
    app.include_router(router(store, find_file, watch, manifest, SocketAccess(), suspect))
    return app


def router(
    store: Store, find_file: FindFile, watch: Watch, manifest: ReadManifest, access: Access,
    suspect: Suspect | None = None,
) -> APIRouter:  # fmt: skip
    """The routes of agents that may already speak.

    Args:
        store: where jobs are.
        find_file: content hash -> path on this machine.
        watch: calls lease requests when there is work, and prolongs leases; its bell is rung when jobs end.
        manifest: reads the runner manifest; None before the first runner was admitted.
        access: tells which agent asks.
        suspect: told of jobs whose files did not come to an agent as they should; None: nobody looks at them.
    """
    settings: dict[str, Any] = {"dependencies": [DOCUMENTED], "responses": documented(401, 403, 404)}
    routes = APIRouter(route_class=guarded(access), tags=["agents"], **settings)

    @routes.post(p.REGISTER_PATH)
    async def register(request: p.RegisterRequest, caller: Caller) -> p.RegisterReply:
        """Make an agent and its devices known; replaces what it said before.

        A device that is not named any more is offline, and a lease request that waits for it is answered.
        """
        require_own(caller, request.agent)
        reply = await off_loop(_register, store, request, local=caller is None)
        watch.doorbell.dismiss(request.agent, {device.id for device in request.devices})
        watch.doorbell.ring()
        return reply

    @routes.post(p.LEASE_PATH)
    async def lease(request: p.LeaseRequest, caller: Caller, http: Request) -> p.LeaseReply:
        """Wait for a job for one device, and take it."""
        require_own(caller, request.agent)
        row = await _claim(store, watch, request, http)
        return p.LeaseReply(job=_job(row) if row else None)

    @routes.post(p.HEARTBEAT_PATH)
    async def heartbeat(request: p.HeartbeatRequest, caller: Caller) -> p.HeartbeatReply:
        """Renew the lease of a running job, and learn whether it is still wanted."""
        require_own(caller, request.agent)
        return p.HeartbeatReply(cancel=not await off_loop(_renew, store, watch, request))

    @routes.post(p.RESULT_PATH)
    async def result(job: p.JobId, request: p.ResultRequest, caller: Caller) -> p.ResultReply:
        """Hand in a job's result or failure; the same again is accepted again and counts once."""
        require_own(caller, request.agent)
        verdict = await off_loop(_end, store, job, request)
        if suspect is not None and request.failure is not None and not request.failure.reached_device:
            suspect(job)
        watch.doorbell.ring()
        RESULTS.add("accepted" if verdict.accepted else "refused")
        return p.ResultReply(accepted=verdict.accepted, reason=verdict.reason)

    @routes.get(p.MANIFEST_PATH)
    async def runners() -> SignedManifest:
        """The signed list of runners that agents may run."""
        signed = await off_loop(manifest)
        if signed is None:
            raise HTTPException(404, "no runner was admitted yet")
        return signed

    @routes.get(p.FILE_PATH, response_class=Response, responses=downloads.ANSWERS)
    async def file(sha256: str, caller: Caller) -> Response:
        """A file that a job needs which the agent holds now, or a range of it."""
        return await off_loop(downloads.answer, store, find_file, sha256, caller)

    return routes


def _register(store: Store, request: p.RegisterRequest, *, local: bool) -> p.RegisterReply:
    _require_storable(request)
    if local:
        agents.register_local(store, request.agent)
    devices.register(store, request.agent, request.devices, boot_id=request.boot_id)
    return p.RegisterReply(authority=identity.authority(store), poll_s=POLL_S, heartbeat_s=HEARTBEAT_S)


def _end(store: Store, job: str, request: p.ResultRequest) -> Verdict:
    _require_storable(request)
    of = (store, job, request.device, request.agent, request.epoch)
    if request.result is not None:
        return outcomes.submit(*of, request.result)
    assert request.failure is not None, "the message holds one of both"
    return outcomes.fail(*of, request.failure)


def _renew(store: Store, watch: Watch, request: p.HeartbeatRequest) -> bool:
    of = (request.job, request.device, request.agent, request.epoch)
    until = presence.held_until(store, *of, request.phase)
    if until is None:
        return jobs.renew(store, *of, phase=request.phase)
    if until - store.now() < _RENEW_BELOW_S:
        watch.renew(Renewal(request.job, request.device, request.agent, request.epoch))
    return True


async def _claim(store: Store, watch: Watch, request: p.LeaseRequest, http: Request) -> JobRow | None:
    doorbell = watch.doorbell
    deadline = time.monotonic() + min(request.wait_s, POLL_S)
    while True:
        with doorbell.waiting(request.device, request.agent) as caller:
            row = await off_loop(jobs.claim, store, request.device, request.agent)
            watch.heard(request.agent, request.device)
            left = deadline - time.monotonic()
            if row is not None or left <= 0 or doorbell.closed or caller.dismissed():
                return row
            try:
                await asyncio.wait_for(caller.called.wait(), left)
            except TimeoutError:
                return None
            if caller.dismissed():
                return None
        if doorbell.closed or await http.is_disconnected():  # a job must not be leased to who is gone
            return None


def _require_storable(message: BaseModel) -> None:
    """Refuses numbers and characters that JSON knows in Python only: NaN, lone surrogates."""
    try:
        canonical_json(message.model_dump(mode="json")).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"no JSON that can be stored: {str(error)!a}") from None


def _job(row: JobRow) -> p.Job:
    round_ = row.payload
    each = round_.candidate.deadline_s + (round_.reference.deadline_s if round_.reference else 0.0)
    assert row.epoch is not None, "a claimed job has an epoch"
    return p.Job(
        id=row.id, epoch=row.epoch, round=round_,
        deadline_s=round_.repetitions * each + round_.cool_down_s + _JOB_OVERHEAD_S,
    )  # fmt: skip
