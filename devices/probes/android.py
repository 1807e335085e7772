"""Readings from Android's services, for what a shell may not read in /sys. Formats: `dump` of each service in AOSP."""

from __future__ import annotations

import re
from typing import Literal

from nas.measure.devices.probes.power import Status
from nas.measure.devices.probes.readings import OtherKind, Readings, Unread, matched, plausible

THERMAL = "dumpsys thermalservice"
BATTERY = "dumpsys battery"
POWER = "dumpsys power | grep -m 2 -E '^ +(mWakefulness|mSettingBatterySaverEnabled)='"

NO_ANDROID = "no Android, which has dumpsys"

COMMANDS = (THERMAL, BATTERY, POWER)

_CPU_TYPE = 0
"""Constants of `android.hardware.thermal.TemperatureType`."""

_STATUS: dict[int, Status] = {2: "Charging", 3: "Discharging", 4: "Not charging", 5: "Full"}
"""Constants of `android.os.BatteryManager`."""


def output(readings: Readings, command: str) -> str:
    """Returns what a command printed.

    Raises:
        OtherKind: this is not Android.
        Unread: the service reports nothing to a shell.
    """
    try:
        answer = readings.output(command)
    except Unread:
        raise OtherKind(NO_ANDROID) from None
    if not answer.strip():
        raise Unread(f"{command}: no answer")
    return answer


def temperature_c(readings: Readings) -> float:
    """Returns the temperature of the processor's hottest sensor, Celsius.

    Raises:
        Unread: none is listed.
    """
    answer = output(readings, THERMAL)
    # Cached values, which may be old, precede the current ones.
    _, now, current = answer.partition("Current temperatures from HAL:")
    temperatures = re.findall(
        r"Temperature\{mValue=(-?\d{1,6}(?:\.\d{1,9})?), mType=(-?\d{1,4}),", current if now else answer
    )
    hottest = max((float(value) for value, kind in temperatures if int(kind) == _CPU_TYPE), default=None)
    if hottest is None:
        raise Unread(f"{THERMAL}: no sensor of the processor")
    return plausible(hottest, "C", THERMAL)


def thermal_status(readings: Readings) -> int:
    """Returns the throttling level `THERMAL_STATUS_*`: 0 none, 1 light, 2 moderate ...; from Android 10 on."""
    return int(matched(r"^Thermal Status: (\d{1,4})$", output(readings, THERMAL), f"{THERMAL}: no status"))


def power_source(readings: Readings) -> Literal["mains", "battery"]:
    """Returns what powers the phone."""
    return "battery" if charger(readings) == "none" else "mains"


def charger(readings: Readings) -> str:
    """Returns what the phone is plugged into: "AC", "USB", "Wireless" or "Dock", several joined by "+"; or "none"."""
    plugs = re.findall(r"^ *(AC|USB|Wireless|Dock) powered: (true|false)$", _battery_service(readings), re.MULTILINE)
    if not plugs:
        raise Unread(f"{BATTERY}: no power source")
    return "+".join(name for name, powered in plugs if powered == "true") or "none"


def battery_percent(readings: Readings) -> float:
    """Returns the charge, 0 to 100."""
    level, scale = _battery(readings, "level"), _battery(readings, "scale")
    if scale <= 0:
        raise Unread(f"{BATTERY}: a scale of {scale}")
    return 100 * level / scale


def battery_status(readings: Readings) -> Status:
    """Returns the battery's status."""
    number = _battery(readings, "status")
    if number not in _STATUS:
        raise Unread(f"{BATTERY}: status {number}")
    return _STATUS[number]


def battery_temperature_c(readings: Readings) -> float:
    """Returns the battery's temperature, Celsius; phones slow down to keep it and the case cool."""
    return plausible(_battery(readings, "temperature") / 10, "C", BATTERY)


def screen_on(readings: Readings) -> bool:
    """Returns whether the phone is awake; its screen takes power, and drawing takes CPU time."""
    state = matched(r"mWakefulness=(\w+)", output(readings, POWER), "dumpsys power: no mWakefulness")
    return state in ("Awake", "Dreaming")


def power_saver(readings: Readings) -> bool:
    """Returns whether the battery saver is on; from Android 9 on."""
    name = "mSettingBatterySaverEnabled"
    return matched(rf"{name}=(true|false)", output(readings, POWER), f"dumpsys power: no {name}") == "true"


def _battery_service(readings: Readings) -> str:
    answer = output(readings, BATTERY)
    if "UPDATES STOPPED" in answer:
        raise Unread(f"{BATTERY}: values that somebody set; `dumpsys battery reset` ends that")
    return answer


def _battery(readings: Readings, name: str) -> int:
    return int(matched(rf"^ *{name}: (-?\d{{1,9}})$", _battery_service(readings), f"{BATTERY}: no {name}"))
