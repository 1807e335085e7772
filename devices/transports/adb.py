"""Android devices over adb, as a `Wire`.

- `adb:SERIAL` through the adb server of this host (`adb start-server`), which owns USB, emulators and wireless
  debugging; `adb:usb:1-1.4` through it to the phone on that port, whose serial number others may have, too
- `adb:HOST:PORT` directly to a device, `adb:usb:SERIAL` directly over USB (`adb_device`); where the device wants TLS,
  through the adb server, if that is connected to HOST:PORT

Commands run by the service `exec:`, which every adbd since Android 5 has: exit code and both streams are in the output
of `supervise.sh`, so nothing depends on the shell protocol of Android 7. Bytes pass unchanged both ways.

Source: docs/dev of AOSP's packages/modules/adb (services.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Protocol

from nas.core import paths
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.measure.devices.transports.adb_device import AdbConnection, AdbKey, NeedsTls, Tcp, over_usb
from nas.measure.devices.transports.base import NotTrusted
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.wire import SILENT_S, Stream, open_socket, open_unix_socket

_SERIAL = re.compile(r"[ A-Za-z0-9._?-][A-Za-z0-9._?() -]{0,126}")
"""What `adb devices` prints: some have blanks and parentheses (wireless debugging) or are question marks."""
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_SERVER = re.compile(
    r"tcp:(?:(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})|localfilesystem:(?P<path>/.{1,100})"
)
_PORT = re.compile(r"usb:[0-9]+-[0-9]+([.][0-9]+)*")
"""A USB port as `adb devices -l` lists it: the bus, and the ports of the hubs up to the phone."""
_USB = re.compile(r"usb:(?P<serial>[A-Za-z0-9._-]+)")
_CHUNK = 1 << 16


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
        is_port = _PORT.fullmatch(self._where) is not None
        self._usb = None if is_port else _USB.fullmatch(self._where)
        self._direct = _HOST_PORT.fullmatch(self._where)
        if scheme != "adb" or not (is_port or self._usb or _is_place(self._direct) or _SERIAL.fullmatch(self._where)):
            raise InvalidInput(f"device address {address!r}: adb:SERIAL, adb:HOST:PORT or adb:usb:SERIAL is expected")
        self._services: _Services | None = None

    def connect(self) -> None:
        if self._services is not None:
            return
        if self._usb:
            transport = over_usb(self._usb["serial"])
        elif self._direct:
            transport = Tcp(self._direct["host"].strip("[]"), int(self._direct["port"]))
        else:
            self._services = AdbServer(self._where)
            return
        try:
            self._services = AdbConnection(self.name, transport, AdbKey.load(self._keys / "adb"))
        except NeedsTls:
            server = AdbServer(self._where)  # where `adb connect HOST:PORT` gives a device this serial
            with contextlib.suppress(InfrastructureFailed):
                server.open("exec:true").close()
                self._services = server
            if self._services is None:
                raise

    def close(self) -> None:
        if self._services is not None:
            self._services.close()
            self._services = None

    def start(self, command: str) -> Stream:
        if self._services is None:
            raise InfrastructureFailed(f"{self.name}: not connected")
        return self._services.open(f"exec:{command}")


def _is_place(place: re.Match[str] | None) -> bool:
    """Returns whether an address was matched whose port, if it has one, exists: sockets take others modulo 65536."""
    return place is not None and int(place["port"] or 0) < 1 << 16


_REMEDIES = (
    ("unauthorized", "accept this computer's key on the device's screen, then try again"),
    ("authorizing", "accept this computer's key on the device's screen, then try again"),
    ("offline", "`adb reconnect offline`, or plug it in again"),
    (
        "permissions",
        "Linux lets another user have the USB device: install your distribution's adb udev rules, join the "
        "group plugdev, then plug it in again",
    ),
    ("closed", "is it in recovery or sideload mode? Start Android, with USB debugging on"),
    ("not found", "`adb devices` lists what the server has"),
    ("more than one", "address it by its port, such as adb:usb:1-1.4; `adb devices -l` lists them"),
    ("connecting", "try again in a moment"),
)
"""What a server's refusal contains, and what helps."""


class AdbServer:
    """Opens services of one device through the adb server of this host.

    The server is found as adb finds it: by ADB_SERVER_SOCKET (`tcp:PORT`, `tcp:HOST:PORT` or `localfilesystem:PATH`),
    or by ANDROID_ADB_SERVER_ADDRESS and ANDROID_ADB_SERVER_PORT.

    Args:
        serial: as `adb devices` lists it.

    Raises:
        InfrastructureFailed: these variables name no server.
    """

    def __init__(self, serial: str) -> None:
        self._name, self._serial = f"adb:{serial}", serial
        server = os.environ.get("ADB_SERVER_SOCKET") or ":".join(
            (
                "tcp",
                os.environ.get("ANDROID_ADB_SERVER_ADDRESS") or "127.0.0.1",
                os.environ.get("ANDROID_ADB_SERVER_PORT") or "5037",
            )
        )
        place = _SERVER.fullmatch(server)
        if place is None or not _is_place(place):
            raise InfrastructureFailed(
                f"{self._name}: ADB_SERVER_SOCKET or ANDROID_ADB_SERVER_PORT: {server!r} is no adb server; "
                "tcp:HOST:PORT, tcp:PORT or localfilesystem:PATH is expected"
            )
        self._server, self._place = server, place

    def close(self) -> None:
        """Does nothing: no connection is kept between services."""

    def open(self, service: str) -> SocketStream:
        """Starts a service of the device.

        Raises:
            InfrastructureFailed: no server, or it does not reach the device.
            NotTrusted: the device does not accept the server's key.
        """
        stream = SocketStream(self._reach(), self._name)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(stream.close)
            for request in (f"host:transport:{self._serial}", service):
                self._ask(stream, request.encode())
            on_failure.pop_all()
        return stream

    def _reach(self) -> socket.socket:
        place, host = self._place, (self._place["host"] or "127.0.0.1").strip("[]")
        try:
            return open_unix_socket(place["path"]) if place["path"] else open_socket(host, int(place["port"]))
        except InfrastructureFailed as error:
            local = host in ("localhost", "127.0.0.1", "::1")
            remedy = "run `adb start-server`" if local else "start it there with `adb -a server`"
            raise InfrastructureFailed(f"{self._name}: no adb server ({error}); {remedy}") from error

    def _ask(self, stream: SocketStream, request: bytes) -> None:
        stream.write(b"%04x%b" % (len(request), request))
        status = stream.exactly(4)
        if status == b"OKAY":
            return
        size = stream.exactly(4) if status == b"FAIL" else b""
        if not re.fullmatch(rb"[0-9a-fA-F]{4}", size):
            raise InfrastructureFailed(f"{self._name}: {self._server} is no adb server: it answers {status + size!r}")
        why = " ".join(stream.exactly(int(size, 16)).decode(errors="replace").split()) or "refused"
        remedy = next((f"; {remedy}" for words, remedy in _REMEDIES if words in why), "")
        trusted = "unauthorized" not in why and "authorizing" not in why
        raise (InfrastructureFailed if trusted else NotTrusted)(f"{self._name}: {why}{remedy}")


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
        except (TimeoutError, BlockingIOError):  # the second without a time to wait
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
