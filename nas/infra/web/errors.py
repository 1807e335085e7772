"""Errors over HTTP, all in one JSON form."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request

from nas.core.errors import InfrastructureFailed, NasError, UnknownName
from nas.core.logs import visible
from nas.infra.store.devices import NotServed

ErrorKind = Literal[
    "invalid_input",
    "unknown_name",
    "conflict",
    "infrastructure",
    "unauthenticated",
    "forbidden",
    "not_found",
    "method_not_allowed",
    "too_large",
    "too_many",
    "internal",
]
"""infrastructure: the same request may succeed later. internal: a fault of the coordinator, which has logged it."""

_KIND_OF: dict[int, ErrorKind] = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    429: "too_many",
    500: "internal",
    503: "infrastructure",
}


class ErrorBody(BaseModel):
    """The body of every error."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": "unknown device 'pixel'; did you mean 'pixel-7'?",
                    "kind": "unknown_name",
                    "request_id": "5f0c6d2a9be14d31",
                }
            ]
        }
    )

    error: str = Field(description="what is wrong and what would be valid; for a search space, a line each problem")
    kind: ErrorKind
    request_id: str | None = Field(None, description="as in the header X-Request-Id and in the coordinator's log")


class Conflict(NasError):
    """The request contradicts the present state."""


def install_errors(app: FastAPI) -> None:
    """Answers every error that the application raises with an `ErrorBody`."""
    app.add_exception_handler(NasError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)


def answer_to(request: Request, error: NasError | HTTPException | RequestValidationError) -> JSONResponse:
    """Returns the answer to a request that failed with `error`."""
    if isinstance(error, NasError):
        return _refused(request, error)
    return _malformed(request, error) if isinstance(error, RequestValidationError) else _http(request, error)


def fault(request: Request) -> JSONResponse:
    """Returns the answer to an unexpected failure, whose cause is only in the log."""
    return _answer(request, 500, "the coordinator failed; its log says why, under this request's id")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns `responses` for operations of a `web_app` that may answer with these statuses.

    They refer to the schema of `ErrorBody`, which `web_app` adds: FastAPI makes a serializer of each `model` here.
    """
    schema = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
    return {status: {"content": {"application/json": {"schema": schema}}} for status in statuses}


def _refused(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownName):
        return _answer(request, 404, str(error), "unknown_name")
    if isinstance(error, InfrastructureFailed):
        return _answer(request, 503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, Conflict):
        return _answer(request, 409, str(error))
    if isinstance(error, NotServed):
        return _answer(request, 403, str(error))
    return _answer(request, 422, str(error), "invalid_input")


def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    # Without the input, which may be anything.
    return _answer(request, 422, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", "invalid_input")


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _answer(request, error.status_code, str(error.detail), headers=error.headers)


def _answer(
    request: Request, status: int, message: str, kind: ErrorKind | None = None, headers: Any = None
) -> JSONResponse:
    body = ErrorBody(
        error=visible(message, keep="\n"),
        kind=kind or _KIND_OF.get(status, "invalid_input"),
        request_id=request.scope.get("request_id"),
    )
    return JSONResponse(body.model_dump(), status, headers)
