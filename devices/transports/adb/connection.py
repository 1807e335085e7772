"""The adb protocol between host and device, over TCP.

Packets of 24 bytes and a payload; each side acknowledges every payload before the next may come on that stream. One
stream is open at a time, so nothing has to be sorted: what belongs to an earlier one is dropped.
"""

from __future__ import annotations

import contextlib
import struct
import time
from dataclasses import dataclass

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.devices.transports.adb.key import AdbKey
from nas.devices.transports.base import NotTrusted
from nas.devices.transports.wire import CONNECT_S, SILENT_S, open_socket

_CNXN, _AUTH, _OPEN, _OKAY, _CLSE, _WRTE, _STLS = (
    int.from_bytes(name, "little") for name in (b"CNXN", b"AUTH", b"OPEN", b"OKAY", b"CLSE", b"WRTE", b"STLS")
)
_TOKEN, _SIGNATURE, _PUBLIC_KEY = 1, 2, 3
_VERSION, _VERSION_WITH_CHECKSUM = 0x01000001, 0x01000000
_MAX_PAYLOAD = 1 << 20
_HEADER = struct.Struct("<6I")
_RECEIVE = 1 << 18
_COPIED = 1 << 12
"""Bytes of data that are cheaper copied behind their header than sent after it."""


@dataclass(frozen=True, slots=True)
class _Packet:
    command: int
    arg0: int
    arg1: int
    data: bytes


class AdbConnection:
    """One TCP connection to adbd.

    Args:
        host: name or address.
        port: 5555 on most devices.
        key: of this agent.

    Raises:
        InfrastructureFailed: nobody answers.
        NotTrusted: the device does not know the key; its owner may accept it on the screen.
        Unsupported: the device wants TLS, which the adb server speaks.
    """

    def __init__(self, host: str, port: int, key: AdbKey) -> None:
        self._name = f"adb:{host}:{port}"
        self._socket = open_socket(host, port)
        self._received = bytearray()
        self._checksum, self._max_payload = True, 4096
        self._streams = 0
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._greet(key)
            on_failure.pop_all()

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def open(self, service: str) -> AdbStream:
        """Starts a service of the device, such as `exec:COMMAND` or `sync:`.

        Raises:
            InfrastructureFailed: the device does not, or the connection is lost.
        """
        self._streams += 1
        self.send(_OPEN, self._streams, 0, service.encode() + b"\0")
        packet = self.expect(self._streams, SILENT_S)
        if packet.command != _OKAY:
            raise InfrastructureFailed(f"{self._name}: refuses the service {service.partition(':')[0]}")
        return AdbStream(self, self._streams, packet.arg0, self._max_payload)

    def send(self, command: int, arg0: int, arg1: int, data: bytes | memoryview = b"") -> None:
        """One packet."""
        checksum = sum(data) & 0xFFFFFFFF if self._checksum else 0
        header = _HEADER.pack(command, arg0, arg1, len(data), checksum, command ^ 0xFFFFFFFF)
        try:
            self._socket.settimeout(SILENT_S)
            if len(data) > _COPIED:
                self._socket.sendall(header)
                self._socket.sendall(data)
            else:
                self._socket.sendall(header + bytes(data))
        except OSError as error:
            raise InfrastructureFailed(f"{self._name}: {error}") from error

    def expect(self, stream: int, timeout_s: float) -> _Packet:
        """The next packet for a stream.

        Raises:
            InfrastructureFailed: none came within the time, or the connection is lost.
        """
        packet = self.receive(stream, timeout_s)
        if packet is None:
            raise InfrastructureFailed(f"{self._name}: no answer within {timeout_s:g} s")
        return packet

    def receive(self, stream: int, timeout_s: float) -> _Packet | None:
        """The next packet for a stream, `None` where none came within the time."""
        end = time.monotonic() + timeout_s
        while (packet := self._packet(end)) is not None:
            if packet.command not in (_OKAY, _WRTE, _CLSE) or packet.arg1 == stream:
                return packet
            if time.monotonic() > end:
                break
        return None

    def _greet(self, key: AdbKey) -> None:
        self.send(_CNXN, _VERSION, _MAX_PAYLOAD, b"host::features=shell_v2,cmd\0")
        signed = asked = False
        while (packet := self._packet(time.monotonic() + CONNECT_S)) is not None:
            if packet.command == _CNXN:
                self._checksum = packet.arg0 <= _VERSION_WITH_CHECKSUM
                self._max_payload = min(packet.arg1, _MAX_PAYLOAD)
                return
            if packet.command == _STLS:
                raise Unsupported(f"{self._name}: wireless debugging with TLS; pair it with adb and use adb:SERIAL")
            if packet.command != _AUTH or packet.arg0 != _TOKEN:
                raise InfrastructureFailed(f"{self._name}: does not speak adb")
            if asked:
                break
            answer = (_PUBLIC_KEY, key.public().encode() + b"\0") if signed else (_SIGNATURE, key.sign(packet.data))
            self.send(_AUTH, answer[0], 0, answer[1])
            asked, signed = signed, True
        if signed:
            raise NotTrusted(f"{self._name}: does not accept this agent's key; accept it on the device's screen")
        raise InfrastructureFailed(f"{self._name}: no answer within {CONNECT_S:g} s")

    def _packet(self, end: float) -> _Packet | None:
        """The next packet; `None` where it is not there whole by `end`."""
        if not self._fill(_HEADER.size, end):
            return None
        command, arg0, arg1, length, _, magic = _HEADER.unpack_from(self._received)
        if magic != command ^ 0xFFFFFFFF or length > _MAX_PAYLOAD:
            raise InfrastructureFailed(f"{self._name}: does not speak adb")
        if not self._fill(_HEADER.size + length, end):
            return None
        data = bytes(self._received[_HEADER.size : _HEADER.size + length])
        del self._received[: _HEADER.size + length]
        return _Packet(command, arg0, arg1, data)

    def _fill(self, size: int, end: float) -> bool:
        while len(self._received) < size:
            try:
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                piece = self._socket.recv(_RECEIVE)
            except TimeoutError as error:
                if error.errno:  # the kernel's word for a dead connection, not our own waiting
                    raise InfrastructureFailed(f"{self._name}: {error}") from error
                return False
            except OSError as error:
                raise InfrastructureFailed(f"{self._name}: {error}") from error
            if not piece:
                raise InfrastructureFailed(f"{self._name}: the device closed the connection")
            self._received += piece
        return True


class AdbStream:
    """See `Stream`: a service that runs on the device.

    Args:
        connection: how it is reached.
        local: its number on this side.
        remote: its number on the other.
        max_payload: bytes of the largest packet.
    """

    def __init__(self, connection: AdbConnection, local: int, remote: int, max_payload: int) -> None:
        self._connection, self._local, self._remote = connection, local, remote
        self._max_payload = max_payload
        self._arrived = bytearray()
        self._ended = self._unanswered = False

    def read(self, timeout_s: float) -> bytes | None:
        """See `Stream.read`."""
        if not self._arrived and not self._ended:
            packet = self._connection.receive(self._local, timeout_s)
            if packet is None:
                return None
            self._take(packet)
        piece = bytes(self._arrived)
        self._arrived.clear()
        # An acknowledgement brings nothing, but is not the end.
        return piece or (b"" if self._ended else None)

    def write(self, data: bytes) -> None:
        """See `Stream.write`. What a command that ended no longer reads, is dropped.

        The device's answer is waited for before the next packet only, so that both sides work at the same time.
        """
        view = memoryview(data)
        for start in range(0, len(data), self._max_payload):
            while self._unanswered and not self._ended:
                self._take(self._connection.expect(self._local, SILENT_S))
            if self._ended:
                return
            self._connection.send(_WRTE, self._local, self._remote, view[start : start + self._max_payload])
            self._unanswered = True

    def close(self) -> None:
        """See `Stream.close`."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(InfrastructureFailed):
                self._connection.send(_CLSE, self._local, self._remote)

    def _take(self, packet: _Packet) -> None:
        if packet.command == _WRTE:
            self._connection.send(_OKAY, self._local, self._remote)
            self._arrived += packet.data
        elif packet.command == _OKAY:
            self._unanswered = False
        elif packet.command == _CLSE:
            self._ended = True
