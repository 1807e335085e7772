"""The adb server of this host (`adb start-server`), for devices that it owns: USB, emulators, wireless debugging."""

from __future__ import annotations

import contextlib
import os
import socket

from nas.core.errors import InfrastructureFailed
from nas.devices.transports.base import NotTrusted
from nas.devices.transports.wire import SILENT_S, open_socket

_CHUNK = 1 << 16


class AdbServer:
    """Opens services of one device.

    Args:
        serial: as `adb devices` lists it.
    """

    def __init__(self, serial: str) -> None:
        self._serial = serial
        self._host = os.environ.get("ANDROID_ADB_SERVER_ADDRESS", "127.0.0.1")
        self._port = int(os.environ.get("ANDROID_ADB_SERVER_PORT", "5037"))

    def close(self) -> None:
        """Nothing is kept between services."""

    def open(self, service: str) -> SocketStream:
        """Starts a service of the device.

        Raises:
            InfrastructureFailed: no server, or it does not reach the device.
            NotTrusted: the device does not accept the server's key.
        """
        try:
            opened = open_socket(self._host, self._port)
        except InfrastructureFailed as error:
            raise InfrastructureFailed(
                f"adb:{self._serial}: no adb server ({error}); run `adb start-server`"
            ) from error
        stream = SocketStream(opened, f"adb:{self._serial}")
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(stream.close)
            for request in (f"host:transport:{self._serial}", service):
                self._ask(stream, request.encode())
            on_failure.pop_all()
        return stream

    def _ask(self, stream: SocketStream, request: bytes) -> None:
        stream.write(b"%04x%b" % (len(request), request))
        if stream.exactly(4) == b"OKAY":
            return
        why = stream.exactly(int(stream.exactly(4), 16)).decode(errors="replace")
        told = f"adb:{self._serial}: {why.splitlines()[0] if why else 'refused'}"
        if "unauthorized" in why:
            raise NotTrusted(f"{told} Accept this computer's key on the device's screen, then try again")
        raise InfrastructureFailed(told)


class SocketStream:
    """See `Stream`.

    Args:
        opened: becomes the stream's own.
        name: of the device, for messages.
    """

    def __init__(self, opened: socket.socket, name: str) -> None:
        self._socket, self._name = opened, name

    def read(self, timeout_s: float) -> bytes | None:
        """See `Stream.read`."""
        try:
            self._socket.settimeout(timeout_s)
            return self._socket.recv(_CHUNK)
        except TimeoutError:
            return None
        except OSError as error:
            raise InfrastructureFailed(f"{self._name}: {error}") from error

    def exactly(self, size: int) -> bytes:
        """`size` bytes of the server's own answers."""
        answer = b""
        while len(answer) < size:
            try:
                self._socket.settimeout(SILENT_S)
                piece = self._socket.recv(size - len(answer))
            except OSError as error:
                raise InfrastructureFailed(f"{self._name}: the adb server: {error}") from error
            if not piece:
                raise InfrastructureFailed(f"{self._name}: the adb server hung up")
            answer += piece
        return answer

    def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        try:
            self._socket.settimeout(SILENT_S)
            self._socket.sendall(data)
        except OSError as error:
            raise InfrastructureFailed(f"{self._name}: {error}") from error

    def close(self) -> None:
        """See `Stream.close`."""
        self._socket.close()
