"""Memory (/proc/meminfo and /proc/vmstat) and free disk space (`df`)."""

from __future__ import annotations

from nas.measure.devices.probes.readings import Readings, matched, read
from nas.measure.devices.transports.base import Tree

FILES = ("/proc/meminfo", "/proc/vmstat")
DISK = "df -Pk ."


def free_disk_mb(readings: Readings) -> float:
    """Returns the free space of the file system that holds hilnas' files, in MB.

    Raises:
        Unread: no `df`.
    """
    output = readings.output(DISK)
    free = matched(r"^\S.* [0-9]+ +[0-9]+ +([0-9]{1,15}) +[0-9]+% ", output, f"{DISK} says {output[:80]!r}")
    return int(free) * 1024 / 1e6


def free_memory_mb(tree: Tree) -> float:
    """Returns the memory available to a new process without swapping, in MB."""
    return _field(tree, "MemAvailable")


def total_memory_mb(tree: Tree) -> float:
    """Returns all memory that the kernel manages, in MB."""
    return _field(tree, "MemTotal")


def oom_kills(tree: Tree) -> int:
    """Returns how many processes the kernel, from 4.13 on, has killed for lack of memory since boot."""
    return int(matched(r"^oom_kill ([0-9]{1,18})$", read(tree, "/proc/vmstat"), "/proc/vmstat: no oom_kill"))


def _field(tree: Tree, name: str) -> float:
    text, missing = read(tree, "/proc/meminfo"), f"/proc/meminfo: no {name}"
    return int(matched(rf"^{name}:\s+([0-9]{{1,15}}) kB$", text, missing)) * 1024 / 1e6
