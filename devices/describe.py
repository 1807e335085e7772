"""Reads what a Linux or Android device is: from its /proc, /sys and /etc, and from Android's properties."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nas.core.cores import show_cores
from nas.core.device import Device
from nas.core.errors import InvalidInput
from nas.devices import clusters
from nas.devices.plain import plain
from nas.devices.probes import energy
from nas.devices.probes.memory import total_memory_mb
from nas.devices.probes.unread import Unread, read
from nas.devices.snapshot import Snapshot
from nas.devices.transports.base import Reader, Tree

_SIMD = re.compile(
    r"ssse3|sse4_[12]|avx[a-z0-9_]{0,20}|f16c|fma|bmi2|amx_[a-z0-9_]{0,12}|asimd[a-z0-9]{0,8}|fphp|i8mm|bf16|sve[a-z0-9_]{0,12}|sme2?|neon"
)
_TREE = "/sys/firmware/devicetree/base"
_MODELS = (f"{_TREE}/model", "/sys/class/dmi/id/product_name")
_SERIAL, _COMPATIBLE, _PAGES = f"{_TREE}/serial-number", f"{_TREE}/compatible", "/proc/self/smaps"
_BOOT = "/proc/sys/kernel/random/boot_id"
_FILES = (
    *("/proc/meminfo", "/proc/sys/kernel/osrelease", "/proc/sys/kernel/hostname", "/etc/os-release", "/etc/machine-id"),
    *(*_MODELS, _SERIAL, _COMPATIBLE, _PAGES, _BOOT, *clusters.FILES, *energy.FILES),
)
_MACHINE = "uname -m"
_LIBC = "getconf GNU_LIBC_VERSION"
PROPERTIES = (
    "getprop | grep -E '^[[]ro[.](product[.](manufacturer|model|cpu[.]abilist)|soc|build[.](version|id)|.*serialno)'"
)
"""Android's own words about itself."""


def describe(
    reader: Reader,
    machine: str | None = None,
    transport: str = "local",
    *,
    tags: Sequence[str] = (),
    pinned_to: Sequence[int] = (),
) -> Device:
    """The device behind `reader`, read in one exchange.

    Its id is made of the processor's or phone's name and a hash of what tells it from others of its kind
    (/etc/machine-id, serial numbers), so it outlives reboots and new host names.

    Args:
        reader: reads the device's files.
        machine: what `uname -m` says there; None: it is asked.
        transport: how it is reached.
        tags: given by its owner.
        pinned_to: cores that its owner chose for runners.

    Raises:
        Unread: no /proc/cpuinfo or /proc/meminfo, so this is no Linux.
        InvalidInput: a core of `pinned_to` is not there.
    """
    there = Snapshot.take(reader, _FILES, (_MACHINE, _LIBC, PROPERTIES))
    machine = machine or _machine(there)
    android = _properties(there)
    designs = clusters.designs(there, f"unnamed {machine} processor")
    if absent := set(pinned_to) - set(designs):
        raise InvalidInput(f"there is no core {show_cores(absent)}: the device has {show_cores(designs)}")
    cpu = _cpu_name(there, designs)
    model = plain(_phone(android) if android else _model(there, machine))
    unread: dict[str, str] = {}
    optional: dict[str, Callable[[], Any]] = {
        "soc": lambda: _soc(there, android),
        "page_size": lambda: _page_size(there),
        "libc": lambda: _libc(there, android),
        "boot": lambda: plain(read(there, _BOOT)),
        "energy_counter": lambda: energy.energy_counter(there).name,
    }
    values = {name: _unless_unread(name, probe, unread) for name, probe in optional.items()}
    return Device(
        id=f"{_slug(model if android else cpu, machine)}-{_identity(there, android, cpu)}",
        transport=transport,
        model=model,
        cpu=plain(cpu),
        target=f"{machine}-linux",
        abis=tuple(plain(abi) for abi in android.get("ro.product.cpu.abilist", "").split(",")[:16] if abi),
        cpu_features=_features(there),
        cores=len(designs),
        clusters=clusters.clusters(there, designs),
        pinned_to=tuple(sorted(set(pinned_to))),
        memory_mb=round(total_memory_mb(there)),
        os=plain(_os(there, android)),
        tags=tuple(tags),
        unread=unread,
        **values,
    )


def boot_id(tree: Tree) -> str:
    """The kernel's random id of this boot.

    Raises:
        Unread: no such file.
    """
    return read(tree, _BOOT)


def _unless_unread(name: str, probe: Callable[[], Any], unread: dict[str, str]) -> Any:
    """What `probe` reads; None where it cannot, with the reason in `unread`."""
    try:
        return probe()
    except Unread as reason:
        unread[name] = plain(str(reason))
        return None


def _machine(there: Snapshot) -> str:
    try:
        said = there.output(_MACHINE).strip()
    except OSError as error:
        raise Unread(f"{_MACHINE}: {error.strerror}") from error
    if not re.fullmatch(r"[a-z0-9_]{1,32}", said):
        raise Unread(f"{_MACHINE} says {said[:40]!r}")
    return said


def _properties(there: Snapshot) -> dict[str, str]:
    """Android's properties; none elsewhere."""
    try:
        said = there.output(PROPERTIES)
    except OSError:
        return {}
    return dict(re.findall(r"^\[(ro\.[\w.]{1,64})\]: \[(.{0,200})\]\r?$", said, re.MULTILINE))


def _phone(android: Mapping[str, str]) -> str:
    maker, model = android.get("ro.product.manufacturer", ""), android.get("ro.product.model", "")
    return model if model.lower().startswith(maker.lower()) else f"{maker} {model}"


def _cpu_name(there: Snapshot, designs: Mapping[int, str]) -> str:
    cpuinfo = read(there, "/proc/cpuinfo")
    return _field(cpuinfo, "model name") or _field(cpuinfo, "Hardware") or " + ".join(sorted(set(designs.values())))


def _features(there: Snapshot) -> tuple[str, ...]:
    """What every core has: of unlike ones, the smaller may lack something."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", read(there, "/proc/cpuinfo"), re.MULTILINE)
    common = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    return tuple(sorted(feature for feature in common if _SIMD.fullmatch(feature)))


def _field(cpuinfo: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*: *(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else None


def _model(there: Snapshot, machine: str) -> str:
    told = (_read_or_none(there, path) for path in _MODELS)
    return next(filter(None, told), f"unnamed {machine} machine")


def _soc(there: Snapshot, android: Mapping[str, str]) -> str:
    """Android says it; a device tree lists what the board is compatible with, its chip last."""
    named = f"{android.get('ro.soc.manufacturer', '')} {android.get('ro.soc.model', '')}".strip()
    return plain(named or read(there, _COMPATIBLE).strip("\0").split("\0")[-1])


def _page_size(there: Snapshot) -> int:
    found = re.search(r"^KernelPageSize:\s+(\d{1,7}) kB$", read(there, _PAGES), re.MULTILINE)
    if not found:
        raise Unread(f"{_PAGES}: no KernelPageSize")
    return int(found[1]) * 1024


def _libc(there: Snapshot, android: Mapping[str, str]) -> str:
    """Which programs with shared libraries can run here at all."""
    if android:
        return "bionic"
    try:
        said = there.output(_LIBC).strip()
    except OSError as error:
        raise Unread(f"{_LIBC}: {error.strerror}") from error
    if not re.fullmatch(r"glibc \d{1,3}\.\d{1,4}", said):
        raise Unread(f"{_LIBC} says {said[:40]!r}")
    return said


def _os(there: Snapshot, android: Mapping[str, str]) -> str:
    release = _read_or_none(there, "/etc/os-release") or ""
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', release, re.MULTILINE)
    name = pretty[1] if pretty else "Linux"
    if version := android.get("ro.build.version.release"):
        name = f"Android {version} ({android.get('ro.build.id', 'unnamed build')})"
    return f"{name}, kernel {read(there, '/proc/sys/kernel/osrelease')}"


def _identity(there: Snapshot, android: Mapping[str, str], cpu: str) -> str:
    """Eight hex digits. machine-id(5) asks that the id itself be kept from others, so it is hashed.

    Boards that run copies of one disk image have one machine-id, but each its serial number.
    """
    serial = android.get("ro.serialno") or android.get("ro.boot.serialno")
    source = _read_or_none(there, "/etc/machine-id") or serial or read(there, "/proc/sys/kernel/hostname")
    parts = ["hilnas device", source, cpu, *filter(None, [_read_or_none(there, _SERIAL)])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _slug(name: str, machine: str) -> str:
    without_marks = re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\bProcessor\b", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", without_marks.lower()).strip("-")[:40].rstrip("-") or machine.replace("_", "-")


def _read_or_none(tree: Tree, path: str) -> str | None:
    try:
        return read(tree, path).rstrip("\0") or None
    except Unread:
        return None
