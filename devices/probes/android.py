"""What Android's services tell where an app or a shell may not read /sys. Formats: `dump` of each service in AOSP."""

from __future__ import annotations

import re
from typing import Literal

from nas.devices.probes.power import Status
from nas.devices.probes.unread import Unread
from nas.devices.snapshot import Snapshot

THERMAL, BATTERY = "dumpsys thermalservice", "dumpsys battery"
SCREEN = "dumpsys power | grep -m 1 mWakefulness="

NO_ANDROID = "no Android, which has dumpsys"

COMMANDS = (THERMAL, BATTERY, SCREEN)

_CPU_TYPE = 0
"""Of `android.hardware.thermal.TemperatureType`."""

_STATUS: dict[int, Status] = {2: "Charging", 3: "Discharging", 4: "Not charging", 5: "Full"}
"""Of `android.os.BatteryManager`."""


def output(snapshot: Snapshot, command: str) -> str:
    """What a command said.

    Raises:
        Unread: this is no Android, or the service says nothing to a shell.
    """
    try:
        said = snapshot.output(command)
    except OSError:
        raise Unread(NO_ANDROID) from None
    if not said.strip():
        raise Unread(f"{command}: no answer")
    return said


def temperature_c(snapshot: Snapshot) -> float:
    """The hottest sensor of the processor, Celsius.

    Raises:
        Unread: none is told.
    """
    said = output(snapshot, THERMAL)
    # Cached values stand before those of this moment, and may be old.
    _, now, current = said.partition("Current temperatures from HAL:")
    readings = re.findall(
        r"Temperature\{mValue=(-?\d{1,6}(?:\.\d{1,9})?), mType=(-?\d{1,4}),", current if now else said
    )
    hottest = [float(value) for value, kind in readings if int(kind) == _CPU_TYPE]
    if not hottest:
        raise Unread(f"{THERMAL}: no sensor of the processor")
    return max(hottest)


def thermal_status(snapshot: Snapshot) -> int:
    """How hard Android throttles: 0 not, 1 light, 2 moderate, 3 severe ... (`THERMAL_STATUS_*` of PowerManager).

    Raises:
        Unread: not told, as before Android 10.
    """
    found = re.search(r"^Thermal Status: (\d{1,4})$", output(snapshot, THERMAL), re.MULTILINE)
    if not found:
        raise Unread(f"{THERMAL}: no status")
    return int(found[1])


def power_source(snapshot: Snapshot) -> Literal["mains", "battery"]:
    """What feeds the phone.

    Raises:
        Unread: not told.
    """
    powered = re.findall(r"^ *(?:AC|USB|Wireless|Dock) powered: (true|false)$", output(snapshot, BATTERY), re.MULTILINE)
    if not powered:
        raise Unread(f"{BATTERY}: no power source")
    return "mains" if "true" in powered else "battery"


def battery_percent(snapshot: Snapshot) -> float:
    """Charge, 0 to 100.

    Raises:
        Unread: not told.
    """
    level, scale = _battery(snapshot, "level"), _battery(snapshot, "scale")
    if scale <= 0:
        raise Unread(f"{BATTERY}: a scale of {scale}")
    return 100 * level / scale


def battery_status(snapshot: Snapshot) -> Status:
    """What the battery does.

    Raises:
        Unread: it does not know.
    """
    number = _battery(snapshot, "status")
    if number not in _STATUS:
        raise Unread(f"{BATTERY}: status {number}")
    return _STATUS[number]


def screen_on(snapshot: Snapshot) -> bool:
    """Whether the phone is awake; its screen takes power, and what it shows takes time.

    Raises:
        Unread: not told.
    """
    found = re.search(r"mWakefulness=(\w+)", output(snapshot, SCREEN))
    if not found:
        raise Unread("dumpsys power: no mWakefulness")
    return found[1] in ("Awake", "Dreaming")


def _battery(snapshot: Snapshot, name: str) -> int:
    found = re.search(rf"^ *{name}: (-?\d{{1,9}})$", output(snapshot, BATTERY), re.MULTILINE)
    if not found:
        raise Unread(f"{BATTERY}: no {name}")
    return int(found[1])
