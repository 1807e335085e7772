"""The adb server of this host: where it is looked for, and what its refusals tell people to do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.measure.devices.transports.adb import AdbServer, AdbWire, SocketStream
from nas.measure.devices.transports.base import NotTrusted

SERIAL = "adb-R5CT123 (2)._adb-tls-connect._tcp"


class FakeServer:
    """Answers the first request of each connection with `answer`, and keeps the requests."""

    def __init__(self, listening: socket.socket, answer: bytes) -> None:
        self._listening, self._answer = listening, answer
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                size = connection.recv(4)
                if size.strip(b"0123456789abcdef") == b"" and len(size) == 4:
                    self.requests.append(connection.recv(int(size, 16)))
                connection.sendall(self._answer)
                while self._answer and connection.recv(1 << 10):
                    pass  # until the client closes

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)


Serve = Callable[[bytes], FakeServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    servers: list[FakeServer] = []

    def begin(answer: bytes) -> FakeServer:
        listening = socket.create_server(("127.0.0.1", 0))
        for variable in ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(listening.getsockname()[1]))
        servers.append(FakeServer(listening, answer))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def failed(message: str) -> bytes:
    return b"FAIL%04x%b" % (len(message), message.encode())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failed("device offline"), "device offline; `adb reconnect offline`, or plug it in again"),
        (failed("device still connecting"), "try again in a moment"),
        (failed("insufficient permissions for device: missing udev rules?\nSee [http://x]"), "missing udev rules?"),
        (failed(f"device '{SERIAL}' not found"), "`adb devices` lists what the server has"),
        (failed("more than one device with serial X"), "address it by its port, such as adb:usb:1-1.4"),
        (failed("closed"), "closed"),
        (failed(""), "refused"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no adb server: it answers"),
        (b"FAILxyz!", "is no adb server"),
        (b"", "the adb server hung up"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do(serve: Serve, answer: bytes, reason: str) -> None:
    server = serve(answer)
    with pytest.raises(InfrastructureFailed) as caught:
        AdbServer(SERIAL).open("exec:true")
    assert reason in str(caught.value) and f"adb:{SERIAL}" in str(caught.value)
    assert server.requests == [f"host:transport:{SERIAL}".encode()]


@pytest.mark.parametrize(
    "message", ["device unauthorized.\nThis adb server's key is not set", "device still authorizing"]
)
def test_a_device_that_trusts_no_key_yet_is_told_apart(serve: Serve, message: str) -> None:
    serve(failed(message))
    with pytest.raises(NotTrusted, match="accept this computer's key on the device's screen"):
        AdbServer(SERIAL).open("exec:true")


@pytest.mark.parametrize("value", ["abc", "tcp:x", "localfilesystem:", "tcp:1:2:3", "host:5037"])
def test_a_variable_that_names_no_server_is_said(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ADB_SERVER_SOCKET", value)
    with pytest.raises(InfrastructureFailed, match="ADB_SERVER_SOCKET"):
        AdbServer("X")
    monkeypatch.delenv("ADB_SERVER_SOCKET")
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", value)
    with pytest.raises(InfrastructureFailed, match="ANDROID_ADB_SERVER_PORT"):
        AdbServer("X")


def test_empty_variables_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT"):
        monkeypatch.setenv(variable, "")
    assert AdbServer("X")._server == "tcp:127.0.0.1:5037"


def test_the_server_may_be_elsewhere(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = serve(b"OKAYOKAY")
    port = server._listening.getsockname()[1]
    for text in (f"tcp:{port}", f"tcp:127.0.0.1:{port}", f"tcp:localhost:{port}"):
        monkeypatch.setenv("ADB_SERVER_SOCKET", text)
        AdbServer("X").open("exec:true").close()
    path = tmp_path / "adb.sock"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    local = FakeServer(listening, b"OKAYOKAY")
    monkeypatch.setenv("ADB_SERVER_SOCKET", f"localfilesystem:{path}")
    AdbServer("X").open("exec:true").close()
    local.close()
    assert [*server.requests, *local.requests] == [b"host:transport:X"] * 4


def test_nobody_there_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("ADB_SERVER_SOCKET", f"tcp:{port}")
    with pytest.raises(InfrastructureFailed, match="run `adb start-server`"):
        AdbServer("X").open("exec:true")


def test_a_host_that_can_be_no_name_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADB_SERVER_SOCKET", "tcp:a..b:5037")
    with pytest.raises(InfrastructureFailed, match=r"no adb server \(a\.\.b:5037: .*label"):
        AdbServer("X").open("exec:true")
    with pytest.raises(InfrastructureFailed, match=r"a\.\.b:5555: .*label"):
        AdbWire("adb:a..b:5555", tmp_path).connect()


@pytest.fixture
def encrypting() -> Iterator[int]:
    """The port of a phone that answers every greeting with the wish for TLS."""
    listening = socket.create_server(("127.0.0.1", 0))
    command = int.from_bytes(b"STLS", "little")

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 12)
                    connection.sendall(struct.pack("<6I", command, 1 << 24, 0, 0, 0, command ^ 0xFFFFFFFF))
                    connection.recv(1 << 12)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(10)


def test_a_phone_that_wants_tls_is_reached_through_the_server(serve: Serve, encrypting: int, tmp_path: Path) -> None:
    """`adb devices` lists a phone that was connected by address with this address as its serial."""
    server = serve(b"OKAYOKAY")
    wire = AdbWire(f"adb:127.0.0.1:{encrypting}", tmp_path)
    wire.connect()
    wire.start("true").close()
    assert set(server.requests) == {b"host:transport:127.0.0.1:%d" % encrypting}
    wire.close()
    serve(failed("device '127.0.0.1' not found"))
    with pytest.raises(Unsupported, match="wireless debugging with TLS: `adb pair` it"):
        wire.connect()


def test_phones_of_one_serial_number_are_addressed_by_their_ports(serve: Serve, tmp_path: Path) -> None:
    """Makers of cheap phones give all of them one serial number; `adb devices -l` lists ports of USB as well."""
    server = serve(b"OKAYOKAY")
    for port in ("1-1.4", "12-3"):
        wire = AdbWire(f"adb:usb:{port}", tmp_path)
        wire.connect()
        wire.start("true").close()
    assert server.requests == [b"host:transport:usb:1-1.4", b"host:transport:usb:12-3"]


def test_nothing_to_read_yet_is_no_failure() -> None:
    """Between the pieces of a file that is pushed, what the device says is read without waiting."""
    near, far = socket.socketpair()
    stream = SocketStream(near, "adb:X")
    for wait_s in (0, 0.01):
        assert stream.read(wait_s) is None
        far.sendall(b"said")
        assert stream.read(wait_s) == b"said"
    far.close()
    assert stream.read(0) == b""
    stream.close()


def test_ports_that_do_not_exist_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket takes a port modulo 65536."""
    assert AdbWire("adb:127.0.0.1:65535", tmp_path).name == "adb:127.0.0.1:65535"
    with pytest.raises(InvalidInput, match="adb:HOST:PORT"):
        AdbWire("adb:127.0.0.1:71091", tmp_path)
    monkeypatch.setenv("ADB_SERVER_SOCKET", "tcp:70573")
    with pytest.raises(InfrastructureFailed, match="no adb server"):
        AdbServer(SERIAL)
