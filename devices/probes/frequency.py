"""Clock frequency and its governor, from cpufreq."""

from __future__ import annotations

from statistics import fmean

from nas.core.cores import parse_cores, show_cores
from nas.core.errors import InvalidInput
from nas.devices.probes.unread import Unread, names, number, read
from nas.devices.transports.base import Tree

_POLICIES = "/sys/devices/system/cpu/cpufreq"

FILES = tuple(f"{_POLICIES}/policy*/{name}" for name in ("scaling_governor", "scaling_cur_freq", "related_cpus"))


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


def cluster_mhz(tree: Tree) -> dict[str, float]:
    """The present frequency of each set of cores that change it together, in MHz.

    Raises:
        Unread: no cpufreq.
    """
    return {
        _cores(tree, policy): number(tree, f"{policy}/scaling_cur_freq") / 1000 for policy in _policies(tree)
    }  # fmt: skip


def _cores(tree: Tree, policy: str) -> str:
    try:
        return show_cores(parse_cores(read(tree, f"{policy}/related_cpus")))
    except InvalidInput as error:
        raise Unread(f"{policy}/related_cpus: {error}") from None


def _policies(tree: Tree) -> list[str]:
    found = names(tree, _POLICIES, lambda name: name.startswith("policy"))
    if not found:
        raise Unread(f"no policy under {_POLICIES}")
    return [f"{_POLICIES}/{name}" for name in found]
