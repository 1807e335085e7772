"""Clock frequency and its governor, from cpufreq."""

from __future__ import annotations

from statistics import fmean

from nas.devices.probes.unread import Unread, names, number, read
from nas.devices.transports.base import Tree

_POLICIES = "/sys/devices/system/cpu/cpufreq"


def governor(tree: Tree) -> str:
    """The governor; several, sorted and joined by commas, where clusters differ.

    Raises:
        Unread: no cpufreq, as in most virtual machines.
    """
    return ",".join(sorted({read(tree, f"{policy}/scaling_governor") for policy in _policies(tree)}))


def frequency_mhz(tree: Tree) -> float:
    """The present frequency in MHz, mean over clusters.

    Raises:
        Unread: no cpufreq.
    """
    return fmean(number(tree, f"{policy}/scaling_cur_freq") / 1000 for policy in _policies(tree))


def _policies(tree: Tree) -> list[str]:
    found = names(tree, _POLICIES, lambda name: name.startswith("policy"))
    if not found:
        raise Unread(f"no policy under {_POLICIES}")
    return [f"{_POLICIES}/{name}" for name in found]
