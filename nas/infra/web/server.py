"""Web applications with limits, errors and a request log, and the server for them: on a Unix socket, TCP or TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.logs import log_fields
from nas.infra.web.connections import STRANGERS_OF_ALL, STRANGERS_OF_ONE, AcceptingServer, Strangers, authenticated
from nas.infra.web.errors import ErrorBody, documented, fault, install_errors
from nas.infra.web.metrics import REQUEST_SECONDS
from nas.infra.web.tls import is_wildcard

log = logging.getLogger(__name__)
UNAUTHENTICATED_BODY = 4 << 10
"""Bytes of the body of a request that nobody has authenticated: an enrolment or a login."""
BODY = 1 << 20
"""Bytes of the body of an authenticated request, unless its endpoint is marked with `max_body`."""
UNAUTHENTICATED_BODY_S = 5.0
"""Time limit of such a body, in seconds."""
BODY_S = 60.0
"""Time limit of the body of an authenticated request, in seconds."""
REQUEST_ID = "X-Request-Id"
_START_S = 10.0
_DRAIN_S = 10
"""Grace period of requests in progress when the server stops."""
_STOP_S = 2.0
_KEEP_ALIVE_S = 75
"""Timeout of idle connections: longer than agents' pauses, so that a heartbeat needs no new handshake."""
_MAX_HEAD = 16 << 10
_MOST_FILES = 65536
_LONGEST_SOCKET_PATH = 100
"""Of a Unix socket's 108 bytes."""
_GIVEN_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_LIMIT = "hilnas.body_limit"
"""Key of an ASGI scope: bytes of the body that an authenticated request may have."""
_UNROUTED = "none"
"""Label of unknown paths: clients must not be able to create metrics."""
_LOGGED = ("/v1/devices/", "/v1/studies", "/v1/agents/")


def web_app(**settings: Any) -> FastAPI:
    """Returns an application without routes."""
    any_may_fail = documented(408, 413, 422, 503) | {400: {"model": ErrorBody}}
    app = FastAPI(title="hilnas coordinator", docs_url=None, redoc_url=None, responses=any_may_fail, **settings)
    app.add_middleware(BodyLimit, seconds=BODY_S, unauthenticated_s=UNAUTHENTICATED_BODY_S)
    install_errors(app)
    return app


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def max_body(bytes: int) -> Callable[[Endpoint], Endpoint]:
    """Returns a decorator of an endpoint whose authenticated callers may send other bodies than `BODY` bytes."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint._max_body = bytes  # type: ignore[attr-defined]
        return endpoint

    return mark


def allow_body(request: Request, endpoint: Callable[..., Any]) -> None:
    """Raises the limit of a request's body to its endpoint's. Called once its sender is authenticated."""
    request.scope[_LIMIT] = getattr(endpoint, "_max_body", BODY)
    authenticated(request.scope)


class Server:
    """Serves a web application on one listening socket while the context is open.

    Args:
        app: the application.
        listening: the socket; closed at the end.
        tls: certificate and settings; None for none.
    """

    def __init__(self, app: FastAPI, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = (_MOST_FILES if files == resource.RLIM_INFINITY else files) // 2  # of further ones, requests get 503
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
            limit_concurrency=most,
            h11_max_incomplete_event_size=_MAX_HEAD,
        )
        self._listening = listening
        strangers = Strangers(min(STRANGERS_OF_ONE, most // 4), min(STRANGERS_OF_ALL, most // 2))
        self._server = AcceptingServer(config, listening, tls, strangers)
        self._thread = threading.Thread(target=self._server.run, name="coordinator", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self._listening.getsockname()[1])

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise InfrastructureFailed("the web server did not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(_DRAIN_S + _STOP_S)
        self._server.force_exit = True


def listen_unix(path: Path) -> socket.socket:
    """Returns a Unix socket that only this user can open; its folder gets mode 0700.

    Raises:
        InvalidInput: the path is too long.
    """
    if len(str(path)) > _LONGEST_SOCKET_PATH:
        raise InvalidInput(f"{path} is too long for a Unix socket; set TMPDIR to a shorter folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    return listening


def listen_tcp(host: str, port: int) -> socket.socket:
    """Returns a TCP socket bound to `host`, a name or an address of this machine; port 0 takes a free one.

    "::" listens for IPv4 as well, where the system can.

    Raises:
        InvalidInput: there is no such host.
        InfrastructureFailed: the port is taken, or the host is not of this machine.
    """
    if not host:
        raise InvalidInput("name a host or an address; 0.0.0.0 or ::: all interfaces", where="--host")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = is_wildcard(str(address[0])) and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address[:2], family=family, dualstack_ipv6=both)
        # Inherited by connections. asyncio sets it only where a socket names its protocol, which this one does not;
        # without it the body of an answer waits 40 ms for the acknowledgement of its head.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        raise InvalidInput(f"{host!r} is no host or address of this machine: {reason}", where="--host") from error
    except OSError as error:
        raise InfrastructureFailed(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from error


class BodyLimit:
    """ASGI middleware that limits bodies, by their `Content-Length` and by what is received.

    Until `allow_body` is called for a request, its body may have `UNAUTHENTICATED_BODY` bytes. Answers 413 for a larger
    one, and 408 for one that is too slow. After an answer that was given before the body was read, the connection is
    closed: the client cannot keep sending.

    Args:
        app: the application.
        seconds: time limit of the whole body, from its first read.
        unauthenticated_s: of a body that is read before its sender is authenticated.
    """

    def __init__(self, app: ASGIApp, seconds: float, unauthenticated_s: float) -> None:
        self._app = app
        self._seconds, self._unauthenticated_s = seconds, unauthenticated_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, counting the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("Content-Length", "0")
        read, deadline, seconds = 0, 0.0, 0.0
        whole = declared == "0" and "Transfer-Encoding" not in headers

        async def counted() -> Message:
            nonlocal read, whole, deadline, seconds
            if whole:
                return await receive()  # returns when the client disconnects
            now = asyncio.get_running_loop().time()
            if not deadline:
                _require_at_most(scope, int(declared) if declared.isdecimal() else 0)
                seconds = self._seconds if _LIMIT in scope else self._unauthenticated_s
                deadline = now + seconds
            try:
                message = await asyncio.wait_for(receive(), deadline - now)
            except TimeoutError:
                raise HTTPException(408, f"not whole after {seconds:g} s") from None
            read += len(message.get("body", b""))
            _require_at_most(scope, read)
            whole = not message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not whole:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, counted, closing)


class RequestLog:
    """ASGI middleware that logs and counts requests; the outermost, so that it sees refused ones.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on and logs its status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, answered = time.monotonic(), 500, False
        header = Headers(scope=scope).get(REQUEST_ID, "")
        scope["request_id"] = request_id = header if _GIVEN_ID.fullmatch(header) else secrets.token_hex(8)

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
                # Unexpected errors only. The client gets the request id and no detail.
                log.exception("%s %s failed", scope["method"], scope["path"])
                if not answered:
                    await fault(Request(scope))(scope, receive, noted)
            finally:
                _log(scope, status, time.monotonic() - started)


def _require_at_most(scope: Scope, bytes: int) -> None:
    limit = scope.get(_LIMIT, UNAUTHENTICATED_BODY)
    if bytes > limit:
        raise HTTPException(413, f"more than {limit} bytes")


def raise_file_limit() -> None:
    """Lets this process open as many files as its user may let it: shells start with few for old programs' sake."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if files != resource.RLIM_INFINITY and files < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _log(scope: Scope, status: int, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", _UNROUTED)
    method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS") else "other"
    REQUEST_SECONDS.labels(method, route, str(status)).observe(seconds)
    caller = scope.get("state", {}).get("caller")
    fields = {"status": status, "ms": round(seconds * 1000, 1), "route": route, "caller": caller}
    # Successful requests are logged only if a person changed something: agents poll several times a second.
    notable = status >= 400 or (method != "GET" and scope["path"].startswith(_LOGGED))
    level = logging.WARNING if status >= 500 else logging.INFO if notable else logging.DEBUG
    log.log(level, "%s %s", method, scope["path"], extra={"fields": fields})
