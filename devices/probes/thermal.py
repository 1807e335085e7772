"""Temperature of the processor (thermal zones, hardware monitors), and whether it was throttled."""

from __future__ import annotations

import contextlib
import re

from nas.measure.devices.probes.readings import Unread, names, number, plausible, read, read_or_empty
from nas.measure.devices.transports.base import Tree

_THERMAL = "/sys/class/thermal"
_MONITORS = "/sys/class/hwmon"
_PROCESSOR = re.compile(
    r"x86_pkg_temp|.*cpu.*|.*soc.*|.*core.*|k10temp|zenpower|tsens.*|big|mid|little|apc\d.*", re.IGNORECASE
)
FILES = (
    *(f"{_THERMAL}/thermal_zone*/{name}" for name in ("type", "temp")),
    *(f"{_MONITORS}/*/{name}" for name in ("name", "temp*_input", "temp*_label")),
)
_REAL, _OFFSET = "Tdie", "Tctl"
"""Labels of AMD's sensors: the temperature, and the same with an offset of up to 27 C for fans."""


def temperature_c(tree: Tree) -> float:
    """Returns the temperature of the processor's hottest sensor; of the hottest one if the processor has none. Celsius.

    Raises:
        Unread: no sensor, or none with a plausible temperature.
    """
    sensors = _sensors(tree)
    if not sensors:
        raise Unread(f"no sensor under {_THERMAL} or {_MONITORS}")
    of_processor = [(kind, path) for kind, path in sensors if _PROCESSOR.fullmatch(kind)]
    readings = []
    for _, path in of_processor or sensors:
        with contextlib.suppress(Unread):
            readings.append(plausible(number(tree, path) / 1000, "C", path))
    if not readings:
        raise Unread(f"none of {len(of_processor or sensors)} sensors has a plausible temperature")
    return max(readings)


def _sensors(tree: Tree) -> list[tuple[str, str]]:
    """Returns (kind, path of a file in millidegrees) of every sensor."""
    zones = [
        (f"{_THERMAL}/{zone}/type", f"{_THERMAL}/{zone}/temp")
        for zone in names(tree, _THERMAL, lambda name: name.startswith("thermal_zone"))
    ]
    monitors = [
        (f"{_MONITORS}/{monitor}/name", path)
        for monitor in names(tree, _MONITORS)
        for path in _without_offset(tree, f"{_MONITORS}/{monitor}")
    ]
    return [(read_or_empty(tree, kind), path) for kind, path in zones + monitors]


def _without_offset(tree: Tree, monitor: str) -> list[str]:
    """Returns the files of a monitor's temperatures; without those with an offset where the real one is listed."""
    files = names(tree, monitor, lambda name: bool(re.fullmatch(r"temp\d+_input", name)))
    labels = {name: read_or_empty(tree, f"{monitor}/{name.removesuffix('_input')}_label") for name in files}
    is_listed = _REAL in labels.values()
    return [f"{monitor}/{name}" for name, label in labels.items() if not (is_listed and label == _OFFSET)]


_OF_PROCESSOR = re.compile(r"^Processor$|^(?!.*fan).*cpu", re.IGNORECASE)
"""Kinds of cooling devices that slow processors down; a fan that is named after one does not."""
_CPUS = "/sys/devices/system/cpu"

COUNTERS = (f"{_CPUS}/cpu*/thermal_throttle/*_throttle_count",)
THROTTLE_FILES = (
    *(f"{_THERMAL}/cooling_device*/{name}" for name in ("type", "cur_state")),
    "/sys/devices/platform/soc*/*firmware/get_throttled",
)


def throttle_count(tree: Tree) -> int:
    """Returns how often the processors were throttled since boot (Intel counts it), over all cores.

    Raises:
        Unread: no such counter.
    """
    counters = [
        f"{_CPUS}/{cpu}/thermal_throttle/{counter}"
        for cpu in names(tree, _CPUS, lambda name: name.startswith("cpu") and name[3:].isdigit())
        for counter in names(tree, f"{_CPUS}/{cpu}/thermal_throttle", lambda name: name.endswith("_throttle_count"))
    ]
    if not counters:
        raise Unread(f"no throttle counter under {_CPUS}")
    return sum(number(tree, path) for path in counters)


def firmware_flags(tree: Tree) -> int:
    """Returns the current throttling flags of a Raspberry Pi's firmware; 0: none.

    Bit 0 is undervoltage, 1 a capped frequency, 2 throttling, 3 the soft temperature limit.

    Raises:
        Unread: no such firmware.
    """
    platform = "/sys/devices/platform"
    for soc in names(tree, platform, lambda name: name.startswith("soc")):
        for firmware in names(tree, f"{platform}/{soc}", lambda name: name.endswith("firmware")):
            text = read(tree, f"{platform}/{soc}/{firmware}/get_throttled")
            try:
                return int(text, 16) & 0xF
            except ValueError:
                raise Unread(f"{soc}/{firmware}/get_throttled: {text[:40]!r} is not a number") from None
    raise Unread("no firmware of a Raspberry Pi")


def cooling_level(tree: Tree) -> int:
    """Returns the sum of the states of the cooling devices that slow processors down; 0: none does.

    Raises:
        Unread: there is none.
    """
    devices = names(tree, _THERMAL, lambda name: name.startswith("cooling_device"))
    states = [
        number(tree, f"{_THERMAL}/{device}/cur_state")
        for device in devices
        if _OF_PROCESSOR.search(read(tree, f"{_THERMAL}/{device}/type"))
    ]
    if not states:
        raise Unread(f"no cooling device of a processor under {_THERMAL}")
    return sum(states)
