"""What differs between ways to reach a shell: bytes there and back. `ShellTransport` makes a `Transport` of it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from nas.core.errors import InfrastructureFailed

CONNECT_S = 10.0
"""How long a device may take to answer before it counts as unreachable."""

SILENT_S = 15
"""How long a network may swallow what was sent before the connection counts as lost."""


class Stream(Protocol):
    """The running command: its input, and its output.

    Every method but `close` raises `InfrastructureFailed` where the connection is lost.
    """

    def read(self, timeout_s: float) -> bytes | None:
        """What comes next; empty at the end, `None` where nothing came within `timeout_s`."""

    def write(self, data: bytes) -> None:
        """All of `data` into the command's standard input."""

    def close(self) -> None:
        """Lets the command go: its standard input ends and its output is lost. Never fails."""


class Wire(Protocol):
    """A way to start shell commands on a device and to copy files there.

    Methods raise `InfrastructureFailed` where the device cannot be reached, `NotTrusted` where one side does not know
    the other, `Unsupported` where the device lacks a service.

    Attributes:
        name: the device's address, for messages.
        folder: where hilnas keeps its files on the device; relative to where a shell starts, or absolute.
    """

    name: str
    folder: str

    def connect(self) -> None:
        """Reaches the device; harmless when connected."""

    def close(self) -> None:
        """Hangs up; harmless when closed. What runs is told so by the end of its standard input."""

    def start(self, command: str) -> Stream:
        """Starts a command line of the device's shell. The stream is closed before the next one is started."""

    def put(self, local: Path, remote: str) -> None:
        """Copies a file; half a file may be left at `remote`."""


def open_socket(host: str, port: int) -> socket.socket:
    """A TCP connection that notices within `SILENT_S` when the other side is gone without a word.

    Raises:
        InfrastructureFailed: no answer.
    """
    try:
        opened = socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise InfrastructureFailed(f"{host}:{port}: {error.strerror or error}") from error
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 3)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 3)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
    return opened
