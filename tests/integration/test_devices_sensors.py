"""One exchange with a real sshd and a real adbd brings all that a description and a moment need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_lab import Machine, adbd, sshd

from nas.measure.devices.agent.run_plan import Observer
from nas.measure.devices.describe import PROPERTIES, describe
from nas.measure.devices.probes import android
from nas.measure.devices.transports.adb import AdbWire
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.ssh import SshAddress, SshWire, host_key, pin
from nas.testing.transport_contract import run

pytestmark = pytest.mark.needs("devices")

GETPROP = """#!/bin/sh
cat <<'end'
[ro.build.id]: [UQ1A.240205.004]
[ro.build.version.release]: [14]
[ro.product.cpu.abilist]: [arm64-v8a,armeabi-v7a]
[ro.product.manufacturer]: [Google]
[ro.product.model]: [Pixel 6]
[ro.serialno]: [1A2B3C]
[persist.sys.locale]: [en-US]
end
"""
DUMPSYS = """#!/bin/sh
case $1 in
thermalservice) echo 'Thermal Status: 2'; echo '	Temperature{mValue=41.5, mType=0, mName=BIG, mStatus=0}' ;;
battery) printf '  %s\\n' 'AC powered: false' 'USB powered: true' 'status: 5' 'level: 100' 'scale: 100' ;;
power)
    yes '  a long report' | head -n 9999; echo '  mWakefulness=Awake'; echo '  mWakefulnessChanging=false'
    yes | head -n 9999; echo '  mSettingBatterySaverEnabled=true'; echo 'mWakefulness=1'; yes | head -n 9999 ;;
esac
"""


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShellTransport]:
    """adbd with commands that say what a phone's would."""
    keys = tmp_path_factory.mktemp("keys")
    with adbd(tmp_path_factory.mktemp("phone"), AdbKey.load(keys / "adb").public()) as machine:
        for name, text in (("getprop", GETPROP), ("dumpsys", DUMPSYS)):
            add_command(machine, name, text)
        transport = ShellTransport(AdbWire(f"adb:{machine.address}:{machine.port}", keys))
        transport.connect()
        yield transport
        transport.close()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShellTransport]:
    keys = tmp_path_factory.mktemp("keys")
    with sshd(tmp_path_factory.mktemp("box"), keys, port=2222) as machine:
        address = SshAddress("root", machine.address, machine.port)
        pin(address, host_key(address), keys)
        transport = ShellTransport(SshWire(address, keys))
        transport.connect()
        yield transport
        transport.close()


def add_command(machine: Machine, name: str, text: str) -> None:
    path = machine.root / "android" / name
    path.write_text(text)
    path.chmod(0o755)


def test_a_phone_describes_itself(phone: ShellTransport) -> None:
    device = describe(phone, transport="adb")
    assert device.id.startswith("google-pixel-6-")
    assert device.os.startswith("Android 14 (UQ1A.240205.004), kernel ")
    assert (device.target, device.abis) == ("x86_64-linux", ("arm64-v8a", "armeabi-v7a"))
    assert device.page_size == 4096
    assert "persist" not in str(phone.read_many([], [PROPERTIES]))


def test_a_phones_services_are_read(phone: ShellTransport) -> None:
    observer = Observer(phone)
    before = observer.before()
    conditions = observer.after(before, run(phone, "sleep 0.6"))
    # Debian's kernel for this machine may have sensors, which come first; this one's services are asked where not.
    assert (conditions.screen_on, conditions.power_saver, conditions.battery_status) == (True, True, "Full")
    assert (conditions.charger, conditions.thermal_status) == ("USB", 2)
    assert conditions.free_disk_mb is not None and conditions.free_disk_mb > 0
    assert conditions.interval_s is not None and conditions.interval_s >= 0.6
    assert conditions.foreign_cpu is not None


def test_a_box_over_ssh(box: ShellTransport) -> None:
    device = describe(box, transport="ssh", pinned_to=[0])
    assert (device.target, device.pinned_to, device.abis) == ("x86_64-linux", (0,), ())
    observer = Observer(box)
    conditions = observer.after(observer.before(), run(box, "exit 0"))
    assert conditions.unread["screen_on"] == android.NO_ANDROID
    assert conditions.load_1min is not None and conditions.free_disk_mb is not None and conditions.oom_kills is not None


def test_a_service_that_floods_is_cut(phone: ShellTransport, tmp_path: Path) -> None:
    answer = phone.read_many(["/proc/stat"], ["yes flood", "echo after"])
    assert [len(str(answer["yes flood"])), answer["echo after"]] == [1 << 16, "after\n"]
