"""Reads what a Linux device is from its /proc, /sys and /etc."""

from __future__ import annotations

import hashlib
import re

from nas.core.device import Device
from nas.devices.probes.memory import total_memory_mb
from nas.devices.probes.unread import Unread, read
from nas.devices.transports.base import Tree

_SIMD = re.compile(r"ssse3|sse4_[12]|avx.*|f16c|fma|bmi2|amx_.*|asimd.*|i8mm|bf16|sve.*|sme2?|neon")
_ARM_PARTS = {
    0xD03: "Cortex-A53",
    0xD05: "Cortex-A55",
    0xD08: "Cortex-A72",
    0xD0B: "Cortex-A76",
    0xD0C: "Neoverse-N1",
    0xD40: "Neoverse-V1",
    0xD41: "Cortex-A78",
    0xD44: "Cortex-X1",
    0xD46: "Cortex-A510",
    0xD47: "Cortex-A710",
    0xD48: "Cortex-X2",
    0xD49: "Neoverse-N2",
    0xD4D: "Cortex-A715",
    0xD4E: "Cortex-X3",
    0xD4F: "Neoverse-V2",
    0xD80: "Cortex-A520",
    0xD81: "Cortex-A720",
    0xD82: "Cortex-X4",
}
"""ARM's own cores (implementer 0x41) by part number of MIDR_EL1."""


def describe(tree: Tree, machine: str, transport: str = "local") -> Device:
    """The device behind `tree`.

    Its id is the processor's name and a hash of /etc/machine-id, so it outlives reboots and new host names.

    Args:
        tree: reads the device's files.
        machine: what `uname -m` says there.
        transport: how it is reached.

    Raises:
        Unread: no /proc/cpuinfo or /proc/meminfo, so this is no Linux.
    """
    cpuinfo = read(tree, "/proc/cpuinfo")
    cpu = _cpu_name(cpuinfo, machine)
    return Device(
        id=f"{_slug(cpu, machine)}-{_identity(tree, cpu)}",
        transport=transport,
        model=_model(tree, machine),
        cpu=cpu,
        target=f"{machine}-linux",
        cpu_features=_features(cpuinfo),
        cores=len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)),
        memory_mb=round(total_memory_mb(tree)),
        os=_os(tree),
    )


def boot_id(tree: Tree) -> str:
    """The kernel's random id of this boot.

    Raises:
        Unread: no such file.
    """
    return read(tree, "/proc/sys/kernel/random/boot_id")


def _cpu_name(cpuinfo: str, machine: str) -> str:
    if name := _field(cpuinfo, "model name") or _field(cpuinfo, "Hardware"):
        return name
    parts = re.findall(r"^CPU implementer\s*: (\S+)\n(?:.*\n)*?CPU part\s*: (\S+)", cpuinfo, re.MULTILINE)
    return " + ".join(sorted({_arm_name(*part) for part in parts})) or f"unnamed {machine} processor"


def _arm_name(implementer: str, part: str) -> str:
    known = _ARM_PARTS.get(int(part, 16)) if int(implementer, 16) == 0x41 else None
    return known or f"{implementer}/{part}"


def _features(cpuinfo: str) -> tuple[str, ...]:
    listed = _field(cpuinfo, "flags") or _field(cpuinfo, "Features") or ""
    return tuple(sorted(feature for feature in set(listed.split()) if _SIMD.fullmatch(feature)))


def _field(cpuinfo: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*: *(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else None


def _model(tree: Tree, machine: str) -> str:
    for path in ("/sys/firmware/devicetree/base/model", "/sys/class/dmi/id/product_name"):
        name = _read_or_none(tree, path)
        if name:
            return name.rstrip("\0")
    return f"unnamed {machine} machine"


def _os(tree: Tree) -> str:
    release = _read_or_none(tree, "/etc/os-release") or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', release, re.MULTILINE)
    return f"{name[1] if name else 'Linux'}, kernel {read(tree, '/proc/sys/kernel/osrelease')}"


def _identity(tree: Tree, cpu: str) -> str:
    """Eight hex digits. machine-id(5) asks that the id itself be kept from others, so it is hashed."""
    source = _read_or_none(tree, "/etc/machine-id") or read(tree, "/proc/sys/kernel/hostname")
    return hashlib.sha256(f"hilnas device\0{source}\0{cpu}".encode()).hexdigest()[:8]


def _slug(cpu: str, machine: str) -> str:
    without_marks = re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\bProcessor\b", " ", cpu, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", without_marks.lower()).strip("-")[:40].rstrip("-") or machine.replace("_", "-")


def _read_or_none(tree: Tree, path: str) -> str | None:
    try:
        return read(tree, path) or None
    except Unread:
        return None
