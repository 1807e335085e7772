"""The ssh transport against a real sshd: the contract, and what goes wrong between two machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import device_lab
import pytest

from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.devices.transports import TRANSPORTS
from nas.devices.transports.base import NotTrusted, Transport
from nas.devices.transports.shell import ShellTransport
from nas.devices.transports.ssh import SshAddress, SshWire, host_key, pin
from nas.testing.transport_contract import TransportContract, run


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home") / "keys"


@pytest.fixture(scope="module")
def device(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[device_lab.Machine]:
    with device_lab.sshd(tmp_path_factory.mktemp("device"), keys, port=2222) as machine:
        pin(address(machine), host_key(address(machine)), keys)
        yield machine


def address(machine: device_lab.Machine) -> SshAddress:
    return SshAddress("root", machine.address, machine.port)


@pytest.fixture
def connected(device: device_lab.Machine, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setenv("NAS_HOME", str(keys.parent))
    device.forget("root/.cache")
    transport = TRANSPORTS["ssh"](str(address(device)), keys)
    transport.connect()
    yield transport
    transport.close()


class TestSshContract(TransportContract):
    @pytest.fixture
    def transport(self, connected: Transport) -> Transport:
        return connected
