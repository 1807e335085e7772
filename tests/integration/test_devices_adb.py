"""The adb transport against a real adbd, with the shell and the tools of a phone."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from adb_shell.exceptions import UsbReadFailedError
from adb_shell.transport.tcp_transport import TcpTransport
from device_faults import LATEST_S, RUNNER, RemoteFaults, reached
from device_lab import Machine, adbd, within

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.measure.devices.transports import TRANSPORTS, adb, adb_device
from nas.measure.devices.transports.adb import AdbWire
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.base import Cancelled, NotTrusted, Transport
from nas.measure.devices.transports.shell import ShellTransport
from nas.testing.transport_contract import TransportContract, device_hash, run

pytestmark = pytest.mark.needs("devices")

FOLDER = "data/local/tmp/hilnas"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home") / "keys"


@pytest.fixture(scope="module")
def device(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with adbd(tmp_path_factory.mktemp("device"), AdbKey.load(keys / "adb").public()) as machine:
        yield machine


def address(machine: Machine) -> str:
    return f"adb:{machine.address}:{machine.port}"


@pytest.fixture
def connected(device: Machine, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setenv("NAS_HOME", str(keys.parent))
    device.forget(FOLDER)
    transport = TRANSPORTS["adb"](address(device), keys)
    transport.connect()
    yield transport
    transport.close()


class TestAdbContract(TransportContract):
    @pytest.fixture
    def transport(self, connected: Transport) -> Transport:
        return connected


class TestAdbFaults(RemoteFaults):
    @pytest.fixture
    def transport(self, connected: Transport) -> Transport:
        return connected

    @pytest.fixture
    def another(self, device: Machine, keys: Path) -> Iterator[Transport]:
        transport = ShellTransport(AdbWire(address(device), keys))
        yield transport
        transport.close()

    @pytest.fixture
    def code(self, device: Machine) -> str:
        return f"from nas.measure.devices.transports.adb import connect; connect({address(device)!r}, None)"

    @pytest.fixture
    def daemon(self) -> str:
        return "adbd-auth"

    @pytest.fixture
    def folder(self) -> str:
        return FOLDER


def test_a_key_that_the_device_does_not_know(device: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adb_device, "CONNECT_S", 1.0)
    with pytest.raises(NotTrusted, match="screen"):
        AdbWire(address(device), tmp_path).connect()
    assert (tmp_path / "adb").stat().st_mode & 0o777 == 0o600


def test_nobody_answers(device: Machine, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailed, match="refused"):
        AdbWire(f"adb:{device.address}:2", tmp_path).connect()


class USBErrorTimeout(Exception):
    """Has the name of libusb's error."""


class UsbPort(TcpTransport):  # type: ignore[misc]
    """A stand-in for adb-shell's USB transport: transfers that come whole or not at all, short writes, its errors."""

    def connect(self, transport_timeout_s: float | None) -> None:
        self._connection = socket.create_connection((self._host, self._port))

    def bulk_read(self, numbytes: int, transport_timeout_s: float | None) -> bytes:
        if not select.select([self._connection], [], [], transport_timeout_s)[0]:
            raise UsbReadFailedError("nothing came", USBErrorTimeout())
        return bytes(self._connection.recv(numbytes, socket.MSG_WAITALL))

    def bulk_write(self, data: bytes, transport_timeout_s: float | None) -> int:
        return int(self._connection.send(data[: 1 << 14]))


def test_over_usb(device: Machine, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real adbd behind a stand-in for the port: there is no USB device here."""
    monkeypatch.setattr(adb, "over_usb", lambda serial: UsbPort(device.address, device.port))
    transport = ShellTransport(AdbWire("adb:usb:R5CT1234567", keys))
    transport.connect()
    assert run(transport, "echo out; sleep 1; exit 7").exit_code == 7
    with pytest.raises(Cancelled):
        run(transport, "yes", output_limit=1 << 30, cancelled=lambda: True)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 10_000)
    sha256 = sha256_of(path)
    assert device_hash(transport, transport.push(path, sha256)) == sha256
    transport.close()


@pytest.fixture
def server(device: Machine, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The serial of the device at an adb server, which runs next to it and has the agent's key."""
    (device.root / "run/agent_key").write_bytes((keys / "adb").read_bytes())
    settings = ["HOME=/run", "ADB_VENDOR_KEYS=/run/agent_key", "PATH=/usr/bin"]
    command = ["/usr/bin/env", "-i", *settings, "adb", "-a", "-P", "5037", "server", "nodaemon"]
    monkeypatch.setenv("ANDROID_ADB_SERVER_ADDRESS", device.address)
    with device.running(*command):
        yield "emulator-5554"


def test_through_an_adb_server(server: str, device: Machine, tmp_path: Path) -> None:
    """The server finds the device by itself, as it finds emulators; what follows is the same for USB."""
    transport = ShellTransport(AdbWire(f"adb:{server}", tmp_path))
    assert within(60, lambda: reached(transport))
    assert run(transport, "echo out; exit 7").exit_code == 7
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 10_000)
    sha256 = sha256_of(path)
    assert device_hash(transport, transport.push(path, sha256)) == sha256
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(transport.run, RUNNER, env={}, deadline_s=300, output_limit=100)
        assert within(60, lambda: bool(device.processes(*RUNNER)))
        device.kill("adb", "-a")
        assert within(LATEST_S, lambda: not device.processes(*RUNNER))
        with pytest.raises(InfrastructureFailed):
            result.result()


def test_a_device_that_the_server_does_not_have(server: str, tmp_path: Path) -> None:
    transport = ShellTransport(AdbWire("adb:R5CT1234567", tmp_path))
    assert within(60, lambda: "not found" in why_not(transport))


def why_not(transport: ShellTransport) -> str:
    with pytest.raises(InfrastructureFailed) as failure:
        transport.connect()
    return str(failure.value)


def test_no_adb_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "2")
    with pytest.raises(InfrastructureFailed, match="adb start-server"):
        ShellTransport(AdbWire("adb:R5CT1234567", tmp_path)).connect()


@pytest.mark.parametrize("text", ["adb:", "R5CT1234567", "adb:\tb", "adb:host:port", "adb:x;y", "ssh://u@host"])
def test_addresses_of_another_form(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        AdbWire(text, tmp_path)


@pytest.mark.parametrize("serial", [" GS101200400611", "adb-R5CT123 (2)._adb-tls-connect._tcp", "????????????"])
def test_serial_numbers_as_adb_lists_them(serial: str, tmp_path: Path) -> None:
    assert AdbWire(f"adb:{serial}", tmp_path).name == f"adb:{serial}"
