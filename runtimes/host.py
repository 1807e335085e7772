"""This machine, as builds of runtimes see it: its ABI, its CPU features, and what runs programs of other machines."""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path


def host_target() -> str:
    """This machine's ABI, such as "x86_64-linux"."""
    return f"{platform.machine()}-{platform.system().lower()}"


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """CPU features of this machine by the kernel's names; every core of an asymmetric processor has them."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return frozenset.intersection(*(frozenset(line.split()) for line in lines)) if lines else frozenset()


def emulator_of(target: str) -> list[str] | None:
    """What to put before a program for `target`: nothing for this machine's own, `None` where nothing here runs it."""
    if target == host_target():
        return []
    machine = target.partition("-")[0]
    found = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    return [found] if found else None
