"""What else this machine is busy with before a launch: how many cores, and which processes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

BUSY_CORES = 0.2
"""CPU usage of other processes, in cores, above which intervals become wider."""
_SECONDS = 2.0
_NAMED = 3
_LEAST_NAMED = 0.05
"""Cores below which a process is not named."""

Process = tuple[int, float]
"""Process id and start time, which together name a process."""


@dataclass(frozen=True)
class Sample:
    """The CPU time that was used until a moment.

    Args:
        at: seconds, of a clock that only goes forward.
        busy: CPU seconds of everything that runs, over all cores.
        this_process: those of this process.
        processes: name and CPU seconds of each other process that can be seen.
    """

    at: float
    busy: float
    this_process: float
    processes: Mapping[Process, tuple[str, float]]


@dataclass(frozen=True)
class Load:
    """What other processes used between two samples.

    Args:
        cores: that they used.
        of: cores of the machine.
        processes: the names that used most, with their cores.
    """

    cores: float
    of: int
    processes: tuple[tuple[str, float], ...]

    @property
    def busy(self) -> bool:
        """Whether measurements beside it have wider intervals."""
        return self.cores > BUSY_CORES

    @property
    def text(self) -> str:
        """The load as a sentence, such as 'other processes use 1.8 of 2 cores (python 0.9, chrome 0.6)'."""
        named = ", ".join(f"{name} {cores:.1f}" for name, cores in self.processes)
        return f"other processes use {self.cores:.1f} of {self.of} cores{f' ({named})' if named else ''}"


def sample() -> Sample:
    """Returns the CPU time of this machine and of the processes that can be seen."""
    times = psutil.cpu_times()
    used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    processes = {}
    for process in psutil.process_iter(["pid", "create_time", "name", "cpu_times"]):
        info = process.info
        if info["pid"] != os.getpid() and info["cpu_times"] is not None:
            processes[info["pid"], info["create_time"]] = (info["name"] or "", sum(info["cpu_times"][:2]))
    return Sample(time.monotonic(), used, time.process_time(), processes)


def load(
    take: Callable[[], Sample] = sample, wait: Callable[[float], None] = time.sleep, seconds: float = _SECONDS
) -> Load:
    """Returns what other processes use of this machine's cores, from two samples.

    Args:
        take: a sample.
        wait: sleeps.
        seconds: between the samples.
    """
    first = take()
    wait(seconds)
    second = take()
    over = second.at - first.at
    by_name = Counter[str]()
    for process, (name, used) in second.processes.items():
        # What a process that began meanwhile has used, it used meanwhile.
        by_name[name] += used - first.processes.get(process, (name, 0.0))[1]  # type: ignore[assignment]
    most = [(name, used / over) for name, used in by_name.most_common(_NAMED) if used / over >= _LEAST_NAMED]
    cores = (second.busy - first.busy - (second.this_process - first.this_process)) / over
    return Load(max(0.0, cores), psutil.cpu_count() or 1, tuple(most))
