"""One log line and one observation for every request, under an id that errors and the answer carry too."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nas.core.logs import log_fields
from nas.service.api_errors import fault
from nas.service.metrics import REQUEST_SECONDS

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
_GIVEN_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_UNROUTED = "none"
"""In place of a path that is no route of ours: strangers' paths must not make metrics of their own."""
_ORDERS = ("/v1/devices/", "/v1/studies", "/v1/agents/")


class RequestLog:
    """ASGI middleware; the outermost, so that it sees what the others refuse.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on and notes how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, answered = time.monotonic(), 500, False
        given = Headers(scope=scope).get(REQUEST_ID, "")
        scope["request_id"] = request_id = given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(8)

        async def noted(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        with log_fields(request=request_id):
            try:
                await self._app(scope, receive, noted)
            except Exception:
                # Nothing that was foreseen gets here. Whoever asked is told no more than where to look.
                log.exception("%s %s failed", scope["method"], scope["path"])
                if not answered:
                    await fault(Request(scope))(scope, receive, noted)
            finally:
                _note(scope, status, time.monotonic() - begun)


def _note(scope: Scope, status: int, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", _UNROUTED)
    method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS") else "other"
    REQUEST_SECONDS.observe(seconds, method, route, str(status))
    caller = scope.get("state", {}).get("caller")
    fields = {"status": status, "ms": round(seconds * 1000, 1), "route": route, "caller": caller}
    # What went well is told of people's orders only: agents ask several times a second.
    told = status >= 400 or (method != "GET" and scope["path"].startswith(_ORDERS))
    level = logging.WARNING if status >= 500 else logging.INFO if told else logging.DEBUG
    log.log(level, "%s %s", method, scope["path"], extra={"fields": fields})
