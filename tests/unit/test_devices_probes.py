"""Probes over trees of files that look like /proc and /sys. This is no proof for a machine with real sensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nas.measure.devices.agent.run_plan import Observer
from nas.measure.devices.probes.cpu import (
    busy_s,
    cluster_mhz,
    foreign_share,
    frequency_mhz,
    governor,
    load_1min,
    uptime_s,
)
from nas.measure.devices.probes.memory import free_memory_mb, total_memory_mb
from nas.measure.devices.probes.power import battery_percent, battery_status, energy_counter, power_source
from nas.measure.devices.probes.readings import Unread
from nas.measure.devices.probes.thermal import cooling_level, firmware_flags, temperature_c, throttle_count
from nas.measure.devices.transports.base import CommandResult, Tree
from nas.measure.devices.transports.local import LocalTransport

ZONE, MONITOR, COOLING = "sys/class/thermal/thermal_zone", "sys/class/hwmon/hwmon", "sys/class/thermal/cooling_device"
SUPPLY, POLICY = "sys/class/power_supply", "sys/devices/system/cpu/cpufreq/policy"

PROC = {
    "proc/uptime": "1000.00 900.00",
    "proc/loadavg": "0.25 0.10 0.05 1/200 4711",
    "proc/stat": "cpu  100 10 50 1000 7 1 2 37 5 5\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\n",
    "proc/vmstat": "nr_free_pages 7\noom_kill 3\n",
    "proc/meminfo": "MemTotal:        8388608 kB\nMemFree:  1 kB\nMemAvailable:    2097152 kB\n",
}
LAPTOP = PROC | {
    f"{ZONE}0/type": "acpitz",
    f"{ZONE}0/temp": "99000",
    f"{ZONE}1/type": "x86_pkg_temp",
    f"{ZONE}1/temp": "61500",
    f"{ZONE}2/type": "iwlwifi_1",
    f"{ZONE}2/temp": "-274000",
    f"{SUPPLY}/AC/type": "Mains",
    f"{SUPPLY}/AC/online": "0",
    f"{SUPPLY}/BAT0/type": "Battery",
    f"{SUPPLY}/BAT0/status": "Discharging",
    f"{SUPPLY}/BAT0/capacity": "81",
    f"{SUPPLY}/mouse/type": "Battery",
    f"{SUPPLY}/mouse/scope": "Device",
    f"{SUPPLY}/mouse/capacity": "5",
    f"{POLICY}0/related_cpus": "0 1 2 3",
    f"{POLICY}4/related_cpus": "4-7",
    f"{POLICY}0/scaling_governor": "powersave",
    f"{POLICY}0/scaling_cur_freq": "1000000",
    f"{POLICY}4/scaling_governor": "performance",
    f"{POLICY}4/scaling_cur_freq": "3000000",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3",
    "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "4",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_max_time_ms": "900",
    "sys/devices/system/cpu/cpufreq/ignored": "",
}
PHONE = PROC | {
    f"{ZONE}0/type": "cpu-0-0",
    f"{ZONE}0/temp": "45000",
    f"{ZONE}1/type": "battery",
    f"{ZONE}1/temp": "47000",
    f"{COOLING}0/type": "cpufreq-cpu0",
    f"{COOLING}0/cur_state": "2",
    f"{COOLING}1/type": "panel0-backlight",
    f"{COOLING}1/cur_state": "9",
}
DESKTOP = PROC | {
    f"{MONITOR}0/name": "nvme",
    f"{MONITOR}0/temp1_input": "70000",
    f"{MONITOR}1/name": "k10temp",
    f"{MONITOR}1/temp1_input": "52125",
    f"{MONITOR}1/temp1_label": "Tctl",
}


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], LocalTransport]:
    """Writes files under a root of their own and reads them from there."""

    def write(files: dict[str, str]) -> LocalTransport:
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return LocalTransport(tmp_path / "cache", root=tmp_path / "root")

    return write


Write = Callable[[dict[str, str]], LocalTransport]
Probe = Callable[[Tree], Any]


TWO = LAPTOP | {
    f"{SUPPLY}/BAT0/status": "Not charging", f"{SUPPLY}/BAT1/type": "Battery", f"{SUPPLY}/BAT1/status": "Discharging",
    f"{SUPPLY}/BAT1/capacity": "43",
}  # fmt: skip
ZONES = {
    f"{ZONE}0/type": "BIG", f"{ZONE}1/type": "LITTLE", f"{ZONE}2/type": "soc_therm", f"{ZONE}2/temp": "39500",
    f"{ZONE}3/type": "battery", f"{ZONE}3/temp": "99000",
}  # fmt: skip
RYZEN = {
    "sys/class/hwmon/hwmon1/name": "k10temp", "sys/class/hwmon/hwmon1/temp1_input": "79000",
    "sys/class/hwmon/hwmon1/temp1_label": "Tctl", "sys/class/hwmon/hwmon1/temp2_input": "52000",
    "sys/class/hwmon/hwmon1/temp2_label": "Tdie",
}  # fmt: skip
GAUGE = {
    f"{SUPPLY}/BAT0/type": "Battery", f"{SUPPLY}/BAT0/status": "Discharging",
    f"{SUPPLY}/BAT0/charge_counter": "3200000", f"{SUPPLY}/BAT0/voltage_now": "4012000",
}  # fmt: skip
SLEEPING = {
    f"{POLICY}0/scaling_governor": "performance", f"{POLICY}0/scaling_cur_freq": "1000000",
    f"{POLICY}0/related_cpus": "0 1", f"{POLICY}0/affected_cpus": "0 1", f"{POLICY}4/scaling_governor": "",
    f"{POLICY}4/scaling_cur_freq": "", f"{POLICY}4/related_cpus": "4 5", f"{POLICY}4/affected_cpus": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "probe", "value"),
    [
        (LAPTOP, busy_s, 2.0),
        (LAPTOP, free_memory_mb, 2147.483648),
        (LAPTOP, total_memory_mb, 8589.934592),
        (LAPTOP, temperature_c, 61.5),
        (PHONE, temperature_c, 45.0),
        (DESKTOP, temperature_c, 52.125),
        (LAPTOP, throttle_count, 7),
        (PHONE, cooling_level, 2),
        (LAPTOP, governor, "performance,powersave"),
        (LAPTOP, frequency_mhz, 2000.0),
        (LAPTOP, cluster_mhz, {"0-3": 1000.0, "4-7": 3000.0}),
        (LAPTOP, uptime_s, 1000.0),
        (LAPTOP, load_1min, 0.25),
        (LAPTOP, battery_status, "Discharging"),
        (LAPTOP, power_source, "battery"),
        (LAPTOP | {f"{SUPPLY}/AC/online": "1"}, power_source, "battery"),  # its charger is too weak
        (LAPTOP | {f"{SUPPLY}/AC/online": "1", f"{SUPPLY}/BAT0/status": "Charging"}, power_source, "mains"),
        (TWO | {f"{SUPPLY}/BAT0/status": "Full"}, power_source, "battery"),
        (TWO | {f"{SUPPLY}/BAT0/status": "Unknown"}, power_source, "battery"),
        (TWO, battery_percent, 43.0),
        (TWO | {f"{SUPPLY}/BAT1/status": "Charging"}, battery_status, "Charging"),
        (TWO | {f"{SUPPLY}/BAT1/status": "Unknown", f"{SUPPLY}/BAT0/status": "Unknown"}, power_source, "battery"),
        (LAPTOP | {f"{SUPPLY}/usb/type": "USB"}, power_source, "battery"),
        (ZONES | {f"{ZONE}0/temp": "66000", f"{ZONE}1/temp": "71000"}, temperature_c, 71.0),
        (ZONES | {f"{ZONE}0/temp": "687", f"{ZONE}1/temp": "0"}, temperature_c, 39.5),
        (ZONES | {f"{ZONE}0/temp": "-1", f"{ZONE}1/temp": "65"}, temperature_c, 39.5),
        (RYZEN, temperature_c, 52.0),
        (PHONE | {f"{COOLING}9/type": "cpu-fan", f"{COOLING}9/cur_state": "9"}, cooling_level, 2),
        (SLEEPING, governor, "performance"),
        (SLEEPING, frequency_mhz, 1000.0),
        (LAPTOP, battery_percent, 81.0),
    ],
)
def test_values(tree: Write, files: dict[str, str], probe: Probe, value: Any) -> None:
    assert probe(tree(files)) == value


@pytest.mark.parametrize(
    ("files", "probe", "reason"),
    [
        ({}, busy_s, "/proc/stat: No such file"),
        ({"proc/stat": "intr 1"}, busy_s, "no line of all processors"),
        ({}, free_memory_mb, "/proc/meminfo: No such file"),
        ({"proc/meminfo": "MemTotal: 1 kB"}, free_memory_mb, "no MemAvailable"),
        (PROC, temperature_c, "no sensor"),
        ({f"{ZONE}0/type": "cpu", f"{ZONE}0/temp": "-274000"}, temperature_c, "none of 1 sensors"),
        (PHONE, throttle_count, "no throttle counter"),
        (PROC, cooling_level, "no cooling device"),
        (PROC, governor, "no policy"),
        (PROC, frequency_mhz, "no policy"),
        ({f"{POLICY}0/scaling_cur_freq": "<unsupported>"}, frequency_mhz, "'<unsupported>' is not a number"),
        ({f"{POLICY}0/scaling_cur_freq": "1", f"{POLICY}0/related_cpus": "x"}, cluster_mhz, "related_cpus: cores 'x'"),
        (PROC, battery_status, "no battery"),
        (LAPTOP | {f"{SUPPLY}/BAT0/status": "Unknown"}, battery_status, "'Unknown'"),
        ({"proc/uptime": "nan 1"}, uptime_s, "does not start with a number"),
        ({"proc/loadavg": ""}, load_1min, "does not start with a number"),
        (PROC, firmware_flags, "no firmware"),
        ({"sys/devices/platform/soc/a:firmware/get_throttled": "x"}, firmware_flags, "'x' is not a number"),
        (PROC, power_source, "no supply and no battery"),
        (PROC, battery_percent, "no battery"),
        ({"proc/stat": "cpu  0 0 0 0 0 0 0 0 0 0"}, busy_s, "nothing was counted since boot"),
        (ZONES | {f"{ZONE}2/temp": "87", f"{ZONE}3/temp": "-1"}, temperature_c, "none of 3 sensors"),
        (LAPTOP | {f"{SUPPLY}/AC/type": "Unknown", f"{SUPPLY}/BAT0/status": ""}, power_source, "BAT0/status"),
        (SLEEPING | {f"{POLICY}0/affected_cpus": ""}, governor, "no core of the policies"),
        ({f"{POLICY}0/scaling_governor": ""}, governor, "is empty"),
        (GAUGE | {f"{SUPPLY}/BAT0/voltage_now": "4012"}, energy_counter, "voltage_now: 0.004012 V is not plausible"),
        (GAUGE | {f"{SUPPLY}/BAT0/charge_counter": "3200"}, energy_counter, "charge_counter: 0.0032 Ah is not"),
        (GAUGE | {f"{SUPPLY}/BAT0/energy_now": "40000"}, energy_counter, "energy_now: 0.04 Wh is not plausible"),
    ],
)
def test_reasons(tree: Write, files: dict[str, str], probe: Probe, reason: str) -> None:
    with pytest.raises(Unread, match=reason):
        probe(tree(files))


@pytest.mark.parametrize(
    ("busy", "runner_s", "wall_s", "share"), [(3.0, 2.0, 2.0, 0.5), (2.0, 2.0, 2.0, 0.0), (1.99, 2.0, 2.0, 0.0)]
)
def test_foreign_share(busy: float, runner_s: float, wall_s: float, share: float) -> None:
    assert foreign_share(busy, runner_s, wall_s) == pytest.approx(share)


@pytest.mark.parametrize(
    ("runner_s", "wall_s", "reason"),
    [(None, 2.0, "did not report"), (0.1, 0.2, "too short"), (3.0, 2.0, "less than the 3.00 s of the runner")],
)
def test_a_foreign_share_that_cannot_be_determined(runner_s: float | None, wall_s: float, reason: str) -> None:
    with pytest.raises(Unread, match=reason):
        foreign_share(1.0, runner_s, wall_s)


def result(cpu_s: float | None) -> CommandResult:
    return CommandResult(0, b"", b"", 2.0, cpu_s, 0.5, False, False, 0.0)


def test_observer_counts_what_others_used(tree: Write) -> None:
    observer = Observer(tree(LAPTOP))
    before = observer.before()
    now = {"proc/stat": "cpu  500 10 250 1000 7 1 2 37", "proc/meminfo": "MemAvailable: 1 kB"}
    tree(now | {"proc/vmstat": "nr_free_pages 1\noom_kill 5\n", "proc/uptime": "1004.00 1.0"})
    conditions = observer.after(before, result(cpu_s=1.5))
    assert conditions.foreign_cpu == pytest.approx((6.0 - 1.5 - 0.5) / 4.0)
    assert conditions.free_memory_mb == 2147.483648
    assert conditions.throttled is False
    assert conditions.oom_kills == 2
    of_phones = {"battery_temperature_c", "charger", "power_saver", "screen_on", "thermal_status"}
    assert set(conditions.unread) == {"energy", *of_phones}


def test_observer_sees_throttling_in_between(tree: Write) -> None:
    observer = Observer(tree(LAPTOP))
    before = observer.before()
    tree({"sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "4"})
    assert observer.after(before, result(1.0)).throttled is True


def test_observer_falls_back_on_cooling_devices(tree: Write) -> None:
    observer = Observer(tree(PHONE))
    assert observer.after(observer.before(), result(1.0)).throttled is True


def test_what_is_not_there_is_null_with_a_reason(tree: Write) -> None:
    observer = Observer(tree({}))
    conditions = observer.after(observer.before(), result(1.0))
    nulls = {name for name, value in conditions.model_dump(exclude={"unread"}).items() if value is None}
    assert nulls == set(conditions.unread) == set(type(conditions).model_fields) - {"unread", "free_disk_mb"}
    assert "no throttle counter" in conditions.unread["throttled"]


def test_this_machine(tmp_path: Path) -> None:
    local = LocalTransport(tmp_path / "cache")
    observer = Observer(local)
    before = observer.before()
    outcome = local.run(["python3", "-S", "-c", "sum(range(40_000_000))"], env={}, deadline_s=60, output_limit=10)
    conditions = observer.after(before, outcome)
    assert conditions.free_memory_mb is not None
    assert (conditions.foreign_cpu is None) == ("foreign_cpu" in conditions.unread)
