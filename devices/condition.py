"""The condition of a device around one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nas.core.clock import Clock, SystemClock
from nas.core.plan import Conditions, RawRun
from nas.devices.probes.cpu import busy_s, foreign_share
from nas.devices.probes.frequency import frequency_mhz, governor
from nas.devices.probes.memory import free_memory_mb, oom_kills
from nas.devices.probes.power import battery_percent, power_source
from nas.devices.probes.thermal import temperature_c
from nas.devices.probes.throttle import cooling_level, throttle_count
from nas.devices.probes.unread import Unread
from nas.devices.transports.base import CommandResult, Tree

T = TypeVar("T")

_SIMPLE: dict[str, Callable[[Tree], Any]] = {
    "temperature_c": temperature_c,
    "governor": governor,
    "frequency_mhz": frequency_mhz,
    "power_source": power_source,
    "battery_percent": battery_percent,
}


@dataclass(frozen=True, slots=True)
class Before:
    """What is read before a process; an `Unread` stands for a counter that the device lacks."""

    monotonic: float
    busy_s: float | Unread
    throttles: int | Unread
    free_memory_mb: float | Unread
    oom_kills: int | Unread


class Observer:
    """Reads the same things before and after a process.

    Memory is what was free before; temperature and frequency are read right after, when the processor is still warm.

    Args:
        tree: the device's /proc and /sys.
        clock: times the interval, in which `busy_s` is counted.
    """

    def __init__(self, tree: Tree, clock: Clock | None = None) -> None:
        self._tree = tree
        self._clock = clock or SystemClock()

    def before(self) -> Before:
        """To be called last before a process starts, and handed to `after`."""
        throttles, free = self._read(throttle_count), self._read(free_memory_mb)
        killed = self._read(oom_kills)
        return Before(self._clock.monotonic(), self._read(busy_s), throttles, free, killed)

    def after(self, before: Before, result: CommandResult) -> Conditions:
        """To be called first after the process ended. What could not be read is null, with its reason in `unread`."""
        busy, wall_s = self._read(busy_s), self._clock.monotonic() - before.monotonic
        values: dict[str, Any] = {name: self._read(probe) for name, probe in _SIMPLE.items()}
        values["foreign_cpu"] = _try(lambda: _foreign(before.busy_s, busy, result, wall_s))
        values["throttled"] = _try(lambda: self._throttled(before.throttles))
        values["oom_kills"] = _try(lambda: oom_kills(self._tree) - _value(before.oom_kills))
        values["free_memory_mb"] = before.free_memory_mb
        unread = {name: str(value) for name, value in values.items() if isinstance(value, Unread)}
        return Conditions(**{name: value for name, value in values.items() if name not in unread}, unread=unread)

    def foreign_cpu(self, before: Before, runs: Sequence[RawRun]) -> float | None:
        """CPU share of other processes since `before`, in cores, while `runs` ran; None where it cannot be told.

        Over several short runs it is told where each alone is too short for the counter's ticks.
        """
        busy, wall_s = self._read(busy_s), self._clock.monotonic() - before.monotonic
        ours = [None if run.cpu_s is None else run.cpu_s + run.overhead_cpu_s for run in runs]
        known = [seconds for seconds in ours if seconds is not None]
        total = sum(known) if len(known) == len(ours) else None
        share = _try(lambda: foreign_share(_value(busy) - _value(before.busy_s), total, wall_s))
        return None if isinstance(share, Unread) else share

    def _throttled(self, before: int | Unread) -> bool:
        """Counters that grew tell of throttling in between; cooling levels only of throttling now."""
        if isinstance(before, Unread):
            try:
                return cooling_level(self._tree) > 0
            except Unread as cooling:
                raise Unread(f"{before}; {cooling}") from None
        return throttle_count(self._tree) > before

    def _read(self, probe: Callable[[Tree], Any]) -> Any:
        return _try(lambda: probe(self._tree))


def _foreign(before: float | Unread, after: float | Unread, result: CommandResult, wall_s: float) -> float:
    ours = None if result.cpu_s is None else result.cpu_s + result.overhead_cpu_s
    return foreign_share(_value(after) - _value(before), ours, wall_s)


def _value(reading: T | Unread) -> T:
    if isinstance(reading, Unread):
        raise reading
    return reading


def _try(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Unread as reason:
        return reason
