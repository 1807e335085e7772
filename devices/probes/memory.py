"""Memory (/proc/meminfo and /proc/vmstat) and free disk space (`df`)."""

from __future__ import annotations

import re

from nas.measure.devices.probes.readings import Readings, Unread, read
from nas.measure.devices.transports.base import Tree

FILES = ("/proc/meminfo", "/proc/vmstat")
DISK = "df -Pk ."


def free_disk_mb(readings: Readings) -> float:
    """Returns the free space of the file system that holds hilnas' files, in MB.

    Raises:
        Unread: no `df`.
    """
    try:
        said = readings.output(DISK)
    except OSError as error:
        raise Unread(f"{DISK}: {error.strerror}") from error
    match = re.search(r"^\S.* [0-9]+ +[0-9]+ +([0-9]{1,15}) +[0-9]+% ", said, re.MULTILINE)
    if not match:
        raise Unread(f"{DISK} says {said[:80]!r}")
    return int(match[1]) * 1024 / 1e6


def free_memory_mb(tree: Tree) -> float:
    """Returns the memory available to a new process without swapping, in MB."""
    return _field(tree, "MemAvailable")


def total_memory_mb(tree: Tree) -> float:
    """Returns all memory that the kernel manages, in MB."""
    return _field(tree, "MemTotal")


def oom_kills(tree: Tree) -> int:
    """Returns how many processes the kernel, from 4.13 on, has killed for lack of memory since boot."""
    line = re.search(r"^oom_kill ([0-9]{1,18})$", read(tree, "/proc/vmstat"), re.MULTILINE)
    if not line:
        raise Unread("/proc/vmstat: no oom_kill")
    return int(line[1])


def _field(tree: Tree, name: str) -> float:
    line = re.search(rf"^{name}:\s+([0-9]{{1,15}}) kB$", read(tree, "/proc/meminfo"), re.MULTILINE)
    if not line:
        raise Unread(f"/proc/meminfo: no {name}")
    return int(line[1]) * 1024 / 1e6
