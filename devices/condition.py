"""The condition of a device around one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from nas.core.plan import Conditions, RawRun
from nas.devices.probes import android, cpu, energy, frequency, memory, power, thermal, throttle
from nas.devices.probes.unread import Unread
from nas.devices.snapshot import Snapshot
from nas.devices.transports.base import CommandResult, Reader

T = TypeVar("T")

BEFORE = tuple(dict.fromkeys((*throttle.COUNTERS, *memory.FILES, *energy.FILES, *cpu.FILES)))
"""What is read before a process. CPU time comes last, so that reading the rest is not in the interval."""

AFTER = tuple(
    dict.fromkeys(
        (
            *(*cpu.FILES, *energy.FILES, *frequency.FILES, *thermal.FILES, *throttle.COUNTERS, *throttle.FILES),
            *(*cpu.LOAD_FILES, *power.FILES, *memory.FILES),
        )
    )
)
"""What is read after a process. CPU time comes first, then what changes fast once the processor is idle."""

COMMANDS = (memory.DISK, *android.COMMANDS)
"""What is asked after a process; on anything but Android there is no `dumpsys`, which is found out for nothing."""

_ONE_MOMENT: dict[str, Callable[[Snapshot], Any]] = {
    "temperature_c": lambda now: _first(now, thermal.temperature_c, android.temperature_c),
    "governor": frequency.governor,
    "frequency_mhz": frequency.frequency_mhz,
    "cluster_mhz": frequency.cluster_mhz,
    "load_1min": cpu.load_1min,
    "power_source": lambda now: _first(now, power.power_source, android.power_source),
    "battery_percent": lambda now: _first(now, power.battery_percent, android.battery_percent),
    "battery_status": lambda now: _first(now, power.battery_status, android.battery_status),
    "free_disk_mb": memory.free_disk_mb,
    "screen_on": android.screen_on,
}


class Observer:
    """Reads the device before and after a process, in one exchange each.

    Args:
        reader: the device's /proc and /sys.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def before(self) -> Snapshot:
        """To be called last before a process starts, and handed to `after`."""
        return Snapshot.take(self._reader, BEFORE)

    def after(self, before: Snapshot, result: CommandResult) -> Conditions:
        """To be called first after the process ended. What could not be read is null, with its reason in `unread`.

        Memory is what was free before; temperature and frequency are read right after, when the processor is warm.
        """
        now = Snapshot.take(self._reader, AFTER, COMMANDS)
        two: dict[str, Callable[[], Any]] = {
            "busy_cpu_s": lambda: cpu.busy_s(now) - cpu.busy_s(before),
            "interval_s": lambda: cpu.uptime_s(now) - cpu.uptime_s(before),
            "foreign_cpu": lambda: _foreign(before, now, result),
            "throttled": lambda: _throttled(before, now),
            "oom_kills": lambda: memory.oom_kills(now) - memory.oom_kills(before),
            "energy": lambda: energy.energy_used(energy.energy_counter(before), energy.energy_counter(now)),
            "free_memory_mb": lambda: memory.free_memory_mb(before),
        }
        values = {name: _try(probe) for name, probe in two.items()}
        values |= {name: _try(partial(probe, now)) for name, probe in _ONE_MOMENT.items()}
        unread = {name: str(value) for name, value in values.items() if isinstance(value, Unread)}
        return Conditions(**{name: value for name, value in values.items() if name not in unread}, unread=unread)


def foreign_cpu(runs: Sequence[RawRun]) -> float | None:
    """CPU share of other processes while `runs` ran, in cores; None where it cannot be told.

    Over several short runs it is told where each alone is too short for the counter's ticks. What is done between
    them, our own reading above all, does not count.
    """
    busy = ours = wall_s = 0.0
    for run in runs:
        there = run.conditions
        if there.busy_cpu_s is None or there.interval_s is None or run.cpu_s is None:
            return None
        busy += there.busy_cpu_s
        ours += run.cpu_s + run.overhead_cpu_s
        wall_s += there.interval_s
    share = _try(lambda: cpu.foreign_share(busy, ours, wall_s))
    return None if isinstance(share, Unread) else share


def _foreign(before: Snapshot, now: Snapshot, result: CommandResult) -> float:
    ours = None if result.cpu_s is None else result.cpu_s + result.overhead_cpu_s
    busy, wall_s = cpu.busy_s(now) - cpu.busy_s(before), cpu.uptime_s(now) - cpu.uptime_s(before)
    return cpu.foreign_share(busy, ours, wall_s)


def _throttled(before: Snapshot, now: Snapshot) -> bool:
    """Counters that grew tell of throttling in between; everything else only of throttling now."""
    return _first(
        now,
        lambda now: throttle.throttle_count(now) > throttle.throttle_count(before),
        lambda now: throttle.firmware_flags(now) > 0,
        lambda now: throttle.cooling_level(now) > 0,
        lambda now: android.thermal_status(now) > 0,
    )


def _first(now: Snapshot, *probes: Callable[[Snapshot], T]) -> T:
    """The first that can be read; else all reasons, but for what is missing because this is no Android."""
    reasons = []
    for probe in probes:
        try:
            return probe(now)
        except Unread as reason:
            reasons.append(str(reason))
    raise Unread("; ".join(reason for reason in reasons if reason != android.NO_ANDROID))


def _try(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Unread as reason:
        return reason
