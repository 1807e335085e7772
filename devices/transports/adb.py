"""Android devices over adb, as a `Wire`.

- `adb:SERIAL` through the adb server of this host (`adb start-server`), which owns USB, emulators and wireless
  debugging
- `adb:HOST:PORT` directly to a device, `adb:usb:SERIAL` directly over USB (`adb_device`)

Commands run by the service `exec:`, which every adbd since Android 5 has: exit code and both streams are in the output
of `supervise.sh`, so nothing depends on the shell protocol of Android 7. The output is a terminal in raw mode: bytes
pass unchanged. Files are sent by the service `sync:`; back, `cat` is as fast.

Source: docs/dev of AOSP's packages/modules/adb (services.md, sync.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from pathlib import Path
from typing import Protocol

from nas.core import paths
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.measure.devices.transports.adb_device import AdbConnection, AdbKey, over_tcp, over_usb
from nas.measure.devices.transports.base import NotTrusted
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.wire import SILENT_S, Stream, open_socket

_SERIAL = re.compile(r"[A-Za-z0-9._-]+")
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_USB = re.compile(r"usb:(?P<serial>[A-Za-z0-9._-]+)")
_CHUNK = 1 << 16

_PIECE = 1 << 16
"""The most that the protocol allows in one DATA."""

_PIECES_AT_ONCE = 15
"""With their headers just below 1 MiB, the most that adbd accepts in one packet: each costs a round trip."""

_MODE = 0o100644


def connect(address: str, cache: Path) -> ShellTransport:
    """Returns the transport of the device at `address`; the agent's key is `$NAS_HOME/keys/adb`."""
    return ShellTransport(AdbWire(address, paths.home() / "keys"))


class _Services(Protocol):
    """Opens services of a device."""

    def open(self, service: str) -> Stream: ...

    def close(self) -> None: ...


class AdbWire:
    """A `Wire` over adb.

    Args:
        address: see above.
        keys: folder of the agent's keys.
    """

    folder = "/data/local/tmp/hilnas"

    def __init__(self, address: str, keys: Path) -> None:
        self.name = address
        self._keys = keys
        scheme, _, self._where = address.partition(":")
        if scheme != "adb" or not any(form.fullmatch(self._where) for form in (_SERIAL, _USB, _HOST_PORT)):
            raise InvalidInput(f"device address {address!r}: adb:SERIAL, adb:HOST:PORT or adb:usb:SERIAL is expected")
        self._services: _Services | None = None

    def connect(self) -> None:
        if self._services is not None:
            return
        if usb := _USB.fullmatch(self._where):
            self._services = AdbConnection(self.name, over_usb(usb["serial"]), AdbKey.load(self._keys / "adb"))
        elif direct := _HOST_PORT.fullmatch(self._where):
            transport = over_tcp(direct["host"].strip("[]"), int(direct["port"]))
            self._services = AdbConnection(self.name, transport, AdbKey.load(self._keys / "adb"))
        else:
            self._services = AdbServer(self._where)

    def close(self) -> None:
        if self._services is not None:
            self._services.close()
            self._services = None

    def start(self, command: str) -> Stream:
        return self._open(f"exec:{command}")

    def put(self, local: Path, remote: str) -> None:
        stream = self._open("sync:")
        try:
            push(stream, local, remote, self.name)
        finally:
            stream.close()

    def _open(self, service: str) -> Stream:
        if self._services is None:
            raise InfrastructureFailed(f"{self.name}: not connected")
        return self._services.open(service)


def push(stream: Stream, local: Path, remote: str, name: str) -> None:
    """Copies a file to the device over a stream of the service `sync:`; missing folders are created.

    Raises:
        InfrastructureFailed: the device refuses, or the connection is lost; a partial file may be left.
    """
    stream.write(_request(b"SEND", f"{remote},{_MODE}".encode()))
    with local.open("rb") as file:
        while pieces := [piece for _ in range(_PIECES_AT_ONCE) if (piece := file.read(_PIECE))]:
            stream.write(b"".join(_request(b"DATA", piece) for piece in pieces))
    stream.write(struct.pack("<4sI", b"DONE", int(time.time())))
    answer = _read(stream, 8, name)
    if answer[:4] == b"FAIL":
        size = min(int.from_bytes(answer[4:8], "little"), _PIECE)
        why = _read(stream, 8 + size, name, answer)[8:]
        raise InfrastructureFailed(f"{name}: {why.decode(errors='replace')}")
    if answer[:4] != b"OKAY":
        raise InfrastructureFailed(f"{name}: unexpected {answer[:4]!r} after a file transfer")


def _request(name: bytes, data: bytes) -> bytes:
    return struct.pack("<4sI", name, len(data)) + data


def _read(stream: Stream, size: int, name: str, begun: bytes = b"") -> bytes:
    """Returns at least `size` bytes, those of `begun` included."""
    answer, end = begun, time.monotonic() + SILENT_S
    while len(answer) < size:
        piece = stream.read(1.0)
        answer += piece or b""
        if piece == b"" or time.monotonic() > end:
            raise InfrastructureFailed(f"{name}: the connection ended during a file transfer")
    return answer


class AdbServer:
    """Opens services of one device through the adb server of this host.

    Args:
        serial: as `adb devices` lists it.
    """

    def __init__(self, serial: str) -> None:
        self._serial = serial
        self._host = os.environ.get("ANDROID_ADB_SERVER_ADDRESS", "127.0.0.1")
        self._port = int(os.environ.get("ANDROID_ADB_SERVER_PORT", "5037"))

    def close(self) -> None:
        """Does nothing: no connection is kept between services."""

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
        reason = f"adb:{self._serial}: {why.splitlines()[0] if why else 'refused'}"
        if "unauthorized" in why:
            raise NotTrusted(f"{reason} Accept this computer's key on the device's screen, then try again")
        raise InfrastructureFailed(reason)


class SocketStream:
    """A `Stream` over a socket to the adb server.

    Args:
        opened: owned by the stream from now on.
        name: of the device, for messages.
    """

    def __init__(self, opened: socket.socket, name: str) -> None:
        self._socket, self._name = opened, name

    def read(self, timeout_s: float) -> bytes | None:
        try:
            self._socket.settimeout(timeout_s)
            return self._socket.recv(_CHUNK)
        except TimeoutError:
            return None
        except OSError as error:
            raise InfrastructureFailed(f"{self._name}: {error}") from error

    def exactly(self, size: int) -> bytes:
        """Returns `size` bytes of the server's own answers."""
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
        try:
            self._socket.settimeout(SILENT_S)
            self._socket.sendall(data)
        except OSError as error:
            raise InfrastructureFailed(f"{self._name}: {error}") from error

    def close(self) -> None:
        self._socket.close()
