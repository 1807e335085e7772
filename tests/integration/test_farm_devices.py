"""A device host with a real sshd and a real adbd: attached by the command, served over TLS, unplugged and back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import pytest
from cli_runner import Outcome, nas
from device_lab import Machine, adbd, sshd

from nas.core.errors import UnknownName
from nas.infra.store.rows import JobState
from nas.infra.store.store import Store
from nas.measure.devices.agent.agent import make_agent, served
from nas.measure.devices.agent.trust import enrol
from nas.measure.devices.attachments import Attachments
from nas.measure.devices.transports import wire
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.ssh import SshAddress, host_key, pinned_fingerprints
from nas.measure.farm.farm import open_farm
from tests.support.tls_coordinator import TlsCoordinator
from tests.support.waiting import until

pytestmark = pytest.mark.needs("devices")


class Host:
    """A device host: its attached devices, and its home."""

    def __init__(self, home: Path, box: Machine, phone: Machine) -> None:
        self.home, self.box, self.phone = home, box, phone
        self.ssh = SshAddress("root", box.address, box.port)
        self.adb = f"adb:{phone.address}:{phone.port}"
        self.attachments = Attachments(home / "agent" / "devices.json")

    def nas(self, *arguments: str) -> Outcome:
        with mock.patch.dict(os.environ, {"NAS_HOME": str(self.home), "NAS_CACHE": str(self.home / "cache")}):
            return nas(*arguments)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    home, folders = tmp_path_factory.mktemp("home"), [tmp_path_factory.mktemp(name) for name in ("box", "phone")]
    with ExitStack() as stack:
        box = stack.enter_context(sshd(folders[0], home / "keys"))
        phone = stack.enter_context(adbd(folders[1], AdbKey.load(home / "keys" / "adb").public()))
        for name, machine in (("box", box), ("phone", phone)):
            (machine.root / "etc/machine-id").write_text(name)
        yield Host(home, box, phone)


def test_a_machine_is_trusted_by_its_key_from_add_to_remove(host: Host) -> None:
    key = host_key(host.ssh).fingerprint
    question = host.nas("device", "add", str(host.ssh))
    assert question.code == 3 and f"--host-key {key}" in question.err
    wrong = host.nas("device", "add", str(host.ssh), "--host-key", "SHA256:abc")
    assert wrong.code == 3 and "another machine" in wrong.err
    assert host.attachments.read() == ()
    done = host.nas("device", "add", str(host.ssh), "--host-key", key, "--tag", "box", "--cores", "0")
    assert done.code == 0, done.err
    (entry,) = host.attachments.read()
    assert (entry.address, entry.tags, entry.cores) == (str(host.ssh), ("box",), (0,))
    assert f"device   {entry.id}\n" in done.out
    assert pinned_fingerprints(host.ssh, host.home / "keys") == [key]
    assert host.nas("device", "remove", str(host.ssh)).code == 0
    assert pinned_fingerprints(host.ssh, host.home / "keys") == []


def test_a_launch_on_the_host_finds_what_was_attached(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_HOME", str(host.home))
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    assert host.nas("device", "add", host.adb, "--tag", "phone").code == 0
    with closing(Store.open()) as store, open_farm(store) as farm:
        phone = farm.device("tag:phone")
        assert phone.transport == "adb"
        assert farm.device(phone.id[:-2]) == phone
        with pytest.raises(UnknownName, match="local"):
            farm.device("no-such-device")


def test_devices_work_are_unplugged_and_come_back(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in (str(host.ssh), host.adb):
        assert host.nas("device", "add", address, "--yes").code == 0
    monkeypatch.setenv("NAS_HOME", str(host.home))
    monkeypatch.setattr(wire, "SILENT_S", 3)
    with TlsCoordinator(tmp_path / "coordinator") as coordinator:
        enrolment = enrol(coordinator.invite(), "shelf", host.home / "agent")
        folders = {"cache": tmp_path / "cache", "lock": tmp_path / "lock", "state": host.home / "agent"}
        client = enrolment.client()
        attached = served(host.attachments, this_machine=False)
        agent = make_agent("shelf", client, attached, key=enrolment.signing_key, **folders)
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            come_and_go(host, coordinator)
        finally:
            agent.abort()
            thread.join(60)
            client.close()
            host.attachments.serve_lock.release()
    assert not thread.is_alive()


def come_and_go(host: Host, coordinator: TlsCoordinator) -> None:
    until(lambda: set(coordinator.online()) == {"ssh", "adb"})
    box, phone = (coordinator.online()[transport].id for transport in ("ssh", "adb"))
    for name, device in (("on-box", box), ("on-phone", phone)):
        done = coordinator.wait_for(coordinator.queue(device, name, f"echo {name}"))
        assert done.result is not None and done.result.pairs[0].candidate.stdout == f"{name}\n"
    remote, local = "/began", host.box.root / "began"
    twice = coordinator.queue(box, "twice", f"[ -e {remote} ] && echo again && exit; touch {remote}; sleep 60")
    until(local.exists)
    with host.box.cut():
        until(lambda: set(coordinator.online()) == {"adb"})
        assert coordinator.wait_for(coordinator.queue(phone, "meanwhile", "echo meanwhile")).state is JobState.DONE
    done = coordinator.wait_for(twice)
    assert done.result is not None and done.result.pairs[0].candidate.stdout == "again\n"
    assert done.attempts == 2
    assert set(coordinator.online()) == {"ssh", "adb"}
