"""A hostile server at a device's address can neither fill this host's memory nor keep it waiting."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.devices.transports.adb import AdbWire
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.shell import RemoteShell
from nas.measure.devices.transports.ssh import LARGEST_PACKET, SshAddress, SshWire, host_key

PIECE = b"x" * (1 << 16)
MUCH = 64 << 20
"""Bytes after which a flood gives up: more than any bound that is tested."""

Talk = Callable[["Flood", socket.socket], None]


class Flood:
    """A server for one connection; counts what it got rid of."""

    def __init__(self, talk: Talk) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.sent = 0
        self._thread = threading.Thread(target=self._serve, args=(talk,))
        self._thread.start()

    def _serve(self, talk: Talk) -> None:
        with self._listening, contextlib.suppress(OSError), self._listening.accept()[0] as connection:
            talk(self, connection)

    def pour(self, connection: socket.socket, piece: bytes) -> None:
        """Sends until the other side hangs up."""
        while self.sent < MUCH:
            connection.sendall(piece)
            self.sent += len(piece)

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def flood(talk: Talk) -> Iterator[Flood]:
    server = Flood(talk)
    try:
        yield server
    finally:
        server.end()


def banner_without_end(server: Flood, connection: socket.socket) -> None:
    server.pour(connection, PIECE)


def lines_without_end(server: Flood, connection: socket.socket) -> None:
    server.pour(connection, b"welcome\n" * 8192)


def large_packet(server: Flood, connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-flood\r\n" + struct.pack(">IB", 1 << 30, 4) + b"\x14" * 11)
    server.pour(connection, PIECE)


@pytest.mark.parametrize("talk", [banner_without_end, lines_without_end, large_packet])
def test_an_ssh_server_without_end(talk: Talk, tmp_path: Path) -> None:
    with flood(talk) as server, pytest.raises(InfrastructureFailed):
        SshWire(SshAddress("root", "127.0.0.1", server.port), tmp_path).connect()
    assert server.sent < MUCH
    with flood(talk) as server, pytest.raises(InfrastructureFailed):
        host_key(SshAddress("root", "127.0.0.1", server.port))
    assert server.sent < MUCH
    assert LARGEST_PACKET < MUCH


def packet(command: bytes, arg0: int, arg1: int, data: bytes = b"", announced: int | None = None) -> bytes:
    number = int.from_bytes(command, "little")
    length = len(data) if announced is None else announced
    return struct.pack("<6I", number, arg0, arg1, length, sum(data) & 0xFFFFFFFF, number ^ 0xFFFFFFFF) + data


def read_packet(connection: socket.socket) -> tuple[bytes, int]:
    """Command and first argument of what came."""
    with connection.makefile("rb") as reading:
        command, arg0, _, length, _, _ = struct.unpack("<6I", reading.read(24))
        reading.read(length)
    return command.to_bytes(4, "little"), arg0


def greet(connection: socket.socket) -> None:
    assert read_packet(connection)[0] == b"CNXN"
    connection.sendall(packet(b"CNXN", 0x01000001, 1 << 20, b"device::"))


def data_in_place_of_an_acknowledgement(server: Flood, connection: socket.socket) -> None:
    greet(connection)
    _, stream = read_packet(connection)
    connection.sendall(packet(b"OKAY", 7, stream))
    server.pour(connection, packet(b"WRTE", 7, stream, PIECE))


def large_adb_packet(server: Flood, connection: socket.socket) -> None:
    greet(connection)
    _, stream = read_packet(connection)
    connection.sendall(packet(b"WRTE", 7, stream, announced=1 << 30))
    server.pour(connection, PIECE)


def challenges_without_end(server: Flood, connection: socket.socket) -> None:
    server.pour(connection, packet(b"AUTH", 1, 0, b"t" * 20) * 1000)


@pytest.mark.parametrize("talk", [data_in_place_of_an_acknowledgement, large_adb_packet, challenges_without_end])
def test_an_adbd_without_end(talk: Talk, tmp_path: Path) -> None:
    AdbKey.load(tmp_path / "adb")
    with flood(talk) as server:
        wire = AdbWire(f"adb:127.0.0.1:{server.port}", tmp_path)
        with pytest.raises(InfrastructureFailed):
            wire.connect()
            RemoteShell(wire).call("", sending=itertools.repeat(PIECE, 128))
        wire.close()
    assert server.sent < MUCH


def test_usb_without_libusb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usb1", None)
    monkeypatch.delitem(sys.modules, "adb_shell.transport.usb_transport", raising=False)
    with pytest.raises(Unsupported, match=r"pip install '\.\[usb\]' in a checkout"):
        AdbWire("adb:usb:R5CT1234567", tmp_path).connect()
