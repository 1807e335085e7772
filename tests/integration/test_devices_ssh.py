"""The ssh transport against a real sshd: the contract, and what goes wrong between two machines."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from device_faults import RemoteFaults
from device_lab import Machine, board, cpuset, new_key, quota, sshd, within

from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.measure.devices.agent.run_plan import Observer
from nas.measure.devices.describe import describe
from nas.measure.devices.transports import TRANSPORTS
from nas.measure.devices.transports.base import NotTrusted, Transport
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.ssh import SshAddress, SshWire, host_key, pin
from nas.testing.transport_contract import TransportContract, run

pytestmark = pytest.mark.needs("devices")

FOLDER = "root/.cache/hilnas"
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home") / "keys"


@pytest.fixture(scope="module")
def device(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with sshd(tmp_path_factory.mktemp("device"), keys, port=2222) as machine:
        pin(address(machine), host_key(address(machine)), keys)
        yield machine


def address(machine: Machine) -> SshAddress:
    return SshAddress("root", machine.address, machine.port)


@pytest.fixture
def connected(device: Machine, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setenv("NAS_HOME", str(keys.parent))
    device.forget(FOLDER)
    transport = TRANSPORTS["ssh"](str(address(device)), keys)
    transport.connect()
    yield transport
    transport.close()


class TestSshContract(TransportContract):
    @pytest.fixture
    def transport(self, connected: Transport) -> Transport:
        return connected


class TestSshFaults(RemoteFaults):
    @pytest.fixture
    def transport(self, connected: Transport) -> Transport:
        return connected

    @pytest.fixture
    def another(self, device: Machine, keys: Path) -> Iterator[Transport]:
        transport = ShellTransport(SshWire(address(device), keys))
        yield transport
        transport.close()

    @pytest.fixture
    def code(self, device: Machine) -> str:
        return f"from nas.measure.devices.transports.ssh import connect; connect({str(address(device))!r}, None)"

    @pytest.fixture
    def daemon(self) -> str:
        return "sshd-session"

    @pytest.fixture
    def folder(self) -> str:
        return FOLDER


@pytest.fixture(scope="module")
def box(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    box_keys = keys.parent / "box"
    with board(tmp_path_factory.mktemp("box"), box_keys) as machine:
        pin(address(machine), host_key(address(machine)), box_keys)
        yield machine


class TestBoardContract(TransportContract):
    """An embedded board: dropbear, and busybox as the shell and every tool."""

    @pytest.fixture
    def transport(self, box: Machine, keys: Path) -> Iterator[Transport]:
        box.forget(FOLDER)
        transport = ShellTransport(SshWire(address(box), keys.parent / "box"))
        transport.connect()
        assert run(transport, "ls --help 2>&1").stdout.startswith(b"BusyBox")
        yield transport
        transport.close()


def test_a_machine_that_nobody_pinned(device: Machine, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "id_ed25519").write_bytes((keys / "id_ed25519").read_bytes())
    with pytest.raises(NotTrusted, match="not pinned"):
        SshWire(address(device), tmp_path).connect()


def test_another_host_key_than_the_pinned_one(device: Machine, keys: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "other")
    (tmp_path / "id_ed25519").write_bytes((keys / "id_ed25519").read_bytes())
    pin(address(device), paramiko.Ed25519Key.from_private_key_file(str(tmp_path / "other")), tmp_path)
    with pytest.raises(NotTrusted, match="host key changed"):
        SshWire(address(device), tmp_path).connect()
    pin(address(device), host_key(address(device)), tmp_path)
    SshWire(address(device), tmp_path).connect()


def test_a_key_that_the_machine_does_not_know(device: Machine, keys: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "id_ed25519")
    (tmp_path / "known_hosts").write_bytes((keys / "known_hosts").read_bytes())
    with pytest.raises(NotTrusted, match=r"no key is accepted .* this agent's is .*/id_ed25519"):
        SshWire(address(device), tmp_path).connect()


def test_more_keys_of_ssh_agent_than_the_machine_tries(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine hangs up at the third key; with one key that it knows in the agent it is reached."""
    others, empty = tmp_path / "others", tmp_path / "keys"
    others.mkdir()
    empty.mkdir()
    for number in range(8):
        new_key(others / f"key{number}")
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(sshd(tmp_path / "device", keys, options="MaxAuthTries 2"))
        monkeypatch.setenv("HOME", str(tmp_path))  # after it: the image of the machine is in this user's cache
        add = stack.enter_context(ssh_agent(tmp_path / "agent"))
        pin(address(machine), host_key(address(machine)), empty)
        wire = stack.enter_context(contextlib.closing(SshWire(address(machine), empty)))
        add(keys / "id_ed25519")
        wire.connect()
        wire.close()
        add(*sorted(others.glob("key?")), keys / "id_ed25519")
        with pytest.raises(NotTrusted, match=r"maybe because they are too many .*into .*/keys/id_ed25519"):
            wire.connect()
        (empty / "id_ed25519").write_bytes((keys / "id_ed25519").read_bytes())
        wire.connect()


@contextlib.contextmanager
def ssh_agent(socket: Path) -> Iterator[Callable[..., None]]:
    """An ssh-agent while the context is open; yields what gives it keys in place of those that it has."""
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as agent:
        try:
            assert within(20, socket.is_socket)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SSH_AUTH_SOCK", str(socket))

                def add(*private: Path) -> None:
                    subprocess.run(["ssh-add", "-q", "-D"], check=True, capture_output=True)
                    subprocess.run(["ssh-add", "-q", *private], check=True, capture_output=True)

                yield add
        finally:
            agent.terminate()


def test_nobody_answers(device: Machine, keys: Path) -> None:
    with pytest.raises(InfrastructureFailed, match="refused"):
        SshWire(SshAddress("root", device.address, 2), keys).connect()


def test_a_machine_that_lives_in_another_time(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on the device depends on its date: not deadlines, not times, not what the cache throws out."""
    wrong = f"SetEnv LD_PRELOAD={FAKETIME} FAKETIME=-30y"
    with sshd(tmp_path / "device", tmp_path / "keys", options=wrong) as machine:
        pin(address(machine), host_key(address(machine)), tmp_path / "keys")
        transport = ShellTransport(SshWire(address(machine), tmp_path / "keys"))
        year = run(transport, "date +%Y", env={"LD_PRELOAD": FAKETIME, "FAKETIME": "-30y"})
        result = run(transport, "echo before; sleep 300", deadline_s=1)
        transport.close()
    assert int(year.stdout) < 2010
    assert (result.timed_out, result.stdout) == (True, b"before\n")
    assert result.started_at > 1.7e9


@pytest.mark.needs("control groups")
def test_a_device_in_a_container_of_one_core(keys: Path, tmp_path: Path) -> None:
    """A cpuset is the number of cores, and others can be had by nobody."""
    with (
        cpuset(1) as group,
        sshd(tmp_path / "device", tmp_path / "keys", group=group) as machine,
    ):
        pin(address(machine), host_key(address(machine)), tmp_path / "keys")
        transport = ShellTransport(SshWire(address(machine), tmp_path / "keys"))
        described = describe(transport)
        with pytest.raises(Unsupported, match="on cores 0-1: it has, or a cpuset allows, cores 1"):
            run(transport, "exit 0", cpu_affinity=[0, 1])
        assert run(transport, "exit 7", cpu_affinity=[1]).exit_code == 7
        with pytest.raises(InvalidInput, match="no core 0: the device has 1"):
            describe(transport, pinned_to=[0])
        transport.close()
    assert described.cores == 1
    assert [cluster.cores for cluster in described.clusters] == [(1,)]


@pytest.mark.needs("control groups")
def test_a_container_with_a_quota_of_processor_time_is_throttled(keys: Path, tmp_path: Path) -> None:
    with quota(0.2) as group:
        mount = "{ mount -t cgroup -o cpu all run/groups || mount -t cgroup2 all run/groups; }"
        setup = f"mkdir run/groups && {mount} && mount --bind run/groups/{group.name} sys/fs/cgroup"
        with sshd(tmp_path / "device", tmp_path / "keys", setup=setup, group=group) as machine:
            pin(address(machine), host_key(address(machine)), tmp_path / "keys")
            transport = ShellTransport(SshWire(address(machine), tmp_path / "keys"))
            observer = Observer(transport)
            before = observer.before()
            result = run(transport, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done", deadline_s=60)
            assert observer.after(before, result).throttled is True
            transport.close()


def test_an_unknown_set_of_cores_is_not_taken_for_the_wanted_one(keys: Path, tmp_path: Path) -> None:
    """Sandboxes accept any set of cores and say nothing of it."""
    setup = "printf '#!/bin/sh\\nexit 0\\n' >root/taskset; chmod 755 root/taskset"
    options = "SetEnv PATH=/root:/usr/bin:/usr/sbin"
    with sshd(tmp_path / "device", tmp_path / "keys", setup=setup, options=options) as machine:
        pin(address(machine), host_key(address(machine)), tmp_path / "keys")
        transport = ShellTransport(SshWire(address(machine), tmp_path / "keys"))
        with pytest.raises(Unsupported, match="on cores 1: it has"):
            run(transport, "exit 0", cpu_affinity=[1])
        transport.close()


def test_a_login_shell_that_talks(keys: Path, tmp_path: Path) -> None:
    setup = "sed -i s,/bin/sh,/bin/bash, etc/passwd; echo '[ -n \"$BASH\" ] && echo hello >&2' >root/.bashrc"
    with sshd(tmp_path / "device", tmp_path / "keys", setup=setup) as machine:
        pin(address(machine), host_key(address(machine)), tmp_path / "keys")
        transport = ShellTransport(SshWire(address(machine), tmp_path / "keys"))
        assert run(transport, "echo out").stdout == b"out\n"
        assert "Linux" in str(transport.read_many(["/proc/sys/kernel/ostype"]))
        transport.close()


@pytest.mark.parametrize(
    "text",
    [
        "ssh://host",
        "ssh://u:secret@host",
        "ssh://u@host/path",
        "u@host",
        "ssh://u@host:x",
        "ssh://u@",
        "adb:1",
        "",
        "ssh://u@a,b",
        "ssh://u@*",
        "ssh://u@!a",
    ],
)
def test_addresses_of_another_form(text: str) -> None:
    with pytest.raises(InvalidInput):
        SshAddress.parse(text)


@pytest.mark.parametrize(
    ("text", "known_as"),
    [("ssh://u@host", "host"), ("ssh://u@10.0.0.1:2222", "[10.0.0.1]:2222"), ("ssh://u@[::1]:2222", "[::1]:2222")],
)
def test_addresses(text: str, known_as: str) -> None:
    parsed = SshAddress.parse(text)
    assert parsed.known_as == known_as
    assert SshAddress.parse(str(parsed)) == parsed
