"""Whether the processor was slowed down for its temperature."""

from __future__ import annotations

import re

from nas.devices.probes.unread import Unread, names, number, read
from nas.devices.transports.base import Tree

_OF_PROCESSOR = re.compile(r"^Processor$|cpu", re.IGNORECASE)
_CPUS, _THERMAL = "/sys/devices/system/cpu", "/sys/class/thermal"

COUNTERS = (f"{_CPUS}/cpu*/thermal_throttle/*_throttle_count",)
FILES = (
    *(f"{_THERMAL}/cooling_device*/{name}" for name in ("type", "cur_state")),
    "/sys/devices/platform/soc*/*firmware/get_throttled",
)


def throttle_count(tree: Tree) -> int:
    """How often the processors were throttled since boot (Intel counts it), over all cores.

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
    """What a Raspberry Pi's firmware says of this moment; 0: nothing.

    Bit 0 is too low a voltage, 1 a capped frequency, 2 throttling, 3 the soft temperature limit.

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
    """The sum of the states of cooling devices that slow processors down; 0: none does.

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
