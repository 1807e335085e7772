"""Temperature of the processor, from thermal zones or hardware monitors."""

from __future__ import annotations

import re

from nas.devices.probes.unread import Unread, names, number, read
from nas.devices.transports.base import Tree

_ZONES, _MONITORS = "/sys/class/thermal", "/sys/class/hwmon"
_PROCESSOR = re.compile(r"x86_pkg_temp|.*cpu.*|.*soc.*|.*core.*|k10temp|zenpower|tsens.*", re.IGNORECASE)
FILES = (
    *(f"{_ZONES}/thermal_zone*/{name}" for name in ("type", "temp")),
    *(f"{_MONITORS}/*/{name}" for name in ("name", "temp*_input")),
)
_PLAUSIBLE_C = (-40.0, 150.0)


def temperature_c(tree: Tree) -> float:
    """The hottest sensor of the processor; where none is known as such, the hottest of all. Celsius.

    Raises:
        Unread: no sensor, or none that reads a plausible temperature.
    """
    sensors = _sensors(tree)
    if not sensors:
        raise Unread(f"no sensor under {_ZONES} or {_MONITORS}")
    readings = []
    for kind, path in sensors:
        try:
            celsius = number(tree, path) / 1000
        except Unread:
            continue
        if _PLAUSIBLE_C[0] < celsius < _PLAUSIBLE_C[1]:
            readings.append((_PROCESSOR.fullmatch(kind) is not None, celsius))
    if not readings:
        raise Unread(f"none of {len(sensors)} sensors reads a plausible temperature")
    return max(readings)[1]


def _sensors(tree: Tree) -> list[tuple[str, str]]:
    """(kind, path of a file in thousandths of a degree) of every sensor."""
    zones = [
        (f"{_ZONES}/{zone}/type", f"{_ZONES}/{zone}/temp")
        for zone in names(tree, _ZONES, lambda name: name.startswith("thermal_zone"))
    ]
    monitors = [
        (f"{_MONITORS}/{monitor}/name", f"{_MONITORS}/{monitor}/{file}")
        for monitor in names(tree, _MONITORS)
        for file in names(tree, f"{_MONITORS}/{monitor}", lambda name: bool(re.fullmatch(r"temp\d+_input", name)))
    ]
    return [(_kind(tree, kind), path) for kind, path in zones + monitors]


def _kind(tree: Tree, path: str) -> str:
    try:
        return read(tree, path)
    except Unread:
        return ""
