"""Energy counters: rails of a power monitor (Pixel), RAPL (x86), the battery's gauge."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from nas.core.plan import EnergyUsed
from nas.devices.probes.power import FILES as POWER_FILES
from nas.devices.probes.power import batteries
from nas.devices.probes.unread import Unread, names, number, read
from nas.devices.transports.base import Tree

_RAPL, _IIO = "/sys/class/powercap", "/sys/bus/iio/devices"
_GAUGES = ("energy_now", "charge_now", "charge_counter")

FILES = (
    f"{_IIO}/iio:device*/energy_value",
    *(f"{_RAPL}/intel-rapl:*/{name}" for name in ("name", "energy_uj", "max_energy_range_uj")),
    *POWER_FILES,
    *(f"/sys/class/power_supply/*/{name}" for name in (*_GAUGES, "voltage_now")),
)

_MICRO = 1e-6
_JOULES_PER_UWH = 3600e-6


@dataclass(frozen=True, slots=True)
class Part:
    """One number of a counter.

    Args:
        name: of the part.
        value: in steps; grows with what was used, or falls where `falls`.
        joules: of one step.
        wraps: the value after which it starts at 0 again; 0: never.
        falls: it tells what is left.
    """

    name: str
    value: int
    joules: float
    wraps: int = 0
    falls: bool = False


@dataclass(frozen=True, slots=True)
class Counter:
    """A reading.

    Args:
        name: what counts.
        parts: what is added.
        trouble: why its differences say nothing now, if so.
    """

    name: str
    parts: tuple[Part, ...]
    trouble: str = ""


def energy_counter(tree: Tree) -> Counter:
    """The device's best counter as it stands: that of the power monitor, of the processor, of the battery.

    Raises:
        Unread: none can be read.
    """
    reasons = []
    for look in _COUNTERS:
        try:
            return look(tree)
        except Unread as reason:
            reasons.append(str(reason))
    raise Unread("; ".join(reasons))


def energy_used(before: Counter, after: Counter) -> EnergyUsed:
    """The difference of two readings of one counter.

    Raises:
        Unread: it says nothing, as the battery was charged, say.
    """
    if trouble := before.trouble or after.trouble:
        raise Unread(f"{after.name}: {trouble}")
    if [part.name for part in before.parts] != [part.name for part in after.parts]:
        raise Unread(f"{after.name}: it had other parts before")
    joules, steps = 0.0, 0
    for old, new in zip(before.parts, after.parts, strict=True):
        moved = old.value - new.value if new.falls else new.value - old.value
        if moved < 0:
            if not new.wraps:
                raise Unread(f"{after.name}: {new.name} went the wrong way")
            moved += new.wraps
        joules += moved * (old.joules + new.joules) / 2
        steps += moved
    return EnergyUsed(counter=after.name, joules=joules, steps=steps)


def _power_monitor(tree: Tree) -> Counter:
    """Pixel's ODPM: `CHn(T=ms)[rail], uWs` for each rail that it is set to watch; not all of the phone."""
    parts = [
        Part(rail, int(value), _MICRO)
        for device in names(tree, _IIO, lambda name: name.startswith("iio:device"))
        for rail, value in re.findall(
            r"^CH\d+\(T=\d+\)\[([\w.-]{1,32})\], (\d{1,18})$", _energy_value(tree, device), re.MULTILINE
        )
    ]
    if not parts:
        raise Unread(f"no power monitor under {_IIO}")
    return Counter(f"power monitor, {len(parts)} rails", tuple(parts))


def _energy_value(tree: Tree, device: str) -> str:
    try:
        return read(tree, f"{_IIO}/{device}/energy_value")
    except Unread:
        return ""


def _rapl(tree: Tree) -> Counter:
    """Processor packages, and their memory where it is counted apart; cores and graphics are in the packages."""
    zones = {
        zone: read(tree, f"{_RAPL}/{zone}/name")
        for zone in names(tree, _RAPL, lambda name: name.startswith("intel-rapl:"))
    }
    parts = [
        Part(
            f"{zone} {name}",
            number(tree, f"{_RAPL}/{zone}/energy_uj"),
            _MICRO,
            wraps=number(tree, f"{_RAPL}/{zone}/max_energy_range_uj") + 1,
        )
        for zone, name in zones.items()
        if name.startswith("package-") or name == "dram"
    ]
    if not parts:
        raise Unread(f"no processor package under {_RAPL}")
    kinds = sorted({part.name.split()[1].rstrip("-0123456789") for part in parts}, reverse=True)
    return Counter(f"RAPL {' + '.join(kinds)}", tuple(parts))


def _battery(tree: Tree) -> Counter:
    """The gauge of the machine's batteries, which tells nothing of the machine while they are charged."""
    found = batteries(tree)
    if not found:
        raise Unread("no battery")
    parts = tuple(_gauge(tree, path) for path in found)
    statuses = [read(tree, f"{path}/status") for path in found]
    discharging = "Discharging" in statuses and "Charging" not in statuses
    trouble = "" if discharging else f"{statuses[0][:20].lower()}: it tells what is used only on battery power"
    return Counter(f"battery gauge, {parts[0].name}", parts, trouble)


def _gauge(tree: Tree, path: str) -> Part:
    for name in _GAUGES:
        try:
            value = number(tree, f"{path}/{name}")
        except Unread:
            continue
        volts = 1.0 if name == "energy_now" else number(tree, f"{path}/voltage_now") * _MICRO
        return Part(name, value, _JOULES_PER_UWH * volts, falls=True)
    raise Unread(f"{path}: no {' or '.join(_GAUGES)}")


_COUNTERS: tuple[Callable[[Tree], Counter], ...] = (_power_monitor, _rapl, _battery)
