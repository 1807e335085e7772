"""Identification of devices."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from device_fixtures import ODPM, laptop, pixel, raspberry_pi

from nas.core.device import show_cores
from nas.core.errors import InvalidInput
from nas.measure.devices.describe import PROPERTIES, boot_id, describe
from nas.measure.devices.probes.readings import Unread
from nas.measure.devices.transports.base import TEXT_LIMIT
from nas.measure.devices.transports.local import LocalTransport
from nas.testing.fake_reader import FakeReader

X86 = {
    "proc/cpuinfo": "".join(
        f"processor\t: {i}\nmodel name\t: Intel(R) Core(TM) i7-1185G7 CPU @ 3.00GHz\n"
        "flags\t\t: fpu avx avx2 smep fma\n\n"
        for i in range(8)
    ),
    "proc/meminfo": "MemTotal:       16384000 kB\n",
    "proc/sys/kernel/osrelease": "6.1.0-13-amd64\n",
    "proc/sys/kernel/hostname": "laptop\n",
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
    "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "sys/class/dmi/id/product_name": "XPS 13 9310\n",
}
ARM = {
    "proc/cpuinfo": "".join(
        f"processor\t: {i}\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd aes asimddp\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: {'0xd0b' if i > 1 else '0xd05'}\nCPU revision\t: 1\n\n"
        for i in range(4)
    ),
    "proc/meminfo": "MemTotal:        8245000 kB\n",
    "proc/sys/kernel/osrelease": "6.6.31+rpt-rpi-2712\n",
    "proc/sys/kernel/hostname": "pi\n",
    "sys/firmware/devicetree/base/model": "Raspberry Pi 5 Model B Rev 1.0\0",
}


def tree(tmp_path: Path, files: dict[str, str]) -> LocalTransport:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return LocalTransport(tmp_path / "cache", root=tmp_path / "root")


def test_a_laptop(tmp_path: Path) -> None:
    device = describe(tree(tmp_path, X86), "x86_64")
    assert device.id.startswith("intel-core-i7-1185g7-")
    assert (device.model, device.cores, device.memory_mb) == ("XPS 13 9310", 8, 16777)
    assert (device.target, device.cpu_features) == ("x86_64-linux", ("avx", "avx2", "fma"))
    assert device.os == "Debian GNU/Linux 12 (bookworm), kernel 6.1.0-13-amd64"


def test_an_arm_board(tmp_path: Path) -> None:
    device = describe(tree(tmp_path, ARM), "aarch64")
    assert device.id.startswith("raspberry-pi-5-model-b-rev-1-0-")
    assert (device.model, device.cpu) == ("Raspberry Pi 5 Model B Rev 1.0", "Cortex-A55 + Cortex-A76")
    assert (device.target, device.cpu_features, device.cores) == ("aarch64-linux", ("asimd", "asimddp"), 4)
    assert device.os == "Linux, kernel 6.6.31+rpt-rpi-2712"


def test_a_device_that_hides_its_kernel_is_described(tmp_path: Path) -> None:
    files = {name: text for name, text in ARM.items() if not name.endswith("osrelease")}
    assert describe(tree(tmp_path, files), "aarch64").os == "Linux"


def test_the_id_outlives_a_new_host_name_and_tells_machines_apart(tmp_path: Path) -> None:
    first = describe(tree(tmp_path, X86), "x86_64").id
    assert describe(tree(tmp_path, {"proc/sys/kernel/hostname": "renamed\n"}), "x86_64").id == first
    assert describe(tree(tmp_path, {"etc/machine-id": "f" * 32}), "x86_64").id != first


@pytest.mark.parametrize("cpu", ["日本", "----", "x" * 200])
def test_any_processor_name_gives_a_valid_id(tmp_path: Path, cpu: str) -> None:
    files = X86 | {"proc/cpuinfo": f"processor : 0\nmodel name : {cpu}\n"}
    assert describe(tree(tmp_path, files), "x86_64").cpu == cpu


@pytest.mark.parametrize("text", ["x" * 5000, "\x1b[31mred\x07", "a\x00b\u202ec", "\ud7ff\x85"])
def test_what_a_device_says_is_bounded_and_printable(text: str) -> None:
    files = {
        "/proc/cpuinfo": f"processor : 0\nmodel name : {text}\nflags : {text} avx{text}\n",
        "/sys/class/dmi/id/product_name": text,
        "/etc/os-release": f'PRETTY_NAME="{text}"',
        "/sys/firmware/devicetree/base/compatible": text,
    }
    device = describe(laptop(**files), "x86_64")
    assert max(map(len, (device.cpu, device.model, device.os, str(device.soc)))) <= 200
    phone = pixel()
    phone.commands[PROPERTIES] = f"[ro.product.model]: [{text}]\n[ro.product.cpu.abilist]: [{text},{text}]\n"
    assert describe(phone).model.isprintable()


@pytest.mark.parametrize("machine", ["", "x86_64; rm -rf /", "X", "a" * 40])
def test_a_machine_of_no_sense(machine: str) -> None:
    device = pixel()
    device.commands["uname -m"] = machine
    with pytest.raises(Unread, match="uname -m says"):
        describe(device)


def test_a_phone() -> None:
    reader = pixel()
    device = describe(reader, transport="adb", tags=["pocket"], pinned_to=[7, 6])
    assert reader.exchanges == 1
    assert device.id.startswith("google-pixel-6-")
    assert (device.model, device.soc, device.transport) == ("Google Pixel 6", "Google Tensor", "adb")
    assert device.os == "Android 14 (UQ1A.240205.004), kernel 6.1.0"
    assert (device.target, device.abis) == ("aarch64-linux", ("arm64-v8a", "armeabi-v7a", "armeabi"))
    assert [(cluster.cpu, cluster.cores, cluster.max_mhz, cluster.capacity) for cluster in device.clusters] == [
        ("Cortex-X1", (6, 7), 2802.0, 1024),
        ("Cortex-A76", (4, 5), 2253.0, 498),
        ("Cortex-A55", (0, 1, 2, 3), 1803.0, 160),
    ]
    assert device.cpu_features == ("asimd", "asimddp")  # i8mm is on the big cores only
    assert (device.cores, device.page_size, device.pinned_to, device.tags) == (8, 4096, (6, 7), ("pocket",))
    assert device.libc == "bionic"
    assert device.energy_counter is None
    assert device.unread["energy_counter"].startswith("no power monitor")
    assert describe(pixel(**ODPM)).energy_counter == "power monitor, 3 rails"


def test_phones_are_distinguished_by_their_serial_numbers() -> None:
    other = pixel()
    other.commands[PROPERTIES] = other.commands[PROPERTIES].replace("1A2B3C", "9Z9Z9Z")
    renamed = pixel(**{"/proc/sys/kernel/hostname": "other\n"})
    assert len({describe(device).id for device in (pixel(), other, renamed)}) == 2
    assert "1a2b3c" not in describe(pixel()).id


@pytest.mark.parametrize("serial", ["0123456789ABCDEF", "1234567890ABCDEF", "12345678", "0000", "unknown", ""])
def test_phones_whose_maker_numbered_none_are_distinguished_by_android(serial: str) -> None:
    def phone(android_id: str) -> FakeReader:
        reader = pixel()
        reader.commands[PROPERTIES] = reader.commands[PROPERTIES].replace("1A2B3C", serial)
        reader.commands["settings get secure android_id"] = f"{android_id}\n"
        return reader

    first, second, none = (describe(phone(text)) for text in ("9774d56d682e549c", "dead00beef", "null"))
    assert len({first.id, second.id, none.id}) == 3
    assert "9774d56d" not in first.id and "android_id" not in first.unread
    assert none.unread["android_id"] == "settings get secure android_id says 'null'"


def test_a_raspberry_pi() -> None:
    device = describe(raspberry_pi())
    assert (device.model, device.soc) == ("Raspberry Pi 5 Model B Rev 1.0", "brcm,bcm2712")
    assert [cluster.cores for cluster in device.clusters] == [(0, 1, 2, 3)]
    copy = raspberry_pi(**{"/sys/firmware/devicetree/base/serial-number": "10000000abcdef02\0"})
    assert describe(copy).id != device.id  # both run a copy of one disk image


def test_a_laptop_of_two_kinds_of_cores() -> None:
    """Two of the P cores clock a step higher: that makes no cluster."""
    device = describe(laptop())
    assert [(cluster.cpu.rpartition(", ")[2], cluster.cores) for cluster in device.clusters] == [
        ("P cores", tuple(range(8))),
        ("E cores", tuple(range(8, 16))),
    ]
    assert device.energy_counter == "RAPL package"
    assert (device.libc, device.boot) == ("glibc 2.36", "6f1c2a9e-boot")
    assert device.unread == {"soc": "/sys/firmware/devicetree/base/compatible: No such file or directory"}


def test_a_server_with_more_cores_than_text_is_read() -> None:
    device = describe(laptop(**{"/sys/devices/system/cpu/online": "0-255\n"}))
    assert device.cores == 256
    assert sum(len(cluster.cores) for cluster in device.clusters) == 256


@pytest.mark.parametrize(
    "end", ["processor\t: 1", "processor\t: 100\n", "model name\t: AMD EP", "flags\t\t: ", "flags\t\t: fpu avx"]
)
def test_the_core_in_which_the_text_of_a_server_breaks_off_tells_nothing(end: str) -> None:
    cores = "".join(
        f"processor\t: {core}\nmodel name\t: AMD EPYC 9754\nflags\t\t: fpu avx {'x' * 500} avx2 fma\n\n"
        for core in range(256)
    )
    text = cores[: cores.rindex(end, 0, TEXT_LIMIT - 1) + len(end)]
    files = dict.fromkeys(("/sys/devices/cpu_core/cpus", "/sys/devices/cpu_atom/cpus"), "")
    files |= {"/proc/cpuinfo": "\n".rjust(TEXT_LIMIT - len(text), "z") + text}
    device = describe(laptop(**files, **{"/sys/devices/system/cpu/online": "0-255\n"}))
    assert device.cpu_features == ("avx", "avx2", "fma")
    assert [(cluster.cpu, len(cluster.cores)) for cluster in device.clusters] == [("AMD EPYC 9754", 256)]


@pytest.mark.parametrize(
    ("online", "allowed", "cores"),
    [
        ("0-7", "0-7", "0-7"),
        ("0-7", "2-3", "2-3"),
        ("0-3", "0-1", "0-1,4-7"),  # what sleeps may be allowed once it wakes up
        ("0-7", "nothing", "0-7"),
    ],
)
def test_cores_that_a_container_leaves(online: str, allowed: str, cores: str) -> None:
    phone = pixel()
    phone.files |= {
        "/sys/devices/system/cpu/online": f"{online}\n",
        "/proc/self/status": f"Name:\thead\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n",
    }
    described = describe(phone)
    assert show_cores([core for cluster in described.clusters for core in cluster.cores]) == cores


def test_cores_that_are_not_there_cannot_be_chosen() -> None:
    with pytest.raises(InvalidInput, match="no core 8: the device has 0-7"):
        describe(pixel(), pinned_to=[7, 8])


def test_this_machine(tmp_path: Path) -> None:
    local = LocalTransport(tmp_path / "cache")
    device = describe(local, platform.machine())
    assert device == describe(local, platform.machine()) == describe(local)
    assert device.cores >= 1
    assert len(boot_id(local)) == 36


@pytest.mark.parametrize("text", ["", "getconf: GNU_LIBC_VERSION: unknown variable", "glibc 2.36; rm -rf /", "glibc x"])
def test_an_unknown_c_library(text: str) -> None:
    device = laptop()
    device.commands["getconf GNU_LIBC_VERSION"] = text
    described = describe(device)
    assert described.libc is None
    assert described.unread["libc"].startswith("getconf GNU_LIBC_VERSION says")
