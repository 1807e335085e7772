"""CPU time that others used, from /proc/stat, and how busy the device has been."""

from __future__ import annotations

import re

from nas.devices.probes.unread import Unread, first_number, read
from nas.devices.transports.base import Tree

FILES = ("/proc/stat", "/proc/uptime")
"""Read together: the one is what was used in the time that the other tells."""

LOAD_FILES = ("/proc/loadavg",)

_TICKS_PER_S = 100
"""USER_HZ, the unit of /proc/stat on every Linux ABI."""

_SHORTEST_S = 0.5
"""Below this, ticks of 10 ms and sampled accounting are as large as the 5 % of a core that is looked for."""


def busy_s(tree: Tree) -> float:
    """CPU seconds since boot that were not idle, over all cores: user, nice, system, interrupts and steal.

    Steal counts: a core that the hypervisor gave to another guest is as disturbed as by another process.

    Raises:
        Unread: no /proc/stat.
    """
    line = read(tree, "/proc/stat").partition("\n")[0]
    fields = re.fullmatch(r"cpu +([0-9]{1,18}(?: [0-9]{1,18}){7,})", line)
    if not fields:
        raise Unread("/proc/stat: no line of all processors")
    user, nice, system, _idle, _iowait, interrupt, soft_interrupt, steal = map(int, fields[1].split()[:8])
    return (user + nice + system + interrupt + soft_interrupt + steal) / _TICKS_PER_S


def uptime_s(tree: Tree) -> float:
    """Seconds since boot, in steps of 10 ms.

    Raises:
        Unread: no /proc/uptime.
    """
    return first_number(tree, "/proc/uptime")


def load_1min(tree: Tree) -> float:
    """Processes that ran or waited for a disk, over the last minute.

    Raises:
        Unread: no /proc/loadavg.
    """
    return first_number(tree, "/proc/loadavg")


def foreign_share(busy: float, ours: float | None, wall_s: float) -> float:
    """Cores that others kept busy on average, at least 0.

    Args:
        busy: growth of `busy_s`.
        ours: CPU seconds of the runner and of what started it.
        wall_s: the interval.

    Raises:
        Unread: the interval is too short, or our own share is not known.
    """
    if ours is None:
        raise Unread("the device did not tell the runner's CPU time")
    if wall_s < _SHORTEST_S:
        raise Unread(f"{wall_s:.2f} s is too short for the 10 ms ticks of /proc/stat")
    return max(0.0, (busy - ours) / wall_s)
