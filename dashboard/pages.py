"""Shared parts of all pages: templates, security headers, authentication, readable errors.

A page is a view-model that is rendered twice: as HTML under its path, and as JSON under the same path with `.json`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from nas.core.errors import NasError
from nas.core.scoring import SURE
from nas.core.units import show_count, show_number, show_share, show_spread
from nas.infra.web.errors import answer_to
from nas.infra.web.off_loop import off_loop
from nas.infra.web.server import allow_body
from nas.serve.dashboard import layout_svg, plots
from nas.serve.dashboard.access import PageAccess, Visitor
from nas.serve.dashboard.filters import FILTERS, between, harmless, hue, show_bytes
from nas.serve.views.candidate import FEWEST, MOST

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
_NO_STORE = "no-store"
LEAST_COMPRESSED = 1000
"""Fewest bytes of a body that is compressed."""
LEVEL = 5
"""Of gzip."""
_COMPRESSIBLE = ("text/", "application/json", "image/svg+xml")
"""Beginnings of the types that are compressed."""
GZIPPED = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
_LONGEST_NEXT = 1000
"""Characters of a page's address that a login returns to: the login form must fit in `UNAUTHENTICATED_BODY`."""

_templates = Environment(
    loader=PackageLoader("nas.serve.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=harmless,
)
_templates.filters |= FILTERS
_templates.globals |= {
    "SURE": SURE,
    "count": show_count,
    "bytes": show_bytes,
    "shown": show_number,
    "between": between,
    "spread": show_spread,
    "percent": show_share,
    "hue": hue,
    "layouts": layout_svg,
    "plots": plots,
    "fewest": FEWEST,
    "most": MOST,
}


def render(template: str, **values: Any) -> str:
    """Renders a template."""
    return _templates.get_template(template).render(**values)


def page(template: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    """Renders a template for the visitor of the request."""
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    return HTMLResponse(render(template, visitor=visitor, path=request.url.path, **values), status)


def answer(template: str, request: Request, view: BaseModel, **values: Any) -> Response:
    """Renders the view as JSON if the path ends in `.json`, else as the page, which may need further `values`."""
    if request.url.path.endswith(".json"):
        return Response(view.model_dump_json(), media_type="application/json")
    return page(template, request, view=view, **values)


def page_route(access: PageAccess, *, public: bool = False, anonymous: bool = False) -> type[APIRoute]:
    """Returns a class of routes that authenticate visitors, answer errors as pages, and set the security headers.

    Args:
        access: authenticates visitors.
        public: visitors need not be authenticated.
        anonymous: nor is it asked who they are; all get the same.
    """

    class PageRoute(APIRoute):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            if self.methods and "GET" in self.methods:
                self.methods.add("HEAD")

        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                access.require_host(request)
                visitor = None if anonymous else await access.visitor(request)
                request.state.visitor = visitor
                if visitor is None and not public:
                    return _log_in(request)
                if visitor is not None:
                    allow_body(request, self.endpoint)
                request.state.caller = visitor.name if visitor else None
                return await handle(request)

            async def dressed(request: Request) -> Response:
                try:
                    response = await guarded(request)
                except (NasError, HTTPException, RequestValidationError) as error:
                    response = _error(request, error)
                for name, value in HEADERS.items():
                    response.headers[name] = value
                response.headers.setdefault("Cache-Control", _NO_STORE)
                if takes_gzip(request) and "Content-Encoding" not in response.headers:
                    await _compress(response)
                return response

            return dressed

    return PageRoute


def takes_gzip(request: Request) -> bool:
    """Returns whether the client accepts gzip."""
    return "gzip" in request.headers.get("Accept-Encoding", "")


async def _compress(response: Response) -> None:
    """Compresses the body of a page, script or table; files that are sent from the disk have no body here.

    An attacker who can make a visitor's browser ask for pages could guess secrets in them by their lengths (BREACH);
    the cookie's SameSite=Strict keeps other sites from that.
    """
    body = getattr(response, "body", b"")
    if len(body) < LEAST_COMPRESSED or not response.headers.get("Content-Type", "").startswith(_COMPRESSIBLE):
        return
    response.body = await off_loop(gzip.compress, body, LEVEL, mtime=0)
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Length"] = str(len(response.body))
    response.headers.add_vary_header("Accept-Encoding")


def _log_in(request: Request) -> Response:
    if not _wants_page(request):
        raise HTTPException(401, "log in at /login first")
    if request.method != "GET":
        return RedirectResponse("/login", 303)
    query = f"?{request.url.query}" if request.url.query else ""
    goal = quote(request.url.path + query, safe="")
    return RedirectResponse(f"/login?next={goal}" if len(goal) <= _LONGEST_NEXT else "/login", 303)


def _error(request: Request, error: NasError | HTTPException | RequestValidationError) -> Response:
    failure = answer_to(request, error)
    if not _wants_page(request):
        return failure
    message = json.loads(bytes(failure.body))["error"]
    title = HTTPStatus(failure.status_code).phrase
    response = page("error.html", request, failure.status_code, title=title, message=message)
    for name in ("WWW-Authenticate", "Retry-After"):
        if name in failure.headers:
            response.headers[name] = failure.headers[name]
    return response


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("Accept", "") and not request.url.path.endswith(".json")
