"""Serves the job API on a Unix socket, from a thread of the launch."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

import uvicorn
from fastapi import FastAPI

from nas.core.errors import InfrastructureFailed

_START_S = 10.0
_STOP_S = 5.0
_LONGEST_SOCKET_PATH = 100
"""Of a Unix socket's 108 bytes."""


class SocketServer:
    """A web application on a Unix socket that only this user can open.

    Args:
        app: the application.
        socket: path of the socket; its folder gets mode 0700.
    """

    def __init__(self, app: FastAPI, socket: Path) -> None:
        if len(str(socket)) > _LONGEST_SOCKET_PATH:
            raise InfrastructureFailed(f"{socket} is too long for a Unix socket; set TMPDIR to a shorter folder")
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.parent.chmod(0o700)
        config = uvicorn.Config(app, uds=str(socket), log_level="warning", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="coordinator", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise InfrastructureFailed("the job API did not start on its Unix socket")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._server.force_exit = True
