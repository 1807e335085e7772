"""The coordinator's job API: what agents talk to (`nas.core.protocol`)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import Request

from nas.core import protocol as p
from nas.core.canonical import canonical_json
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.manifest import SignedManifest
from nas.service.body_limit import BodyLimit
from nas.store import agents, devices, identity, jobs, outcomes
from nas.store.rows import JobRow
from nas.store.store import Store

POLL_S = 20.0
HEARTBEAT_S = 5.0
_IDLE_LOOK_S = 2.0
"""Between looks at the database for jobs that another process queued."""

MAX_BODY = 64 << 20
"""Bytes of a request: a round's raw output is kept up to 1 MiB a run."""

_JOB_OVERHEAD_S = 120.0
_SHA256 = re.compile(r"[0-9a-f]{64}")

FindFile = Callable[[str], Path | None]
ReadManifest = Callable[[], SignedManifest | None]


class Doorbell:
    """Wakes waiting lease requests when a job is queued, and waiting stages when one ends."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung = 0

    def ring(self) -> None:
        """Something changed."""
        with self._condition:
            self._rung += 1
            self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """Waits until it was rung more than `seen` times, or for `seconds`; how often it was rung."""
        with self._condition:
            self._condition.wait_for(lambda: self._rung != seen, seconds)
            return self._rung

    @property
    def count(self) -> int:
        """How often it was rung."""
        return self._rung


def make_app(store: Store, find_file: FindFile, doorbell: Doorbell, manifest: ReadManifest) -> FastAPI:
    """The application for a Unix socket, whose permissions are its access control.

    Args:
        store: where jobs are.
        find_file: content hash -> path on this machine.
        doorbell: rung when jobs are queued; rings when they end.
        manifest: reads the runner manifest; None before the first runner was admitted.
    """
    app = FastAPI(title="hilnas coordinator", openapi_url=None)
    app.add_middleware(BodyLimit, limit=MAX_BODY)
    app.add_exception_handler(NasError, _refuse)
    app.add_exception_handler(RequestValidationError, _malformed)

    @app.post(p.REGISTER_PATH)
    def register(request: p.RegisterRequest) -> p.RegisterReply:
        _require_storable(request)
        agents.register_local(store, request.agent)
        devices.register(store, request.agent, request.devices, boot_id=request.boot_id)
        doorbell.ring()
        return p.RegisterReply(authority=identity.authority(store), poll_s=POLL_S, heartbeat_s=HEARTBEAT_S)

    @app.post(p.LEASE_PATH)
    def lease(request: p.LeaseRequest) -> p.LeaseReply:
        row = _claim(store, doorbell, request)
        return p.LeaseReply(job=_job(row) if row else None)

    @app.post(p.HEARTBEAT_PATH)
    def heartbeat(request: p.HeartbeatRequest) -> p.HeartbeatReply:
        ours = jobs.renew(store, request.job, request.device, request.agent, request.epoch, phase=request.phase)
        return p.HeartbeatReply(cancel=not ours)

    @app.post(p.RESULT_PATH)
    def result(job: p.JobId, request: p.ResultRequest) -> p.ResultReply:
        _require_storable(request)
        of = (store, job, request.device, request.agent, request.epoch)
        if request.result is not None:
            verdict = outcomes.submit(*of, request.result)
        else:
            assert request.failure is not None, "the message holds one of both"
            verdict = outcomes.fail(*of, request.failure)
        doorbell.ring()
        return p.ResultReply(accepted=verdict.accepted, reason=verdict.reason)

    @app.get(p.MANIFEST_PATH)
    def runners() -> SignedManifest:
        signed = manifest()
        if signed is None:
            raise HTTPException(404, "no runner was admitted yet")
        return signed

    @app.get(p.FILE_PATH)
    def file(sha256: str) -> Response:
        path = find_file(sha256) if _SHA256.fullmatch(sha256) else None
        if path is None:
            raise HTTPException(404, f"no file {sha256[:12]} here")
        # The agent shares this machine: it takes the file by path and verifies its hash.
        return Response(status_code=200, headers={p.LOCAL_PATH_HEADER: quote(str(path))})

    return app


def _refuse(request: Request, error: Exception) -> JSONResponse:
    status = 503 if isinstance(error, InfrastructureFailed) else 404 if isinstance(error, UnknownName) else 422
    return JSONResponse({"error": str(error)}, status)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    # Without what was sent: that may be anything, and need not even be text.
    return JSONResponse({"error": ascii(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")}, 422)


def _require_storable(message: BaseModel) -> None:
    """Refuses numbers and characters that JSON knows in Python only: NaN, lone surrogates."""
    try:
        canonical_json(message.model_dump(mode="json")).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"no JSON that can be stored: {str(error)!a}") from None


def _claim(store: Store, doorbell: Doorbell, request: p.LeaseRequest) -> JobRow | None:
    deadline = time.monotonic() + min(request.wait_s, POLL_S)
    while True:
        seen = doorbell.count
        outcomes.expire(store)
        row = jobs.claim(store, request.device, request.agent)
        left = deadline - time.monotonic()
        if row is not None or left <= 0:
            return row
        doorbell.wait(seen, min(left, _IDLE_LOOK_S))


def _job(row: JobRow) -> p.Job:
    round_ = row.payload
    each = round_.candidate.deadline_s + (round_.reference.deadline_s if round_.reference else 0.0)
    assert row.epoch is not None, "a claimed job has an epoch"
    return p.Job(
        id=row.id, epoch=row.epoch, round=round_,
        deadline_s=round_.repetitions * each + round_.cool_down_s + _JOB_OVERHEAD_S,
    )  # fmt: skip
