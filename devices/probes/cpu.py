"""CPU time used by other processes (/proc/stat), load, and clock frequency (cpufreq)."""

from __future__ import annotations

import re
from statistics import fmean

from nas.core.device import parse_cores, show_cores
from nas.core.errors import InvalidInput
from nas.measure.devices.probes.readings import Unread, first_number, names, number, read
from nas.measure.devices.transports.base import Tree

FILES = ("/proc/stat", "/proc/uptime")
"""Read together: CPU time, and the time in which it was used."""

LOAD_FILES = ("/proc/loadavg",)

_TICKS_PER_S = 100
"""USER_HZ, the unit of /proc/stat on every Linux ABI."""

_SHORTEST_S = 0.5
"""Below this, ticks of 10 ms and sampled accounting are as large as the 5 % of a core to be detected."""


def busy_s(tree: Tree) -> float:
    """Returns CPU seconds since boot that were not idle, over all cores: user, nice, system, interrupts and steal.

    Steal counts: a core that the hypervisor gave to another guest is as disturbed as by another process.
    """
    line = read(tree, "/proc/stat").partition("\n")[0]
    fields = re.fullmatch(r"cpu +([0-9]{1,18}(?: [0-9]{1,18}){7,})", line)
    if not fields:
        raise Unread("/proc/stat: no line of all processors")
    user, nice, system, _idle, _iowait, interrupt, soft_interrupt, steal = map(int, fields[1].split()[:8])
    return (user + nice + system + interrupt + soft_interrupt + steal) / _TICKS_PER_S


def uptime_s(tree: Tree) -> float:
    """Returns seconds since boot, in steps of 10 ms."""
    return first_number(tree, "/proc/uptime")


def load_1min(tree: Tree) -> float:
    """Returns the 1-minute load average: processes that ran or waited for a disk."""
    return first_number(tree, "/proc/loadavg")


def foreign_share(busy: float, ours: float | None, wall_s: float) -> float:
    """Returns how many cores other processes kept busy on average over `wall_s` seconds, at least 0.

    `busy` is the growth of `busy_s`, `ours` the CPU seconds of the runner and of what started it.
    """
    if ours is None:
        raise Unread("the device did not report the runner's CPU time")
    if wall_s < _SHORTEST_S:
        raise Unread(f"{wall_s:.2f} s is too short for the 10 ms ticks of /proc/stat")
    return max(0.0, (busy - ours) / wall_s)


_POLICIES = "/sys/devices/system/cpu/cpufreq"

FREQUENCY_FILES = tuple(
    f"{_POLICIES}/policy*/{name}" for name in ("scaling_governor", "scaling_cur_freq", "related_cpus")
)


def governor(tree: Tree) -> str:
    """Returns the cpufreq governor; where clusters differ, all of them, sorted and joined by commas."""
    return ",".join(sorted({read(tree, f"{policy}/scaling_governor") for policy in _policies(tree)}))


def frequency_mhz(tree: Tree) -> float:
    """Returns the current frequency in MHz, mean over clusters."""
    return fmean(number(tree, f"{policy}/scaling_cur_freq") / 1000 for policy in _policies(tree))


def cluster_mhz(tree: Tree) -> dict[str, float]:
    """Returns the current frequency of each set of cores that share a clock, in MHz."""
    return {_cores(tree, policy): number(tree, f"{policy}/scaling_cur_freq") / 1000 for policy in _policies(tree)}


def _cores(tree: Tree, policy: str) -> str:
    try:
        return show_cores(parse_cores(read(tree, f"{policy}/related_cpus")))
    except InvalidInput as error:
        raise Unread(f"{policy}/related_cpus: {error}") from None


def _policies(tree: Tree) -> list[str]:
    policies = names(tree, _POLICIES, lambda name: name.startswith("policy"))
    if not policies:
        raise Unread(f"no policy under {_POLICIES}")
    return [f"{_POLICIES}/{name}" for name in policies]
