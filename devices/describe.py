"""Identifies a Linux or Android device from its /proc, /sys and /etc and from Android's properties."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nas.core.device import TEXT_LENGTH, Cluster, Device, parse_cores, show_cores
from nas.core.errors import InvalidInput
from nas.measure.devices.probes.memory import total_memory_mb
from nas.measure.devices.probes.power import ENERGY_FILES, energy_counter
from nas.measure.devices.probes.readings import Readings, Unread, matched, names, number, read, read_or_empty
from nas.measure.devices.transports.base import TEXT_LIMIT, Reader, Tree

_CPUINFO = "/proc/cpuinfo"
_CPUS = "/sys/devices/system/cpu"
_HYBRID = {"/sys/devices/cpu_atom/cpus": "E cores", "/sys/devices/cpu_core/cpus": "P cores"}
"""Intel's performance monitors list the P and the E cores; the faster kind last."""

_CPU_FILES = (
    *(_CPUINFO, f"{_CPUS}/online", f"{_CPUS}/present"),
    *(f"{_CPUS}/cpu*/{name}" for name in ("cpufreq/cpuinfo_max_freq", "cpu_capacity")),
    f"{_CPUS}/cpufreq/policy*/related_cpus",
    *_HYBRID,
)

_SIMD = re.compile(
    r"ssse3|sse4_[12]|avx[a-z0-9_]{0,20}|f16c|fma|bmi2|amx_[a-z0-9_]{0,12}|asimd[a-z0-9]{0,8}|fphp|i8mm|bf16|sve[a-z0-9_]{0,12}|sme2?|neon"
)
_X86_64_V2 = ("ssse3", "sse4_1", "sse4_2")
_X86_64_V3 = (*_X86_64_V2, "avx", "avx2", "bmi2", "f16c", "fma")
_X86_64_V4 = (*_X86_64_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
ISA_FEATURES = {"x86-64-v2": _X86_64_V2, "x86-64-v3": _X86_64_V3, "x86-64-v4": _X86_64_V4}
"""Level of the x86-64 psABI -> its CPU features, of those that are read, by the kernel's names."""
_TREE = "/sys/firmware/devicetree/base"
_MODELS = (f"{_TREE}/model", "/sys/class/dmi/id/product_name")
_SERIAL = f"{_TREE}/serial-number"
_COMPATIBLE = f"{_TREE}/compatible"
_PAGES = "/proc/self/smaps"
_STATUS = "/proc/self/status"
_BOOT = "/proc/sys/kernel/random/boot_id"
_MOST_ID = 64
_FILES = (
    *("/proc/meminfo", "/proc/sys/kernel/osrelease", "/proc/sys/kernel/hostname", "/etc/os-release", "/etc/machine-id"),
    *(*_MODELS, _SERIAL, _COMPATIBLE, _PAGES, _STATUS, _BOOT, *_CPU_FILES, *ENERGY_FILES),
)
_MACHINE = "uname -m"
_LIBC = "getconf GNU_LIBC_VERSION"
PROPERTIES = (
    "getprop | grep -E '^[[]ro[.](product[.](manufacturer|model|cpu[.]abilist)|soc|build[.](version|id)|.*serialno)'"
)
"""Android's own description of itself."""
_ANDROID_ID = "settings get secure android_id"
_COUNTED = ("0123456789abcdef", "01234567890abcdef")
"""Phones whose maker numbered none of them have a part of one of these as serial number."""


def describe(
    reader: Reader,
    machine: str | None = None,
    transport: str = "local",
    *,
    tags: Sequence[str] = (),
    pinned_to: Sequence[int] = (),
) -> Device:
    """Returns the device that `reader` reads, in one exchange.

    Its id is made of the name of the processor, phone or board and a hash of what distinguishes it from others of its
    kind (/etc/machine-id, serial numbers), so it survives reboots and new host names, and cores that sleep.
    Some makers give all phones one serial number: these are told apart by Android's own id, which a factory reset
    changes.

    Args:
        reader: reads the device's files.
        machine: output of `uname -m` there; None: run it.
        transport: how it is reached.
        tags: given by its owner.
        pinned_to: cores that its owner chose for runners.

    Raises:
        Unread: no /proc/cpuinfo or /proc/meminfo, so this is not Linux.
        InvalidInput: a core of `pinned_to` does not exist.
    """
    readings = Readings.take(reader, _FILES, (_MACHINE, _LIBC, PROPERTIES))
    machine = machine or _output(readings, _MACHINE, r"[a-z0-9_]{1,32}")
    android = _properties(readings)
    designs = _allowed(readings, _designs(readings, f"unnamed {machine} processor"))
    if absent := set(pinned_to) - set(designs):
        raise InvalidInput(f"there is no core {show_cores(absent)}: the device has {show_cores(designs)}")
    cpuinfo = _cpuinfo(readings)
    # It is empty where only the designs of the cores that are online are listed.
    cpu = _field(cpuinfo, "model name") or _field(cpuinfo, "Hardware") or ""
    model = sanitise(_phone(android) if android else _model(readings, machine))
    serial = android.get("ro.serialno") or android.get("ro.boot.serialno") or ""
    unread: dict[str, str] = {}
    if android and _is_shared(serial):
        settings = Readings.take(reader, (), (_ANDROID_ID,))
        android_id = _unless_unread("android_id", lambda: _output(settings, _ANDROID_ID, "[0-9a-f]{1,16}"), unread)
        serial = android_id or serial
    optional: dict[str, Callable[[], Any]] = {
        "soc": lambda: _soc(readings, android),
        "page_size": lambda: _page_size(readings),
        "libc": lambda: "bionic" if android else _output(readings, _LIBC, r"glibc \d{1,3}\.\d{1,4}"),
        "boot": lambda: sanitise(read(readings, _BOOT)),
        "energy_counter": lambda: energy_counter(readings).name,
    }
    values = {name: _unless_unread(name, probe, unread) for name, probe in optional.items()}
    return Device(
        id=f"{_slug(model if android or not cpu else cpu, machine)}-{_identity(readings, serial, cpu)}",
        transport=transport,
        model=model,
        cpu=sanitise(cpu or " + ".join(sorted(set(designs.values())))),
        target=f"{machine}-linux",
        abis=tuple(sanitise(abi) for abi in android.get("ro.product.cpu.abilist", "").split(",")[:16] if abi),
        cpu_features=_features(readings),
        cores=len(designs),
        clusters=_clusters(readings, designs),
        pinned_to=tuple(sorted(set(pinned_to))),
        memory_mb=round(total_memory_mb(readings)),
        os=sanitise(_os(readings, android)),
        tags=tuple(tags),
        unread=unread,
        **values,
    )


def restricted(device: Device, isa: str | None, gpu: str | None, threads: int | None) -> Device:
    """Returns a device as another one; None leaves a property as it is.

    Args:
        device: as it describes itself.
        isa: the instruction set, of `ISA_FEATURES`, that it has and no other.
        gpu: of `GPU_FEATURES`, computes everything.
        threads: of every workload.

    Raises:
        InvalidInput: its processor lacks instructions of that set.
    """
    features = device.cpu_features
    if isa is not None:
        if lacking := ", ".join(sorted(set(ISA_FEATURES[isa]) - set(features))):
            raise InvalidInput(f"{device.cpu} lacks {lacking} of {isa}")
        features = ISA_FEATURES[isa]
    if gpu is not None:
        features = (*features, gpu)
    suffix = "".join(f"-{word}" for word in (isa, gpu, threads and f"t{threads}") if word)
    update = {name: value for name, value in {"isa": isa, "threads": threads}.items() if value is not None}
    id = device.id[: _MOST_ID - len(suffix)].rstrip("-") + suffix
    return device.model_copy(update={"id": id, "cpu_features": features, **update})


def boot_id(reader: Reader) -> str:
    """Returns the kernel's random id of this boot; raises `Unread` where there is none."""
    return read(Readings.take(reader, (_BOOT,)), _BOOT)


def _unless_unread(name: str, probe: Callable[[], Any], unread: dict[str, str]) -> Any:
    """Returns what `probe` reads; None if it cannot, with the reason in `unread`."""
    try:
        return probe()
    except Unread as reason:
        unread[name] = sanitise(str(reason))
        return None


def _output(readings: Readings, command: str, pattern: str) -> str:
    output = readings.output(command).strip()
    if not re.fullmatch(pattern, output):
        raise Unread(f"{command} says {output[:40]!r}")
    return output


def _properties(readings: Readings) -> dict[str, str]:
    """Returns Android's properties; none elsewhere."""
    try:
        output = readings.output(PROPERTIES)
    except Unread:
        return {}
    return dict(re.findall(r"^\[(ro\.[\w.]{1,64})\]: \[(.{0,200})\]\r?$", output, re.MULTILINE))


def _phone(android: Mapping[str, str]) -> str:
    maker, model = android.get("ro.product.manufacturer", ""), android.get("ro.product.model", "")
    return model if model.lower().startswith(maker.lower()) else f"{maker} {model}"


def _cpuinfo(tree: Tree) -> str:
    """Returns /proc/cpuinfo; where it is longer than what is read of it, without the core in which that breaks off."""
    text = read(tree, _CPUINFO)
    is_whole = len(tree.read_text(_CPUINFO).encode(errors="replace")) < TEXT_LIMIT
    return text if is_whole else text.rpartition("\n\n")[0]


def _features(readings: Readings) -> tuple[str, ...]:
    """Returns the SIMD features of every core: where cores differ, the smaller ones may lack some."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(readings), re.MULTILINE)
    common = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    return tuple(sorted(feature for feature in common if _SIMD.fullmatch(feature)))


def _field(cpuinfo: str, name: str) -> str | None:
    match = re.search(rf"^{name}\s*: *(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else None


def _model(readings: Readings, machine: str) -> str:
    models = (read_or_empty(readings, path) for path in _MODELS)
    return next(filter(None, models), f"unnamed {machine} machine")


def _soc(readings: Readings, android: Mapping[str, str]) -> str:
    """Returns the chip: Android names it; a device tree lists what the board is compatible with, its chip last."""
    named = f"{android.get('ro.soc.manufacturer', '')} {android.get('ro.soc.model', '')}".strip()
    return sanitise(named or read(readings, _COMPATIBLE).strip("\0").split("\0")[-1])


def _page_size(readings: Readings) -> int:
    pattern, text = r"^KernelPageSize:\s+(\d{1,7}) kB$", read(readings, _PAGES)
    return int(matched(pattern, text, f"{_PAGES}: no KernelPageSize")) * 1024


def _os(readings: Readings, android: Mapping[str, str]) -> str:
    release = read_or_empty(readings, "/etc/os-release")
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', release, re.MULTILINE)
    name = pretty[1] if pretty else "Linux"
    if version := android.get("ro.build.version.release"):
        name = f"Android {version} ({android.get('ro.build.id', 'unnamed build')})"
    kernel = read_or_empty(readings, "/proc/sys/kernel/osrelease")  # apps of Android may not read it
    return f"{name}, kernel {kernel}" if kernel else name


def _is_shared(serial: str) -> bool:
    text = serial.lower()
    return text == "unknown" or len(set(text)) == 1 or any(text in counted for counted in _COUNTED)


def _identity(readings: Readings, serial: str, cpu: str) -> str:
    """Returns eight hex digits. machine-id(5) asks to keep the id itself secret, so it is hashed.

    Boards that run copies of one disk image share a machine-id, but each has its own serial number.
    """
    source = read_or_empty(readings, "/etc/machine-id") or serial or read(readings, "/proc/sys/kernel/hostname")
    parts = ["hilnas device", source, cpu, *filter(None, [read_or_empty(readings, _SERIAL)])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _slug(name: str, machine: str) -> str:
    without_marks = re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\bProcessor\b", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", without_marks.lower()).strip("-")[:40].rstrip("-") or machine.replace("_", "-")


_ARM_PARTS = {
    **{0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55", 0xD06: "Cortex-A65", 0xD07: "Cortex-A57"},
    **{0xD08: "Cortex-A72", 0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1"},
    **{0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE"},
    **{0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD48: "Cortex-X2", 0xD49: "Neoverse-N2"},
    **{0xD4B: "Cortex-A78C", 0xD4C: "Cortex-X1C", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2"},
    **{0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4", 0xD84: "Neoverse-V3", 0xD85: "Cortex-X925"},
    **{0xD87: "Cortex-A725", 0xD8E: "Neoverse-N3", 0xD02: "Cortex-A34", 0xD43: "Cortex-A65AE", 0xD4A: "Neoverse-E1"},
    **{0xD88: "Cortex-A520AE", 0xD89: "Cortex-A720AE", 0xD8F: "Cortex-A320"},
    **{0xD8A: "C1-Nano", 0xD8B: "C1-Pro", 0xD8C: "C1-Ultra", 0xD90: "C1-Premium"},
}
"""ARM's own cores (implementer 0x41) by part number of MIDR_EL1."""

_QUALCOMM_PARTS = {
    **{0x800: "Kryo 2xx Gold", 0x801: "Kryo 2xx Silver", 0x802: "Kryo 3xx Gold", 0x803: "Kryo 3xx Silver"},
    **{0x804: "Kryo 4xx Gold", 0x805: "Kryo 4xx Silver"},
}
_APPLE_PARTS = {
    **dict.fromkeys((0x22, 0x24, 0x28), "Icestorm"),
    **dict.fromkeys((0x23, 0x25, 0x29), "Firestorm"),
    **dict.fromkeys((0x32, 0x34, 0x38), "Blizzard"),
    **dict.fromkeys((0x33, 0x35, 0x39), "Avalanche"),
}
"""M1 and M2, each of three sizes."""
_PARTS = {0x41: _ARM_PARTS, 0x51: _QUALCOMM_PARTS, 0x61: _APPLE_PARTS}
"""Implementer of MIDR_EL1 -> its cores."""
_USUAL = 1
_RANKS = {
    **dict.fromkeys(
        (f"Cortex-A{model}" for model in ("34", "35", "53", "55", "65", "65AE", "320", "510", "520", "520AE")), 0
    ),
    **dict.fromkeys(("C1-Nano", "Neoverse-E1", "Icestorm", "Blizzard"), 0),
    **dict.fromkeys((name for name in _QUALCOMM_PARTS.values() if name.endswith("Silver")), 0),
    **dict.fromkeys(("Cortex-X1", "Cortex-X1C", "Cortex-X2", "Cortex-X3", "Cortex-X4", "Cortex-X925"), 2),
    **dict.fromkeys(("C1-Premium", "C1-Ultra"), 2),
}
"""Design -> class of its size; `_USUAL` of others."""


class _Kind(NamedTuple):
    """Class of cores; the greater, the faster."""

    rank: int
    capacity: int
    khz: int
    cpu: str


def _clusters(tree: Tree, designs: Mapping[int, str]) -> tuple[Cluster, ...]:
    """Returns the device's cores by kind, biggest first; `designs` has the design of each.

    On ARM a kind is design, capacity and highest frequency; kernels before 4.13 know no capacities, and there small
    designs come behind others, as they may be clocked higher. On x86 the frequency does not distinguish kinds: of equal
    cores the best may clock a step higher; there the kernel lists P and E cores.
    """
    kind_of = _x86_kind if _is_x86(tree) else _arm_kind
    cores: dict[_Kind, list[int]] = {}
    for core, design in sorted(designs.items()):
        cores.setdefault(kind_of(tree, core, design), []).append(core)
    return tuple(
        Cluster(
            cpu=kind.cpu,
            cores=tuple(cores[kind]),
            max_mhz=kind.khz / 1000 if kind.khz else None,
            capacity=kind.capacity or None,
        )
        for kind in sorted(cores, reverse=True)
    )


def _designs(tree: Tree, otherwise: str) -> dict[int, str]:
    """Returns core -> design; `otherwise` where /proc/cpuinfo has none.

    Phones switch cores off, which /proc/cpuinfo then leaves out: they have the design of a core of equal capacity, or
    of one with the same clock.
    """
    named = {}
    for block in re.split(r"\n[ \t]*\n", _cpuinfo(tree)):
        if number_of_core := re.search(r"^processor\s*: (\d{1,4})$", block, re.MULTILINE):
            named[int(number_of_core[1])] = _design(block) or otherwise
    online = _cores_of(tree, f"{_CPUS}/online") or tuple(named)
    # With a hundred cores the text exceeds what is read of it.
    name = next(iter(named.values()), otherwise)
    designs = {core: named.get(core, name) for core in online}
    if _is_x86(tree):
        return designs
    capacities = {capacity: design for core, design in designs.items() if (capacity := _capacity(tree, core))}
    policies = names(tree, f"{_CPUS}/cpufreq", lambda name: name.startswith("policy"))
    clocks = [_cores_of(tree, f"{_CPUS}/cpufreq/{policy}/related_cpus") for policy in policies]
    for core in sorted({*_present(tree), *designs} - designs.keys()):
        siblings = next((cores for cores in clocks if core in cores), ())
        alike = next((designs[sibling] for sibling in siblings if sibling in designs), otherwise)
        designs[core] = capacities.get(_capacity(tree, core), alike)
    return designs


def _allowed(tree: Tree, designs: Mapping[int, str]) -> Mapping[int, str]:
    """Returns those of a machine's cores that a container, a cpuset or the agent's owner leaves to processes there.

    What a process may use lists cores that are online alone; others are kept, since they may wake up.
    """
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", read_or_empty(tree, _STATUS), re.MULTILINE)
    allowed = set(_parsed(match[1])) if match else set()
    forbidden = {*_cores_of(tree, f"{_CPUS}/online")} - allowed if allowed else set()
    return {core: design for core, design in designs.items() if core not in forbidden}


def _present(tree: Tree) -> set[int]:
    """Returns the cores that the machine has, whether they are online or not."""
    listed = names(tree, _CPUS, lambda name: re.fullmatch(r"cpu\d{1,4}", name) is not None)
    return {*_cores_of(tree, f"{_CPUS}/present"), *(int(name.removeprefix("cpu")) for name in listed)}


def _cores_of(tree: Tree, path: str) -> tuple[int, ...]:
    return _parsed(read_or_empty(tree, path))


def _parsed(cores: str) -> tuple[int, ...]:
    """Returns the cores of a list; none if it is no list."""
    try:
        return parse_cores(cores)
    except InvalidInput:
        return ()


def _is_x86(tree: Tree) -> bool:
    return re.search(r"^flags\s*:", _cpuinfo(tree), re.MULTILINE) is not None


def _design(block: str) -> str | None:
    if name := re.search(r"^model name\s*: *(.+)$", block, re.MULTILINE):
        return sanitise(name[1])
    fields = [
        re.search(rf"^CPU {word}\s*: (0x[0-9a-f]{{1,8}})$", block, re.MULTILINE) for word in ("implementer", "part")
    ]
    if fields[0] is None or fields[1] is None:
        return None
    implementer, part = fields[0][1], fields[1][1]
    return _PARTS.get(int(implementer, 16), {}).get(int(part, 16)) or f"{implementer}/{part}"


def _arm_kind(tree: Tree, core: int, design: str) -> _Kind:
    capacity = _capacity(tree, core)
    rank = 0 if capacity else _RANKS.get(design, _USUAL)
    return _Kind(rank, capacity, _of_core(tree, core, "cpufreq/cpuinfo_max_freq"), design)


def _capacity(tree: Tree, core: int) -> int:
    """Returns the capacity that the kernel gives a core; 0: it gives none."""
    return _of_core(tree, core, "cpu_capacity")


def _x86_kind(tree: Tree, core: int, design: str) -> _Kind:
    for rank, (path, name) in enumerate(_HYBRID.items()):
        if core in _cores_of(tree, path):
            return _Kind(rank, 0, 0, sanitise(f"{design}, {name}"))
    return _Kind(0, 0, 0, design)


def _of_core(tree: Tree, core: int, name: str) -> int:
    try:
        return number(tree, f"{_CPUS}/cpu{core}/{name}")
    except Unread:
        return 0


def sanitise(text: str) -> str:
    """Returns one line of at most `TEXT_LENGTH` characters; those that are not printable become spaces."""
    line = "".join(character if character.isprintable() else " " for character in text[: 4 * TEXT_LENGTH])
    return " ".join(line.split())[:TEXT_LENGTH].strip()
