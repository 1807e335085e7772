"""Power source and battery, and energy counters: power monitor (Pixel), RAPL (x86), battery gauge."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from nas.core.plan import EnergyUsed
from nas.measure.devices.probes.readings import Unread, first_of, names, number, plausible, read, read_or_empty
from nas.measure.devices.transports.base import Tree

_SUPPLIES = "/sys/class/power_supply"

FILES = tuple(f"{_SUPPLIES}/*/{name}" for name in ("type", "scope", "online", "status", "capacity"))
TEMPERATURE_FILES = (f"{_SUPPLIES}/*/temp",)

Status = Literal["Charging", "Discharging", "Full", "Not charging"]
_STATUS: dict[str, Status] = {status: status for status in get_args(Status)}
"""The kernel's names, see Documentation/ABI/testing/sysfs-class-power."""


def power_source(tree: Tree) -> Literal["mains", "battery"]:
    """Returns what powers the machine now: a battery if any of them discharges, also beside a charger that is too weak.

    Raises:
        Unread: no power supply is listed, as on most desktops and virtual machines, or none says what it does.
    """
    folders = batteries(tree)
    statuses = {read_or_empty(tree, f"{path}/status") for path in folders}
    if "Discharging" in statuses:
        return "battery"
    online = set()
    for path in _of_type(tree, "Mains", "USB", "USB_C", "Wireless"):
        with contextlib.suppress(Unread):  # some supplies of USB have no such file
            online.add(number(tree, f"{path}/online") != 0)
    if True in online or "Charging" in statuses:
        return "mains"
    if statuses & _STATUS.keys():
        return "battery" if online else "mains"
    if online and folders:
        return "battery"
    what = f"{folders[0]}/status: {min(statuses)[:40]!r}" if folders else f"no supply and no battery under {_SUPPLIES}"
    raise Unread(what)


def battery_percent(tree: Tree) -> float:
    """Returns the charge of the battery that powers the machine, else of its first one, 0 to 100."""
    return float(number(tree, f"{_battery_in_use(tree)}/capacity"))


def battery_temperature_c(tree: Tree) -> float:
    """Returns the temperature of that battery, Celsius."""
    path = f"{_battery_in_use(tree)}/temp"
    return plausible(number(tree, path) / 10, "C", path)


def battery_status(tree: Tree) -> Status:
    """Returns the status of the battery that powers the machine, else of its first one.

    Raises:
        Unread: there is none, or its status is unknown.
    """
    path = f"{_battery_in_use(tree)}/status"
    text = read(tree, path)
    if text not in _STATUS:
        raise Unread(f"{path}: {text[:40]!r}")
    return _STATUS[text]


def _battery_in_use(tree: Tree) -> str:
    """Returns the folder of the battery that discharges, else of one that is charged, else of the first one."""
    folders = batteries(tree)
    if not folders:
        raise Unread(f"no battery under {_SUPPLIES}")
    order = ("Discharging", "Charging")
    statuses = {path: read_or_empty(tree, f"{path}/status") for path in folders}
    return min(folders, key=lambda path: order.index(statuses[path]) if statuses[path] in order else len(order))


def batteries(tree: Tree) -> list[str]:
    """Returns the batteries of the machine, without those of a mouse (which have the scope "Device")."""
    return [path for path in _of_type(tree, "Battery") if read_or_empty(tree, f"{path}/scope") != "Device"]


def _of_type(tree: Tree, *types: str) -> list[str]:
    paths = [f"{_SUPPLIES}/{name}" for name in names(tree, _SUPPLIES)]
    return [path for path in paths if read(tree, f"{path}/type") in types]


_RAPL = "/sys/class/powercap"
_IIO = "/sys/bus/iio/devices"
_RAIL = re.compile(r"^CH\d+\(T=\d+\)\[([\w.-]{1,32})\], (\d{1,18})$", re.MULTILINE)
_GAUGES = ("energy_now", "charge_now", "charge_counter")

ENERGY_FILES = (
    f"{_IIO}/iio:device*/energy_value",
    *(f"{_RAPL}/intel-rapl:*/{name}" for name in ("name", "energy_uj", "max_energy_range_uj")),
    *FILES,
    *(f"{_SUPPLIES}/*/{name}" for name in (*_GAUGES, "voltage_now")),
)

_COPY_J = 50.0
"""Difference up to which counters are the same one: it grows by less while all of them are read."""

_MICRO = 1e-6
_JOULES_PER_UWH = 3600e-6


@dataclass(frozen=True, slots=True)
class Part:
    """One number of a counter.

    Args:
        name: of the part.
        value: in steps; grows with energy used, or falls if `falls`.
        joules: of one step.
        wraps: the value after which it restarts at 0; 0: never.
        falls: the number counts what is left.
    """

    name: str
    value: int
    joules: float
    wraps: int = 0
    falls: bool = False


@dataclass(frozen=True, slots=True)
class Counter:
    """One reading of an energy counter.

    Args:
        name: of the counter.
        parts: summed up.
        trouble: why a difference means nothing now, if so.
    """

    name: str
    parts: tuple[Part, ...]
    trouble: str = ""


def energy_counter(tree: Tree) -> Counter:
    """Reads the best counter of the device: of the power monitor, else of the processor, else of the battery.

    Raises:
        Unread: none can be read.
    """
    return first_of(tree, _power_monitor, _rapl, _battery)


def energy_used(before: Counter, after: Counter) -> EnergyUsed:
    """Returns the difference of two readings of one counter.

    Raises:
        Unread: it means nothing, for instance because the battery was charged.
    """
    if trouble := before.trouble or after.trouble:
        raise Unread(f"{after.name}: {trouble}")
    if [part.name for part in before.parts] != [part.name for part in after.parts]:
        raise Unread(f"{after.name}: its parts changed")
    joules, steps = 0.0, 0
    for old, new in zip(before.parts, after.parts, strict=True):
        moved = old.value - new.value if new.falls else new.value - old.value
        if moved < 0:
            if not new.wraps:
                raise Unread(f"{after.name}: {new.name} ran backwards")
            moved += new.wraps
        joules += moved * (old.joules + new.joules) / 2
        steps += moved
    return EnergyUsed(counter=after.name, joules=joules, steps=steps)


def _power_monitor(tree: Tree) -> Counter:
    """Reads Pixel's ODPM: `CHn(T=ms)[rail], uWs` for each configured rail; not all of the phone."""
    parts = [
        Part(rail, int(value), _MICRO)
        for device in names(tree, _IIO, lambda name: name.startswith("iio:device"))
        for rail, value in _RAIL.findall(read_or_empty(tree, f"{_IIO}/{device}/energy_value"))
    ]
    if not parts:
        raise Unread(f"no power monitor under {_IIO}")
    return Counter(f"power monitor, {len(parts)} rails", tuple(parts))


def _rapl(tree: Tree) -> Counter:
    """Reads processor packages, and their memory where counted separately; cores and graphics are part of a package."""
    parts: dict[str, list[Part]] = {}
    for zone in names(tree, _RAPL, lambda name: name.startswith("intel-rapl:")):
        name = read(tree, f"{_RAPL}/{zone}/name")
        if name.startswith("package-") or name == "dram":
            package, die, _ = name.partition("-die-")
            part = Part(
                f"{zone} {name}",
                number(tree, f"{_RAPL}/{zone}/energy_uj"),
                _MICRO,
                wraps=number(tree, f"{_RAPL}/{zone}/max_energy_range_uj") + 1,
            )
            parts.setdefault(package if die else zone, []).append(part)
    if not parts:
        raise Unread(f"no processor package under {_RAPL}")
    summed = tuple(part for dies in parts.values() for part in _without_copies(dies))
    kinds = sorted({part.name.split()[1].rstrip("-0123456789") for part in summed}, reverse=True)
    return Counter(f"RAPL {' + '.join(kinds)}", summed)


def _without_copies(dies: list[Part]) -> list[Part]:
    """Returns the dies of a package; one for all where each shows the counter of the package, as AMD's do."""
    joules = [die.value * die.joules for die in dies]
    if len(dies) == 1 or max(joules) - min(joules) > _COPY_J:
        return dies
    return [replace(dies[0], name=dies[0].name.partition("-die-")[0])]


def _battery(tree: Tree) -> Counter:
    """Reads the gauge of the batteries, which does not show consumption while they are charged."""
    folders = batteries(tree)
    if not folders:
        raise Unread("no battery")
    parts = tuple(_gauge(tree, path) for path in folders)
    statuses = [read(tree, f"{path}/status") for path in folders]
    discharging = "Discharging" in statuses and "Charging" not in statuses
    trouble = "" if discharging else f"{statuses[0][:20].lower()}: it measures consumption only on battery power"
    return Counter(f"battery gauge, {parts[0].name}", parts, trouble)


def _gauge(tree: Tree, path: str) -> Part:
    for name in _GAUGES:
        try:
            value = number(tree, f"{path}/{name}")
        except Unread:
            continue
        plausible(value * _MICRO, "Wh" if name == "energy_now" else "Ah", f"{path}/{name}")
        volts = 1.0
        if name != "energy_now":
            volts = plausible(number(tree, f"{path}/voltage_now") * _MICRO, "V", f"{path}/voltage_now")
        return Part(name, value, _JOULES_PER_UWH * volts, falls=True)
    raise Unread(f"{path}: no {' or '.join(_GAUGES)}")
