"""The adb protocol between this host and a device, over TCP or USB: adb-shell, with what it lacks.

adb-shell brings packets, authentication and USB. Added here, because 0.4.4 has none of it:

- writes that are complete (its TCP transport drops what does not fit the socket buffer) and reads that notice the end
- streams that can be read with a timeout and written to while output arrives (it drops output while it waits for an
  OKAY)
- a checksum by numpy, without which a push takes eight times the processor time
- bounds on what a device may send

Source: docs/dev of AOSP's packages/modules/adb (protocol.md, services.md). Of adb-shell's private parts,
`_io_manager.send`, `_io_manager._read_packet_from_device` and `_maxdata` are used, so its version is pinned.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from adb_shell import constants, exceptions
from adb_shell.adb_device import AdbDevice
from adb_shell.adb_message import AdbMessage
from adb_shell.auth.keygen import keygen, write_public_keyfile
from adb_shell.auth.sign_cryptography import CryptographySigner
from adb_shell.hidden_helpers import _AdbTransactionInfo
from adb_shell.transport.base_transport import BaseTransport
from adb_shell.transport.tcp_transport import TcpTransport
from cryptography.exceptions import UnsupportedAlgorithm

from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, NasError, Unsupported
from nas.measure.devices.transports.base import NotTrusted
from nas.measure.devices.transports.wire import CONNECT_S, SILENT_S, open_socket

_HEADER = constants.MESSAGE_SIZE
_RECEIVE = 1 << 18
_GREETING = 1 << 16
"""Bytes that a device may send before it has accepted this agent's key."""

_TIMEOUTS = (exceptions.TcpTimeoutException, exceptions.AdbTimeoutError)
_USB = (exceptions.UsbReadFailedError, exceptions.UsbWriteFailedError)
_FAILURES = (*_TIMEOUTS, *_USB, exceptions.UsbDeviceNotFoundError, exceptions.InvalidChecksumError, OSError)
_NOT_ADB = (exceptions.InvalidCommandError, exceptions.InvalidResponseError, ValueError)


class NeedsTls(Unsupported):
    """The device requires TLS, which the adb server speaks."""


class AdbKey(CryptographySigner):  # type: ignore[misc]
    """The key that identifies this agent to phones: RSA 2048, as adb stores it."""

    @classmethod
    def load(cls, path: Path) -> AdbKey:
        """Loads the key in `path` (public part in `path`.pub); creates it, mode 0600, if there is none.

        Raises:
            NotTrusted: the file is no key that can be used.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        public = path.with_name(f"{path.name}.pub")
        # Of two that make a key at once, one would store the public part of the other's.
        lock = locked(path.with_name(f"{path.name}.lock"))
        with lock, tempfile.TemporaryDirectory(prefix=".adb-", dir=path.parent) as folder:
            temporary = Path(folder) / "key"
            try:
                if not path.exists():
                    keygen(str(temporary))
                    temporary.chmod(0o600)
                    temporary.replace(path)
                if not public.exists():
                    write_public_keyfile(str(path), str(temporary))
                    temporary.replace(public)
                return cls(str(path))
            except (ValueError, TypeError, UnsupportedAlgorithm) as error:
                raise NotTrusted(
                    f"{path} is no RSA key without a passphrase ({error}); remove it and {public.name}: the next "
                    "connection makes a key, to be accepted on the device's screen"
                ) from error

    def public(self) -> str:
        """Returns the line for the phone's list of keys."""
        return str(self.public_key.decode())


class Tcp(TcpTransport):  # type: ignore[misc]
    """A TCP connection, to a device with `adb tcpip`, that reports when the other side has vanished."""

    def connect(self, transport_timeout_s: float | None) -> None:
        self._connection = open_socket(self._host, self._port)
        self._connection.setblocking(False)


class _Link(BaseTransport):  # type: ignore[misc]
    """Complete writes, bounded reads, and a way to wait for a packet, over a transport of adb-shell.

    Args:
        inner: over TCP or USB.
    """

    def __init__(self, inner: BaseTransport) -> None:
        self._inner, self._head = inner, b""
        self.budget: int | None = _GREETING

    def connect(self, transport_timeout_s: float | None) -> None:
        self._inner.connect(transport_timeout_s)

    def close(self) -> None:
        self._inner.close()

    def wait(self, timeout_s: float) -> bool:
        """Waits for a packet. Returns whether its first bytes have arrived."""
        if not self._head:
            try:
                self._head = self.bulk_read(_HEADER, max(0.001, timeout_s))
            except exceptions.TcpTimeoutException:
                return False
            except exceptions.UsbReadFailedError as error:
                if type(error.usb_error).__name__ != "USBErrorTimeout":
                    raise
                return False
        return True

    def bulk_read(self, numbytes: int, transport_timeout_s: float | None) -> bytes:
        if self._head:
            piece, self._head = self._head, b""
            return piece
        if numbytes > constants.MAX_ADB_DATA:
            raise OSError(f"announces a packet of {numbytes} bytes")
        piece = bytes(self._inner.bulk_read(min(numbytes, _RECEIVE), transport_timeout_s))
        if not piece:
            raise OSError("the device closed the connection")
        if self.budget is not None:
            self.budget -= len(piece)
            if self.budget < 0:
                raise OSError("sent more than was asked for")
        return piece

    def bulk_write(self, data: bytes, transport_timeout_s: float | None) -> int:
        sent = self._inner.bulk_write(data, transport_timeout_s)
        while sent < len(data):
            sent += self._inner.bulk_write(data[sent:], transport_timeout_s)
        return len(data)


class _Message(AdbMessage):  # type: ignore[misc]
    @property
    def checksum(self) -> int:
        return int(np.frombuffer(self.data, np.uint8).sum(dtype=np.uint64))


class AdbConnection:
    """A connection to adbd. One stream is open at a time; packets of earlier ones are dropped.

    Args:
        name: the device's address, for messages.
        transport: a `Tcp`, or what `over_usb` returns.
        key: of this agent.

    Raises:
        InfrastructureFailed: the device does not answer.
        NotTrusted: the device does not know the key; its owner may accept it on the screen.
        NeedsTls: the device requires TLS.
    """

    def __init__(self, name: str, transport: BaseTransport, key: AdbKey) -> None:
        self._name, self._link = name, _Link(transport)
        self._device = AdbDevice(self._link, SILENT_S, banner="hilnas")
        self._info = _AdbTransactionInfo(None, None, SILENT_S, SILENT_S)
        self._streams = 0
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            with self._errors():
                self._greet(key)
            on_failure.pop_all()

    @property
    def max_payload(self) -> int:
        """Bytes of the largest packet that the device accepts."""
        return min(int(self._device._maxdata), int(constants.MAX_ADB_DATA))

    def close(self) -> None:
        """Disconnects."""
        self._device.close()

    def open(self, service: str) -> AdbStream:
        """Starts a service of the device, such as `exec:COMMAND` or `sync:`.

        Raises:
            InfrastructureFailed: the device does not, or the connection is lost.
        """
        self._streams += 1
        self.send(constants.OPEN, self._streams, 0, service.encode() + b"\0")
        command, remote, _ = self.expect(self._streams)
        if command != constants.OKAY:
            raise InfrastructureFailed(f"{self._name}: refuses the service {service.partition(':')[0]}")
        return AdbStream(self, self._streams, remote)

    def send(self, command: bytes, local: int, remote: int, data: bytes = b"") -> None:
        """Sends one packet."""
        with self._errors():
            self._device._io_manager.send(_Message(command, local, remote, data), self._info)

    def expect(self, stream: int) -> tuple[bytes, int, bytes]:
        """Returns the next packet for a stream; raises `InfrastructureFailed` after `SILENT_S` without one."""
        packet = self.receive(stream, SILENT_S)
        if packet is None:
            raise InfrastructureFailed(f"{self._name}: no answer within {SILENT_S:g} s")
        return packet

    def receive(self, stream: int, timeout_s: float) -> tuple[bytes, int, bytes] | None:
        """Returns command, remote number and data of the next packet for a stream, `None` if none came in time."""
        end = time.monotonic() + timeout_s
        with self._errors():
            while self._link.wait(end - time.monotonic()):
                command, remote, local, data = self._device._io_manager._read_packet_from_device(self._info)
                if local == stream:
                    return command, remote, data
                if time.monotonic() > end:
                    break
        return None

    def refuse_flood(self, unread: int) -> None:
        """Raises `InfrastructureFailed` if a device sends much although it should only acknowledge."""
        if unread > constants.MAX_ADB_DATA:
            raise InfrastructureFailed(f"{self._name}: sent more than was asked for")

    def _greet(self, key: AdbKey) -> None:
        offered: list[Any] = []
        try:
            self._device.connect([key], CONNECT_S, CONNECT_S, CONNECT_S, offered.append)
        except _TIMEOUTS + _USB as error:
            if not offered:
                raise
            raise NotTrusted(
                f"{self._name}: does not accept this agent's key: accept it on the device's screen, then try again"
            ) from error
        except exceptions.InvalidCommandError as error:
            if "STLS" not in str(error):
                raise
            raise NeedsTls(
                f"{self._name}: wireless debugging with TLS: `adb pair` it, then `adb connect` it, and the adb server "
                "reaches it at this address, or use its serial of `adb devices`"
            ) from error
        self._link.budget = None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Converts adb-shell's errors to ours."""
        try:
            yield
        except NasError:  # ours, some of which are a ValueError
            raise
        except _FAILURES as error:
            raise InfrastructureFailed(f"{self._name}: {error or type(error).__name__}") from error
        except _NOT_ADB as error:
            raise InfrastructureFailed(f"{self._name}: does not speak adb") from error


class AdbStream:
    """A `Stream` of a service that runs on the device.

    Args:
        connection: to the device.
        local: the stream's number on this side.
        remote: its number on the other side.
    """

    def __init__(self, connection: AdbConnection, local: int, remote: int) -> None:
        self._connection, self._local, self._remote = connection, local, remote
        self._arrived = bytearray()
        self._has_ended = self._unanswered = False

    def read(self, timeout_s: float) -> bytes | None:
        if not self._arrived and not self._has_ended:
            packet = self._connection.receive(self._local, timeout_s)
            if packet is None:
                return None
            self._take(packet)
        piece = bytes(self._arrived)
        self._arrived.clear()
        # An acknowledgement carries no data, but is not the end.
        return piece or (b"" if self._has_ended else None)

    def write(self, data: bytes) -> None:
        """Writes to the service; what a finished command no longer reads is dropped.

        The device's answer is awaited only before the next packet, so that both sides work at the same time.
        """
        for start in range(0, len(data), self._connection.max_payload):
            while self._unanswered and not self._has_ended:
                self._take(self._connection.expect(self._local))
                self._connection.refuse_flood(len(self._arrived))
            if self._has_ended:
                return
            piece = data[start : start + self._connection.max_payload]
            self._connection.send(constants.WRTE, self._local, self._remote, piece)
            self._unanswered = True

    def close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            with contextlib.suppress(InfrastructureFailed):
                self._connection.send(constants.CLSE, self._local, self._remote)

    def _take(self, packet: tuple[bytes, int, bytes]) -> None:
        command, _, data = packet
        if command == constants.WRTE:
            self._connection.send(constants.OKAY, self._local, self._remote)
            self._arrived += data
        elif command == constants.OKAY:
            self._unanswered = False
        elif command == constants.CLSE:
            self._has_ended = True


def over_usb(serial: str) -> BaseTransport:
    """Returns the way to a device on a USB port of this host, not yet connected.

    Raises:
        Unsupported: libusb is missing.
        InfrastructureFailed: the device is not there.
    """
    try:
        from adb_shell.transport.usb_transport import UsbTransport
    except (ImportError, OSError) as error:
        raise Unsupported(
            f"adb:usb:{serial}: needs libusb and its Python package: pip install '.[usb]' in a checkout"
        ) from error
    try:
        return UsbTransport.find_adb(serial=serial)
    except (exceptions.UsbDeviceNotFoundError, *_USB) as error:
        raise InfrastructureFailed(
            f"adb:usb:{serial}: {error}; is it plugged in, and no adb server running?"
        ) from error
