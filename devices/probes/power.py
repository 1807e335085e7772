"""Where the power comes from, from /sys/class/power_supply."""

from __future__ import annotations

from typing import Literal, get_args

from nas.devices.probes.unread import Unread, names, number, read
from nas.devices.transports.base import Tree

_SUPPLIES = "/sys/class/power_supply"

FILES = tuple(f"{_SUPPLIES}/*/{name}" for name in ("type", "scope", "online", "status", "capacity"))

Status = Literal["Charging", "Discharging", "Full", "Not charging"]
_STATUS: dict[str, Status] = {status: status for status in get_args(Status)}
"""The kernel's words, see Documentation/ABI/testing/sysfs-class-power."""


def power_source(tree: Tree) -> Literal["mains", "battery"]:
    """What feeds the machine now.

    Raises:
        Unread: no power supply is told, as on most desktops and virtual machines.
    """
    if any(number(tree, f"{path}/online") for path in _of_type(tree, "Mains", "USB", "USB_C", "Wireless")):
        return "mains"
    for path in batteries(tree):
        return "battery" if read(tree, f"{path}/status") == "Discharging" else "mains"
    raise Unread(f"no supply and no battery under {_SUPPLIES}")


def battery_percent(tree: Tree) -> float:
    """Charge of the first battery of the machine, 0 to 100.

    Raises:
        Unread: there is none.
    """
    for path in batteries(tree):
        return float(number(tree, f"{path}/capacity"))
    raise Unread(f"no battery under {_SUPPLIES}")


def battery_status(tree: Tree) -> Status:
    """What the first battery of the machine does.

    Raises:
        Unread: there is none, or it does not know.
    """
    for path in batteries(tree):
        text = read(tree, f"{path}/status")
        if text in _STATUS:
            return _STATUS[text]
        raise Unread(f"{path}/status: {text[:40]!r}")
    raise Unread(f"no battery under {_SUPPLIES}")


def batteries(tree: Tree) -> list[str]:
    """Batteries of the machine, not of a mouse (which have the scope "Device")."""
    return [path for path in _of_type(tree, "Battery") if _scope(tree, path) != "Device"]


def _of_type(tree: Tree, *types: str) -> list[str]:
    paths = [f"{_SUPPLIES}/{name}" for name in names(tree, _SUPPLIES)]
    return [path for path in paths if read(tree, f"{path}/type") in types]


def _scope(tree: Tree, path: str) -> str | None:
    try:
        return read(tree, f"{path}/scope")
    except Unread:
        return None
