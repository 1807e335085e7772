"""The list of a host's devices, and who may serve them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.core.errors import InvalidInput, UnknownName
from nas.core.workload import Workload
from nas.measure.devices.agent.agent import served
from nas.measure.devices.agent.connection import Host, find
from nas.measure.devices.attachments import LOCAL, THIS_MACHINE, Attachment, Attachments, open_transport
from nas.measure.devices.describe import ISA_FEATURES
from nas.measure.devices.host_lock import HostLock
from nas.measure.devices.transports.adb import AdbWire
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.ssh import SshWire

PHONE = Attachment(address="adb:R5CT1", id="pixel-8-1f2e", tags=("phone",), cores=(4, 5))
BOX = Attachment(address="ssh://u@box:22", id="box-1")


@pytest.fixture
def attachments(tmp_path: Path) -> Attachments:
    return Attachments(tmp_path / "agent" / "devices.json")


def test_what_was_added_is_read(attachments: Attachments) -> None:
    assert attachments.read() == ()
    attachments.add(PHONE)
    attachments.add(BOX)
    assert Attachments(attachments.path).read() == (PHONE, BOX)
    assert attachments.path.stat().st_mode & 0o777 == 0o600


def test_the_same_address_again_replaces(attachments: Attachments) -> None:
    attachments.add(PHONE)
    changed = PHONE.model_copy(update={"tags": ()})
    attachments.add(changed)
    assert attachments.read() == (changed,)


def test_one_device_has_one_address(attachments: Attachments) -> None:
    attachments.add(PHONE)
    with pytest.raises(InvalidInput, match="nas device remove adb:R5CT1"):
        attachments.add(Attachment(address="adb:10.0.0.2:5555", id=PHONE.id))


@pytest.mark.parametrize("name", [PHONE.address, PHONE.id])
def test_removed_by_address_or_id(attachments: Attachments, name: str) -> None:
    for attachment in (PHONE, BOX):
        attachments.add(attachment)
    assert attachments.remove(name) == PHONE
    assert attachments.read() == (BOX,)
    with pytest.raises(UnknownName, match=r"ssh://u@box:22"):
        attachments.remove(name)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"v": 2}', '{"devices": [{"address": "adb:x", "password": "y"}]}', '{"devices": [{}]}']
)
def test_a_damaged_list_is_reported_with_its_location(attachments: Attachments, text: str) -> None:
    attachments.add(PHONE)
    attachments.path.write_text(text)
    with pytest.raises(InvalidInput, match=r"devices\.json"):
        attachments.read()


def test_one_process_at_a_time_serves_them(attachments: Attachments) -> None:
    attachments.add(PHONE)
    others = Attachments(attachments.path)
    first, second = served(attachments, this_machine=True), served(others, this_machine=True)
    assert first() == (THIS_MACHINE, PHONE)
    assert second() == (THIS_MACHINE,)
    attachments.serve_lock.release()
    assert second() == (THIS_MACHINE, PHONE)
    others.serve_lock.release()


def test_this_machine_is_served_where_it_is_wanted(attachments: Attachments) -> None:
    attachments.add(Attachment(address=LOCAL))
    assert served(attachments, this_machine=False)() == ()


@pytest.mark.parametrize("address", ["box", "telnet:box", "local:x", "", ":", "ssh"])
def test_addresses_of_no_kind(address: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="ssh:"):
        open_transport(address, tmp_path)


def test_a_serial_number_alone_is_answered_with_addresses(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="did you mean adb:R5CT1234567 or ssh:R5CT1234567"):
        open_transport("R5CT1234567", tmp_path)


def test_each_kind_of_address_has_its_transport(tmp_path: Path) -> None:
    assert isinstance(open_transport(LOCAL, tmp_path), LocalTransport)
    for address, wire in (("adb:R5CT1", AdbWire), ("ssh://u@box", SshWire)):
        transport = open_transport(address, tmp_path)
        assert isinstance(transport, ShellTransport) and isinstance(transport._wire, wire)
        transport.close()


def test_this_machine_restricted_to_an_instruction_set_is_another_device(tmp_path: Path) -> None:
    full = LocalTransport(tmp_path)
    whole = find(THIS_MACHINE, full).device
    if not set(ISA_FEATURES["x86-64-v2"]) <= set(whole.cpu_features):
        with pytest.raises(InvalidInput, match=r"lacks .*sse4_2"):
            find(Attachment(address="local:x86-64-v2"), full)
        return
    old = Attachment(address="local:x86-64-v2", tags=("old",))
    transport = open_transport(old.address, tmp_path)
    assert isinstance(transport, LocalTransport)
    device = find(old, transport).device
    assert device.id == f"{whole.id}-x86-64-v2"
    assert device.isa == "x86-64-v2"
    assert device.cpu_features == ISA_FEATURES["x86-64-v2"]
    different = {"id", "isa", "cpu_features", "tags"}
    assert device.model_dump(exclude=different) == whole.model_dump(exclude=different)
    host = Host(find(THIS_MACHINE, full).boot or "", HostLock(tmp_path / "lock"))
    assert find(old, transport, host).lock is host.lock, "measurements of both take turns"


def test_this_machine_with_a_number_of_threads_is_another_device(tmp_path: Path) -> None:
    whole = find(THIS_MACHINE, LocalTransport(tmp_path)).device
    attached = Attachment(address="local:threads=2")
    device = find(attached, open_transport(attached.address, tmp_path)).device
    assert (attached.isa, device.threads, device.id) == (None, 2, f"{whole.id}-t2")
    assert device.pinned(Workload(threads=1)).threads == 2
    assert device.model_dump(exclude={"id", "threads"}) == whole.model_dump(exclude={"id", "threads"})
    both = Attachment(address="local:x86-64-v3:threads=4")
    assert (both.isa, both.threads) == ("x86-64-v3", 4)


@pytest.mark.parametrize(
    "address", ["local:", "local:x86-64-v9", "local:../x", "local:threads=0", "local:threads=2:x86-64-v3", "adb"]
)
def test_addresses_without_a_meaning(address: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="address"):
        open_transport(address, tmp_path)
