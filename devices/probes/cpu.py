"""CPU time used by other processes (/proc/stat), load, and clock frequency (cpufreq)."""

from __future__ import annotations

import re
from statistics import fmean

from nas.core.device import parse_cores, show_cores
from nas.core.errors import InvalidInput
from nas.measure.devices.probes.readings import Unread, first_number, names, number, read, read_or_empty
from nas.measure.devices.transports.base import Tree

FILES = ("/proc/stat", "/proc/uptime")
"""Read together: CPU time, and the time in which it was used."""

LOAD_FILES = ("/proc/loadavg",)

_TICKS_PER_S = 100
"""USER_HZ, the unit of /proc/stat on every Linux ABI."""

_SHORTEST_S = 0.5
"""Below this, ticks of 10 ms and sampled accounting are as large as the 5 % of a core to be detected."""


_SLACK_S = 0.1
"""By which sampled CPU time may be short of a process's own."""


def busy_s(tree: Tree) -> float:
    """Returns CPU seconds since boot that were not idle, over all cores: user, nice, system, interrupts and steal.

    Steal counts: a core that the hypervisor gave to another guest is as disturbed as by another process.
    """
    line = read(tree, "/proc/stat").partition("\n")[0]
    fields = re.fullmatch(r"cpu +([0-9]{1,18}(?: [0-9]{1,18}){7,})", line)
    if not fields:
        raise Unread("/proc/stat: no line of all processors")
    times = [int(field) for field in fields[1].split()]
    if not any(times):
        raise Unread("/proc/stat: nothing was counted since boot, as in some sandboxes")
    user, nice, system, _idle, _iowait, interrupt, soft_interrupt, steal = times[:8]
    return (user + nice + system + interrupt + soft_interrupt + steal) / _TICKS_PER_S


def uptime_s(tree: Tree) -> float:
    """Returns seconds since boot, in steps of 10 ms."""
    return first_number(tree, "/proc/uptime")


def load_1min(tree: Tree) -> float:
    """Returns the 1-minute load average: processes that ran or waited for a disk."""
    return first_number(tree, "/proc/loadavg")


def foreign_share(busy: float, runner_s: float | None, wall_s: float) -> float:
    """Returns how many cores other processes kept busy on average over `wall_s` seconds, at least 0.

    `busy` is the growth of `busy_s`, `runner_s` the CPU seconds of the runner and of what started it.
    """
    if runner_s is None:
        raise Unread("the device did not report the runner's CPU time")
    if wall_s < _SHORTEST_S:
        raise Unread(f"{wall_s:.2f} s is too short for the 10 ms ticks of /proc/stat")
    if busy < runner_s / 2 - _SLACK_S:
        raise Unread(f"/proc/stat counted {busy:.2f} s, less than the {runner_s:.2f} s of the runner alone")
    return max(0.0, (busy - runner_s) / wall_s)


QUOTA_FILES = tuple(f"/sys/fs/cgroup/{name}" for name in ("cpu.stat", "cpu/cpu.stat", "cpu,cpuacct/cpu.stat"))
"""Of the control group that a container shows as the root, in version 2 and 1."""


def quota_waits(tree: Tree) -> int:
    """Returns in how many periods a container's CPU quota let its processes wait, since it started.

    Raises:
        Unread: it has no quota.
    """
    for path in QUOTA_FILES:
        if match := re.search(r"^nr_throttled ([0-9]{1,18})$", read_or_empty(tree, path), re.MULTILINE):
            return int(match[1])
    raise Unread("no control group with a CPU quota")


_POLICIES = "/sys/devices/system/cpu/cpufreq"

FREQUENCY_FILES = tuple(
    f"{_POLICIES}/policy*/{name}" for name in ("scaling_governor", "scaling_cur_freq", "related_cpus", "affected_cpus")
)


def governor(tree: Tree) -> str:
    """Returns the cpufreq governor; where clusters differ, all of them, sorted and joined by commas."""
    governors = {read(tree, f"{policy}/scaling_governor") for policy in _policies(tree)}
    if "" in governors:
        raise Unread(f"a scaling_governor under {_POLICIES} is empty")
    return ",".join(sorted(governors))


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
    """Returns the policies of cores that are online: those of others answer nothing."""
    policies = [f"{_POLICIES}/{name}" for name in names(tree, _POLICIES, lambda name: name.startswith("policy"))]
    if not policies:
        raise Unread(f"no policy under {_POLICIES}")
    online = [policy for policy in policies if _is_online(tree, policy)]
    if not online:
        raise Unread(f"no core of the policies under {_POLICIES} is online")
    return online


def _is_online(tree: Tree, policy: str) -> bool:
    """Returns whether a core of a policy is online; kernels that do not list these (before 2.6.33) count as such."""
    try:
        return read(tree, f"{policy}/affected_cpus") != ""
    except Unread:
        return True
