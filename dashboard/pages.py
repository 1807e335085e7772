"""What all pages share: templates, security headers, who may see them, errors that people can read.

A page is a view-model that is rendered twice: as HTML under its path, and as JSON under the same path with `.json`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from nas.core.errors import NasError
from nas.dashboard.access import PageAccess, Visitor
from nas.dashboard.shown import FILTERS, harmless
from nas.service.api_errors import answer_to
from nas.service.live_reading import BeingRead

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_KEPT_NOWHERE = "no-store"
_AGAIN_S = "1"
"""Until a page asks again that shows how far the reading is."""

_templates = Environment(
    loader=PackageLoader("nas.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=harmless,
)
_templates.filters |= FILTERS


def page(template: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    """A page of one of our templates, for the visitor of the request."""
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    text = _templates.get_template(template).render(visitor=visitor, path=request.url.path, **values)
    return HTMLResponse(text, status)


def part(template: str, **values: Any) -> Markup:
    """A part of pages, the same for every visitor."""
    return Markup(_templates.get_template(template).render(**values))


def answer(template: str, request: Request, view: BaseModel, **values: Any) -> Response:
    """The view as the path asks for it: JSON behind `.json`, else the page, which may need further `values`."""
    if request.url.path.endswith(".json"):
        return Response(view.model_dump_json(), media_type="application/json")
    return page(template, request, view=view, **values)


def page_route(access: PageAccess, *, public: bool = False) -> type[APIRoute]:
    """Routes of pages: ask `access` first, answer errors readably, and set the security headers.

    Args:
        access: tells visitors apart.
        public: strangers may ask, too.
    """

    class PageRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                access.require_host(request)
                visitor = await access.visitor(request)
                request.state.visitor = visitor
                if visitor is None and not public:
                    return _log_in(request)
                request.state.caller = visitor.name if visitor else None
                return await handle(request)

            async def dressed(request: Request) -> Response:
                try:
                    response = await guarded(request)
                except (NasError, HTTPException, RequestValidationError) as error:
                    response = _error(request, error)
                for name, value in HEADERS.items():
                    response.headers[name] = value
                response.headers.setdefault("Cache-Control", _KEPT_NOWHERE)
                return response

            return dressed

    return PageRoute


def is_local_path(path: str) -> bool:
    """Whether a path leads nowhere but to this server."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _log_in(request: Request) -> Response:
    if not _wants_page(request):
        raise HTTPException(401, "log in at /login first")
    if request.method != "GET":
        return RedirectResponse("/login", 303)
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"/login?next={quote(request.url.path + query, safe='')}", 303)


def _error(request: Request, error: NasError | HTTPException | RequestValidationError) -> Response:
    told = answer_to(request, error)
    if not _wants_page(request):
        return told
    if isinstance(error, BeingRead):
        # Not an error to people: the page comes by itself. Scripts asked for JSON, and got 503 with Retry-After.
        shown = page("reading.html", request, 202, reading=error)
        shown.headers["Refresh"] = _AGAIN_S
        return shown
    message = json.loads(bytes(told.body))["error"]
    title = HTTPStatus(told.status_code).phrase
    shown = page("error.html", request, told.status_code, title=title, message=message)
    for name in ("WWW-Authenticate", "Retry-After"):
        if name in told.headers:
            shown.headers[name] = told.headers[name]
    return shown


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("Accept", "") and not request.url.path.endswith(".json")
