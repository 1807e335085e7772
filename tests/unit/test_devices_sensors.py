"""Sensors of devices that are not here: complete readings, as a measurement takes them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from device_fixtures import LAPTOP_FILES, LINUX, ODPM, PI_FILES, RAPL, SUPPLY, laptop, pixel, raspberry_pi
from exhaustive import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from nas.core.device import Device
from nas.core.plan import Conditions, RawRun
from nas.measure.devices.agent.run_plan import Observer, foreign_cpu
from nas.measure.devices.describe import describe
from nas.measure.devices.probes import android
from nas.measure.devices.probes.power import energy_counter
from nas.measure.devices.probes.readings import Readings, Unread
from nas.measure.devices.transports.base import CommandResult
from nas.testing.fake_reader import FakeReader

DENIED = PermissionError(13, "Permission denied")


def result(cpu_s: float | None = 1.0) -> CommandResult:
    return CommandResult(0, b"", b"", 2.0, cpu_s, 0.5, False, False, 0.0)


def around(device: FakeReader, **changes: str | OSError) -> Conditions:
    """The conditions of a process of two seconds, during which these files change."""
    observer = Observer(device)
    before = observer.before()
    ticks = "cpu  200 10 100 1100 7 1 2 37 5 5\n"  # 1.5 s more than before
    device.files |= {"/proc/uptime": "1002.00 900.00\n", "/proc/stat": ticks} | changes
    return observer.after(before, result())


def test_a_moment_is_one_exchange() -> None:
    device = laptop()
    around(device)
    assert device.exchanges == 2


def test_a_phone_that_shows_a_shell_nothing_in_sys() -> None:
    conditions = around(pixel())
    assert (conditions.temperature_c, conditions.throttled, conditions.screen_on) == (41.2, False, False)
    assert (conditions.power_source, conditions.battery_percent, conditions.battery_status) == (
        "mains", 81.0, "Charging"
    )  # fmt: skip
    assert (conditions.charger, conditions.battery_temperature_c) == ("USB", 28.5)
    assert (conditions.thermal_status, conditions.power_saver) == (0, False)
    assert (conditions.governor, conditions.frequency_mhz) == ("sched_pixel", 1551.0)
    assert conditions.cluster_mhz == {"0-3": 300.0, "6-7": 2802.0}
    assert (conditions.load_1min, conditions.free_disk_mb, conditions.free_memory_mb) == (0.25, 51200.0, 2147.483648)
    assert conditions.unread == {
        "energy": "no power monitor under /sys/bus/iio/devices; no processor package under /sys/class/powercap; "
        "no battery"
    }


@pytest.mark.parametrize(("status", "throttled"), [("0", False), ("1", True), ("5", True)])
def test_a_phones_thermal_status_is_its_throttling(status: str, throttled: bool) -> None:
    device = pixel()
    device.commands[android.THERMAL] = f"Thermal Status: {status}\n"
    conditions = around(device)
    assert conditions.throttled is throttled
    assert conditions.thermal_status == int(status)
    assert conditions.unread["temperature_c"].endswith("dumpsys thermalservice: no sensor of the processor")


@pytest.mark.parametrize("output", ["", "Permission Denial: can't dump\n", "Thermal Status: x", "level: 9999999999999"])
def test_services_that_say_nothing_of_use(output: str) -> None:
    device = pixel()
    device.commands = dict.fromkeys(device.commands, output)
    conditions = around(device)
    silent = {"temperature_c", "throttled", "thermal_status", "screen_on", "power_saver", "power_source", "charger"}
    of_the_battery = {"battery_percent", "battery_status", "battery_temperature_c", "energy"}
    assert silent | of_the_battery | {"free_disk_mb"} == set(conditions.unread)


HONOR = """Current Battery Service state:
  AC powered: false
  USB powered: false
  Wireless powered: false
  Dock powered: false
  Max charging current: 0
  Max charging voltage: 0
  Charge counter: 2848000
  status: 3
  health: 2
  present: true
  level: 54
  scale: 100
  voltage: 3906
  temperature: 220
  technology: Li-ion
  Charging state: 0
  Charging policy: 0
"""
MOTO = """Current Battery Service state:
  AC powered: false
  USB powered: true
  Wireless powered: false
  MOD powered: false
  Max charging current: 500000
  Max charging voltage: 5000000
  Charge counter: 3059000
  status: 5
  health: 2
  present: true
  level: 100
  scale: 100
  voltage: 4378
  temperature: 260
  technology: Li-ion
  mod level: -1
  mod status: 1
"""
WEAK_CHARGER = """Current Battery Service state:
  AC powered: true
  USB powered: false
  Wireless powered: false
  Dock powered: false
  status: 2
  health: 2
  present: true
  level: 16
  scale: 100
  voltage: 0
  temperature: 430
  technology: Li-ion
"""
"""What owners of a Honor, a Moto and a headset posted."""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (HONOR, ("battery", "none", "Discharging", 54.0, 22.0)),
        (MOTO, ("mains", "USB", "Full", 100.0, 26.0)),
        (WEAK_CHARGER, ("mains", "AC", "Charging", 16.0, 43.0)),
    ],
)
def test_chargers_and_batteries_of_phones(output: str, expected: tuple[str | float, ...]) -> None:
    device = pixel()
    device.commands[android.BATTERY] = output
    conditions = around(device)
    assert expected == (
        *(conditions.power_source, conditions.charger, conditions.battery_status),
        *(conditions.battery_percent, conditions.battery_temperature_c),
    )


def test_a_battery_that_somebody_made_up() -> None:
    """After `dumpsys battery unplug`, the service reports the values that were set."""
    device = pixel()
    device.commands[android.BATTERY] = HONOR.replace("\n", "\n  (UPDATES STOPPED -- use 'reset' to restart)\n", 1)
    conditions = around(device)
    for field in ("power_source", "charger", "battery_percent", "battery_status", "battery_temperature_c"):
        assert getattr(conditions, field) is None
        assert "`dumpsys battery reset`" in conditions.unread[field]


@pytest.mark.parametrize(
    ("output", "screen", "saver"),
    [
        ("  mWakefulness=Awake\n  mSettingBatterySaverEnabled=true\n", True, True),
        ("  mWakefulness=Dozing\n  mSettingBatterySaverEnabled=false\n", False, False),
        ("  mWakefulness=Asleep\n", False, None),  # Android 8
    ],
)
def test_screen_and_battery_saver(output: str, screen: bool, saver: bool | None) -> None:
    device = pixel()
    device.commands[android.POWER] = output
    conditions = around(device)
    assert (conditions.screen_on, conditions.power_saver) == (screen, saver)
    assert ("power_saver" in conditions.unread) == (saver is None)


def test_the_temperature_of_a_laptops_battery() -> None:
    files = {f"{SUPPLY}/BAT0/temp": "312\n"}
    conditions = around(laptop(**files))
    assert conditions.battery_temperature_c == 31.2
    assert conditions.charger is None
    assert conditions.unread["charger"] == android.NO_ANDROID


def test_a_raspberry_pi() -> None:
    conditions = around(raspberry_pi())
    assert (conditions.temperature_c, conditions.throttled) == (52.1, False)
    assert conditions.unread["screen_on"] == android.NO_ANDROID
    flags = {"/sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n"}
    assert around(raspberry_pi(**flags)).throttled is True
    past = {"/sys/devices/platform/soc/soc:firmware/get_throttled": "50000\n"}
    assert around(raspberry_pi(**past)).throttled is False


def test_cpu_time_and_its_interval_are_the_devices_own() -> None:
    now = {"/proc/stat": "cpu  500 10 250 1000 7 1 2 37\n", "/proc/uptime": "1004.00 1.00\n"}
    conditions = around(raspberry_pi(), **now)
    assert (conditions.busy_cpu_s, conditions.interval_s) == (pytest.approx(6.0), pytest.approx(4.0))
    assert conditions.foreign_cpu == pytest.approx((6.0 - 1.0 - 0.5) / 4.0)


def run_of(busy: float | None, cpu_s: float | None, interval: float | None) -> RawRun:
    conditions = Conditions(busy_cpu_s=busy, interval_s=interval)
    return RawRun(
        exit_code=0, stdout="", wall_s=1, cpu_s=cpu_s, overhead_cpu_s=0.1, started_at=0, conditions=conditions
    )


@pytest.mark.parametrize(
    ("runs", "share"),
    [
        ([(1.1, 0.9, 2.0), (1.2, 0.9, 2.0)], 0.075),
        ([(0.5, 0.4, 0.3), (0.7, 0.4, 0.3)], 1 / 3),
        ([(0.5, 0.4, 0.2)], None),
        ([(1.1, None, 2.0), (1.2, 0.9, 2.0)], None),
        ([(1.1, 0.9, None)], None),
        ([(None, 0.9, 2.0)], None),
    ],
)
def test_foreign_cpu_over_several_runs(runs: list[Any], share: float | None) -> None:
    """Time between the runs does not count; each is too short for ticks, so they are summed."""
    estimate = foreign_cpu([run_of(*numbers) for numbers in runs])
    assert estimate == (None if share is None else pytest.approx(share))


def test_energy_of_a_processor_whose_counter_wraps() -> None:
    conditions = around(laptop(), **{f"{RAPL}/intel-rapl:0/energy_uj": "9671149\n"})
    assert conditions.energy is not None
    assert (conditions.energy.counter, conditions.energy.joules) == ("RAPL package", pytest.approx(10.0))
    assert conditions.energy.steps == 10_000_000


def test_energy_of_memory_that_is_counted_apart() -> None:
    dram = {"name": "dram", "energy_uj": "1000000", "max_energy_range_uj": "65712999613"}
    device = laptop(**{f"{RAPL}/intel-rapl:0:1/{name}": text for name, text in dram.items()})
    conditions = around(device, **{f"{RAPL}/intel-rapl:0:1/energy_uj": "3000000"})
    assert conditions.energy is not None
    assert (conditions.energy.counter, conditions.energy.joules) == ("RAPL package + dram", pytest.approx(2.0))


def two_dies(*microjoules: int) -> dict[str, str]:
    """The counters of a processor of two dies."""
    files: dict[str, str] = {}
    for die, energy in enumerate(microjoules):
        zone = f"{RAPL}/intel-rapl:{die}"
        files |= {f"{zone}/name": f"package-0-die-{die}\n", f"{zone}/energy_uj": f"{energy}\n"}
        files |= {f"{zone}/max_energy_range_uj": "65532610987\n"}
    return files


def test_dies_that_all_show_the_counter_of_the_package_are_counted_once() -> None:
    """As those of AMD's processors do; Intel's have counters of their own."""
    conditions = around(laptop(**two_dies(5_000_000, 5_000_400)), **two_dies(15_000_000, 15_000_700))
    assert conditions.energy is not None
    assert (conditions.energy.counter, conditions.energy.joules) == ("RAPL package", pytest.approx(10.0))
    conditions = around(laptop(**two_dies(5_000_000, 905_000_000)), **two_dies(15_000_000, 925_000_000))
    assert conditions.energy is not None
    assert (conditions.energy.counter, conditions.energy.joules) == ("RAPL package-0-die", pytest.approx(30.0))


def without_rapl(**changes: str | OSError) -> FakeReader:
    return laptop(**{f"{RAPL}/intel-rapl:0/energy_uj": DENIED}, **changes)


def test_energy_of_a_battery_where_rapl_is_for_root() -> None:
    conditions = around(without_rapl(), **{f"{SUPPLY}/BAT0/energy_now": "39990000\n"})
    assert conditions.energy is not None
    assert (conditions.energy.joules, conditions.energy.steps) == (pytest.approx(36.0), 10_000)


def test_energy_of_a_gauge_that_counts_charge() -> None:
    gauge = {f"{SUPPLY}/BAT0/{name}": text for name, text in (("charge_now", "4000000"), ("voltage_now", "12000000"))}
    device = without_rapl(**gauge, **{f"{SUPPLY}/BAT0/energy_now": DENIED})
    now = {f"{SUPPLY}/BAT0/charge_now": "3999000", f"{SUPPLY}/BAT0/voltage_now": "11000000"}
    conditions = around(device, **now)
    assert conditions.energy is not None
    assert (conditions.energy.joules, conditions.energy.steps) == (pytest.approx(3.6e-3 * 11.5 * 1000), 1000)


def test_a_battery_on_a_charger_tells_nothing() -> None:
    conditions = around(without_rapl(**{f"{SUPPLY}/BAT0/status": "Charging\n"}))
    assert conditions.energy is None
    assert (
        conditions.unread["energy"]
        == "battery gauge, energy_now: charging: it measures consumption only on battery power"
    )


def test_a_battery_that_was_charged_meanwhile() -> None:
    conditions = around(without_rapl(), **{f"{SUPPLY}/BAT0/energy_now": "40010000\n"})
    assert "ran backwards" in conditions.unread["energy"]


def test_energy_of_a_phones_power_monitor() -> None:
    rails = ODPM["/sys/bus/iio/devices/iio:device0/energy_value"].replace("2000000", "3500000")
    conditions = around(pixel(**ODPM), **{"/sys/bus/iio/devices/iio:device0/energy_value": rails})
    assert conditions.energy is not None
    assert (conditions.energy.counter, conditions.energy.joules) == ("power monitor, 3 rails", pytest.approx(1.5))


def test_no_counter() -> None:
    for files in (LINUX, PI_FILES):
        conditions = around(FakeReader(files))
        assert conditions.energy is None and conditions.unread["energy"].startswith("no power monitor")


def test_a_snapshot_is_the_tree_it_was_taken_of() -> None:
    device = FakeReader(LAPTOP_FILES)
    snapshot = Readings.take(device, [f"{RAPL}/*/*", f"{SUPPLY}/*/*", "/proc/none"])
    device.files.clear()
    assert snapshot.names(RAPL) == ["intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1"]
    assert energy_counter(snapshot).parts[0].value == 262143000000
    for look in (lambda: snapshot.names("/proc"), lambda: snapshot.read_text("/proc/none")):
        with pytest.raises(OSError):
            look()
    with pytest.raises(AssertionError, match="not asked for"):
        snapshot.read_text("/proc/stat")


NONSENSE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["9" * 4000, "-1", "nan", "inf", "1e999", "cpu  1 2 3", f"cpu  {'9' * 4000} 1 1 1 1 1 1 1", "٣"]),
    st.sampled_from(["MemTotal: " + "9" * 4000 + " kB", "0-9999", "CH0(T=1)[a], " + "9" * 4000, "\x00", "package-\n"]),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_device_can_say_anything_that_is_worse_than_unread(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([pixel, laptop, raspberry_pi]))
    device = make()
    for table in (device.files, device.commands):
        for name in data.draw(st.sets(st.sampled_from(sorted(table)), max_size=6)):
            table[name] = data.draw(NONSENSE)
    observer = Observer(device)
    before = observer.before()
    device.files |= {name: data.draw(NONSENSE) for name in data.draw(st.sets(st.sampled_from(sorted(device.files))))}
    conditions = observer.after(before, result())
    Conditions.model_validate_json(conditions.model_dump_json())
    with contextlib.suppress(Unread):
        assert Device.model_validate_json(describe(device).model_dump_json())


def test_reading_the_rest_is_outside_of_the_interval_of_cpu_time() -> None:
    paths: list[str] = []
    device = raspberry_pi()
    answer = device._get
    device._get = lambda path: (paths.append(path), answer(path))[1]  # type: ignore[method-assign]
    observer = Observer(device)
    before = observer.before()
    first, paths[:] = list(paths), []
    observer.after(before, result())
    assert first[-2:] == paths[:2] == ["/proc/stat", "/proc/uptime"]
    assert len(first) > 2 and len(paths) > len(first)
