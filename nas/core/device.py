"""Descriptions of devices: data only. Behaviour is in `nas.measure.devices`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput
from nas.core.workload import Workload

GPU_FEATURES = ("vulkan",)
"""Features of devices on whose GPU everything is computed: a runtime has a build for it, or does not run there."""
TEXT_LENGTH = 200
"""Most characters of any text in which a device describes itself."""
MOST_TAGS = 64
"""Most tags of a device that its host gives it."""

_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a line of printable characters is wanted")
    return text


DeviceText = Annotated[str, Field(max_length=TEXT_LENGTH), AfterValidator(_printable)]
"""One line of text from a device: bounded, and without control characters."""

CoreNumber = Annotated[int, Field(ge=0, lt=1 << 14)]


class Cluster(BaseModel):
    """Cores of one kind: same design, highest frequency and capacity."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: DeviceText = Field(description="design, such as 'Cortex-X1'")
    cores: tuple[CoreNumber, ...] = Field(min_length=1)
    max_mhz: float | None = None
    capacity: int | None = Field(None, description="as the scheduler sees it; the fastest core has 1024")


class Device(BaseModel):
    """A registered device, read from the device itself."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="stable over reboots")
    transport: DeviceText = "local"
    model: DeviceText
    soc: DeviceText | None = Field(None, description="system on a chip, where it is another thing than the processor")
    cpu: DeviceText
    target: DeviceText = Field(description="ABI of the runners it can run, such as 'x86_64-linux'")
    abis: tuple[DeviceText, ...] = Field((), max_length=16, description="Android's own names of its ABIs, best first")
    cpu_features: tuple[DeviceText, ...] = Field((), max_length=512)
    isa: DeviceText | None = Field(
        None, description="x86-64 level that measurements are restricted to, such as 'x86-64-v3'; none: all it has"
    )
    cores: int = Field(ge=0, lt=1 << 14)
    clusters: tuple[Cluster, ...] = Field((), max_length=64, description="biggest first; one where all cores are alike")
    pinned_to: tuple[CoreNumber, ...] = Field((), description="cores that its owner chose for runners")
    threads: int | None = Field(
        None, ge=1, le=1024, description="threads of every workload here; none: as the workload says"
    )
    memory_mb: int = Field(ge=0, lt=10**9)
    page_size: int | None = Field(None, description="bytes of a page of memory")
    os: DeviceText
    libc: DeviceText | None = Field(None, description="C library of its programs, such as 'glibc 2.36' or 'bionic'")
    boot: DeviceText | None = Field(
        None, description="its kernel's random name of this boot: another one after a restart"
    )
    energy_counter: DeviceText | None = Field(None, description="the counter that a run's energy is read from")
    tags: tuple[DeviceText, ...] = Field((), max_length=MOST_TAGS)
    unread: dict[DeviceText, DeviceText] = Field(
        default_factory=dict, max_length=16, description="field -> why the device does not report it"
    )

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """All its cores."""
        return tuple(sorted(core for cluster in self.clusters for core in cluster.cores)) or tuple(range(self.cores))

    def pinned(self, workload: Workload) -> Workload:
        """Returns `workload` with the device's threads, and the cores that it runs on here: its own, else the device's.

        Raises:
            InvalidInput: a core does not exist, or the owner chose fewer cores than the workload has threads.
        """
        if self.threads is not None:
            workload = workload.model_copy(update={"threads": self.threads})
        if workload.affinity:
            if absent := set(workload.affinity) - set(self.core_numbers):
                raise InvalidInput(
                    f"affinity: {self.id} has no core {show_cores(absent)}; it has {show_cores(self.core_numbers)}"
                )
            return workload
        return workload.model_copy(update={"affinity": self._cores_for(workload.threads)})

    def pinning(self, workload: Workload) -> str:
        """Describes which cores `pinned` gives the workload, and why; empty where it is not pinned."""
        cores = self.pinned(workload).affinity
        if not cores:
            return ""
        if workload.affinity:
            return f"cores {show_cores(cores)}, as the workload says"
        if self.pinned_to:
            return f"cores {show_cores(cores)}, as chosen for the device"
        kinds = " and ".join(cluster.cpu for cluster in self.clusters if set(cluster.cores) <= set(cores))
        return f"cores {show_cores(cores)}, its biggest: {kinds}"

    def _cores_for(self, threads: int) -> tuple[int, ...]:
        """Returns the owner's choice; else, of unlike clusters, the biggest ones that have `threads` cores."""
        if self.pinned_to:
            if threads > len(self.pinned_to):
                raise InvalidInput(
                    f"{threads} threads do not fit on cores {show_cores(self.pinned_to)}, which {self.id} is pinned to"
                )
            return self.pinned_to
        if len(self.clusters) < 2:
            return ()
        cores: list[int] = []
        for cluster in self.clusters:
            if len(cores) < threads:
                cores += cluster.cores
        return tuple(sorted(cores))


def parse_cores(text: str) -> tuple[int, ...]:
    """Parses a list of cores such as '4-7' or '0,2-3', also separated by spaces as in /sys; returns them sorted.

    Raises:
        InvalidInput: another form, or no core at all.
    """
    cores: set[int] = set()
    for part in text.replace(",", " ").split():
        match = _PART.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InvalidInput(f"cores {text!r}: a list such as '4-7' or '0,2-3' is wanted")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not cores:
        raise InvalidInput("cores: the list is empty; write it such as '4-7' or '0,2-3'")
    return tuple(sorted(cores))


def show_cores(cores: Iterable[int]) -> str:
    """Formats cores as the shortest list that `parse_cores` reads."""
    runs: list[list[int]] = []
    for core in sorted(set(cores)):
        if runs and runs[-1][-1] == core - 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)
