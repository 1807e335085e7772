"""Which cores of a processor are alike: big.LITTLE, prime cores, Intel's P and E cores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from nas.core.cores import parse_cores
from nas.core.device import Cluster
from nas.core.errors import InvalidInput
from nas.devices.plain import plain
from nas.devices.probes.unread import Unread, number, read
from nas.devices.transports.base import Tree

_CPUS = "/sys/devices/system/cpu"
_HYBRID = {"/sys/devices/cpu_atom/cpus": "E cores", "/sys/devices/cpu_core/cpus": "P cores"}
"""Intel's performance monitors of either kind say which cores are theirs; the faster last."""

FILES = (
    *("/proc/cpuinfo", f"{_CPUS}/online", f"{_CPUS}/cpu*/cpufreq/cpuinfo_max_freq", f"{_CPUS}/cpu*/cpu_capacity"),
    *_HYBRID,
)

_ARM_PARTS = {
    **{0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55", 0xD06: "Cortex-A65", 0xD07: "Cortex-A57"},
    **{0xD08: "Cortex-A72", 0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1"},
    **{0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE"},
    **{0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD48: "Cortex-X2", 0xD49: "Neoverse-N2"},
    **{0xD4B: "Cortex-A78C", 0xD4C: "Cortex-X1C", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2"},
    **{0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4", 0xD84: "Neoverse-V3", 0xD85: "Cortex-X925"},
    **{0xD87: "Cortex-A725", 0xD8E: "Neoverse-N3"},
}
"""ARM's own cores (implementer 0x41) by part number of MIDR_EL1."""

_ARM = 0x41


class _Kind(NamedTuple):
    """What cores have in common; the greater, the faster."""

    rank: int
    capacity: int
    khz: int
    cpu: str


def clusters(tree: Tree, designs: Mapping[int, str]) -> tuple[Cluster, ...]:
    """The device's cores by kind, biggest first.

    On ARM a kind is design, capacity and highest frequency. On x86 the frequency tells nothing: of equal cores the
    best may clock a step higher; there the kernel says which are P and which are E cores.

    Args:
        tree: FILES of the device.
        designs: core number -> name of its design.
    """
    kind_of = _x86_kind if "flags" in _words(tree) else _arm_kind
    found: dict[_Kind, list[int]] = {}
    for core, design in sorted(designs.items()):
        found.setdefault(kind_of(tree, core, design), []).append(core)
    return tuple(
        Cluster(
            cpu=kind.cpu,
            cores=tuple(found[kind]),
            max_mhz=kind.khz / 1000 if kind.khz else None,
            capacity=kind.capacity or None,
        )
        for kind in sorted(found, reverse=True)
    )


def designs(tree: Tree, otherwise: str) -> dict[int, str]:
    """Core number -> its design, of every core that is on.

    Args:
        tree: FILES of the device.
        otherwise: the name where /proc/cpuinfo has none.

    Raises:
        Unread: no /proc/cpuinfo.
    """
    told = {}
    for block in re.split(r"\n[ \t]*\n", read(tree, "/proc/cpuinfo")):
        if core := re.search(r"^processor\s*: (\d{1,4})$", block, re.MULTILINE):
            told[int(core[1])] = _design(block) or otherwise
    # Of a hundred cores the text is longer than what is read of it.
    name = next(iter(told.values()), otherwise)
    return {core: told.get(core, name) for core in _online(tree) or told}


def _online(tree: Tree) -> tuple[int, ...]:
    try:
        return parse_cores(read(tree, f"{_CPUS}/online"))
    except (Unread, InvalidInput):
        return ()


def _design(block: str) -> str | None:
    if name := re.search(r"^model name\s*: *(.+)$", block, re.MULTILINE):
        return plain(name[1])
    told = [
        re.search(rf"^CPU {word}\s*: (0x[0-9a-f]{{1,8}})$", block, re.MULTILINE) for word in ("implementer", "part")
    ]
    if told[0] is None or told[1] is None:
        return None
    implementer, part = told[0][1], told[1][1]
    known = _ARM_PARTS.get(int(part, 16)) if int(implementer, 16) == _ARM else None
    return known or f"{implementer}/{part}"


def _words(tree: Tree) -> set[str]:
    """The names of all lines of /proc/cpuinfo."""
    return set(re.findall(r"^(\w+)\s*:", read(tree, "/proc/cpuinfo"), re.MULTILINE))


def _arm_kind(tree: Tree, core: int, design: str) -> _Kind:
    return _Kind(0, _of_core(tree, core, "cpu_capacity"), _of_core(tree, core, "cpufreq/cpuinfo_max_freq"), design)


def _x86_kind(tree: Tree, core: int, design: str) -> _Kind:
    for rank, (path, name) in enumerate(_HYBRID.items()):
        try:
            if core in parse_cores(read(tree, path)):
                return _Kind(rank, 0, 0, plain(f"{design}, {name}"))
        except (Unread, InvalidInput):
            continue
    return _Kind(0, 0, 0, design)


def _of_core(tree: Tree, core: int, name: str) -> int:
    try:
        return number(tree, f"{_CPUS}/cpu{core}/{name}")
    except Unread:
        return 0
