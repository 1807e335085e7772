"""What a device says it is."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from nas.devices.describe import boot_id, describe
from nas.devices.transports.local import LocalTransport

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
    assert device.id.startswith("cortex-a55-cortex-a76-")
    assert (device.model, device.cpu) == ("Raspberry Pi 5 Model B Rev 1.0", "Cortex-A55 + Cortex-A76")
    assert (device.target, device.cpu_features, device.cores) == ("aarch64-linux", ("asimd", "asimddp"), 4)
    assert device.os == "Linux, kernel 6.6.31+rpt-rpi-2712"


def test_the_id_outlives_a_new_host_name_and_tells_machines_apart(tmp_path: Path) -> None:
    first = describe(tree(tmp_path, X86), "x86_64").id
    assert describe(tree(tmp_path, {"proc/sys/kernel/hostname": "renamed\n"}), "x86_64").id == first
    assert describe(tree(tmp_path, {"etc/machine-id": "f" * 32}), "x86_64").id != first


@pytest.mark.parametrize("cpu", ["日本", "----", "x" * 200])
def test_any_processor_name_gives_a_valid_id(tmp_path: Path, cpu: str) -> None:
    files = X86 | {"proc/cpuinfo": f"processor : 0\nmodel name : {cpu}\n"}
    assert describe(tree(tmp_path, files), "x86_64").cpu == cpu


def test_this_machine(tmp_path: Path) -> None:
    local = LocalTransport(tmp_path / "cache")
    device = describe(local, platform.machine())
    assert device == describe(local, platform.machine())
    assert device.cores >= 1
    assert len(boot_id(local)) == 36
