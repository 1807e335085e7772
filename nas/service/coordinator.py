"""Serves a web application from a thread: on a Unix socket, or over TLS."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from nas.core.errors import InfrastructureFailed
from nas.service.patience import PatientProtocol

_START_S = 10.0
_DRAIN_S = 10
"""Requests in progress get so long to end when the server does."""

_STOP_S = 2.0
_KEEP_ALIVE_S = 75
"""Of idle connections: longer than agents pause, so that a heartbeat costs no handshake."""

_MAX_CONNECTIONS = 8192
"""More are answered 503. An agent needs two for each of its devices: one polls, one beats."""

_MAX_HEAD = 16 << 10
_LONGEST_SOCKET_PATH = 100
"""Of a Unix socket's 108 bytes."""


# asyncio sets aside 256 KiB for each TLS connection, open or idle: half a gigabyte for a thousand agents.
SSLProtocol.max_size = 32 << 10


class Server:
    """A web application on one listening socket, while the context is open.

    Args:
        app: the application.
        listening: the socket; closed at the end.
        tls: certificate and settings; None for none.
    """

    def __init__(self, app: FastAPI, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        settings: dict[str, Any] = {"ssl_context_factory": lambda config, default: tls} if tls else {}
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEAD,
            **settings,
        )
        self._listening = listening
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="coordinator", daemon=True)

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
    """A Unix socket that only this user can open; its folder gets mode 0700.

    Raises:
        InfrastructureFailed: the path is too long.
    """
    if len(str(path)) > _LONGEST_SOCKET_PATH:
        raise InfrastructureFailed(f"{path} is too long for a Unix socket; set TMPDIR to a shorter folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    return listening


def listen_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket on `host`, a name or an address of this machine; port 0 takes any that is free.

    Raises:
        InfrastructureFailed: the port is taken, or the host is not of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
        # Inherited by connections. asyncio sets it only where a socket names its protocol, which this one does not;
        # without it the body of an answer waits 40 ms for the acknowledgement of its head.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise InfrastructureFailed(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from error
