"""A byte stream to a device's shell, which differs by connection. `ShellTransport` makes a `Transport` of a `Wire`."""

from __future__ import annotations

import socket
from typing import Protocol

from nas.core.errors import InfrastructureFailed

CONNECT_S = 10.0
"""A device that does not answer within this time is unreachable."""

SILENT_S = 15
"""A connection on which sent data stays unacknowledged this long is lost."""


class Stream(Protocol):
    """A running command: its input and its output.

    Every method but `close` raises `InfrastructureFailed` if the connection is lost.
    """

    def read(self, timeout_s: float) -> bytes | None:
        """Returns the next bytes; empty at the end, `None` if nothing came within `timeout_s`."""

    def write(self, data: bytes) -> None:
        """Writes all of `data` to the command's standard input."""

    def close(self) -> None:
        """Closes the command's standard input and discards its output. Never fails."""


class Wire(Protocol):
    """Starts shell commands on a device.

    Methods raise `InfrastructureFailed` if the device cannot be reached, `NotTrusted` if one side does not trust the
    other, `Unsupported` if the device lacks a service.

    Attributes:
        name: the device's address, for messages.
        folder: where hilnas keeps its files on the device; absolute, or relative to where a shell starts.
    """

    name: str
    folder: str

    def connect(self) -> None:
        """Connects; does nothing if connected."""

    def close(self) -> None:
        """Disconnects; does nothing if closed. Running commands see the end of their standard input."""

    def start(self, command: str) -> Stream:
        """Starts a command line in the device's shell. The stream must be closed before the next one is started."""


def open_socket(host: str, port: int) -> socket.socket:
    """Opens a TCP connection that reports within `SILENT_S` when the other side has vanished.

    Raises:
        InfrastructureFailed: no answer.
    """
    try:
        opened = socket.create_connection((host, port), CONNECT_S)
    except (OSError, UnicodeError) as error:  # the second for what can be no name, such as "a..b"
        raise InfrastructureFailed(f"{host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 3)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 3)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
    return opened


def open_unix_socket(path: str) -> socket.socket:
    """Connects to a socket in the file system.

    Raises:
        InfrastructureFailed: nobody listens.
    """
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(CONNECT_S)
    try:
        opened.connect(path)
    except OSError as error:
        opened.close()
        raise InfrastructureFailed(f"{path}: {error.strerror or error}") from error
    return opened
