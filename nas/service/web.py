"""What the coordinator's applications share: bounded requests, and errors as JSON with one key, `error`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request

from nas.core.errors import InfrastructureFailed, NasError, UnknownName
from nas.service.body_limit import BodyLimit
from nas.store.devices import NotServed

MAX_BODY = 64 << 20
"""Bytes of a request: a round's raw output is kept up to 1 MiB a run."""

BODY_S = 60.0
"""Seconds in which a request must arrive whole."""


def web_app(**settings: Any) -> FastAPI:
    """An application without routes."""
    app = FastAPI(title="hilnas coordinator", docs_url=None, redoc_url=None, **settings)
    app.add_middleware(BodyLimit, limit=MAX_BODY, seconds=BODY_S)
    app.add_exception_handler(NasError, _refuse)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(StarletteHTTPException, _plain)
    return app


def _refuse(request: Request, error: Exception) -> JSONResponse:
    known = {InfrastructureFailed: 503, UnknownName: 404, NotServed: 403}
    status = next((status for kind, status in known.items() if isinstance(error, kind)), 422)
    return JSONResponse({"error": str(error)}, status)


def _plain(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    # Without what was sent: that may be anything, and need not even be text.
    return JSONResponse({"error": ascii(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")}, 422)
