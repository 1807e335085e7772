"""What a device is: data only. Behaviour is in `nas.devices`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nas.core.cores import show_cores
from nas.core.errors import InvalidInput
from nas.core.workload import Workload

TOLD_LENGTH = 200
"""Characters of anything that a device says about itself."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a line of printable characters is wanted")
    return text


Told = Annotated[str, Field(max_length=TOLD_LENGTH), AfterValidator(_printable)]
"""One line that a device said: bounded, and without characters that would do something to a terminal or a page."""

CoreNumber = Annotated[int, Field(ge=0, lt=1 << 14)]


class Cluster(BaseModel):
    """Cores of one kind: same design, highest frequency and capacity."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: Told = Field(description="design, such as 'Cortex-X1'")
    cores: tuple[CoreNumber, ...] = Field(min_length=1)
    max_mhz: float | None = None
    capacity: int | None = Field(None, description="as the scheduler sees it; the fastest core has 1024")


class Device(BaseModel):
    """A registered device, read from the device itself."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="stable over reboots")
    transport: Told = "local"
    model: Told
    soc: Told | None = Field(None, description="system on a chip, where it is another thing than the processor")
    cpu: Told
    target: Told = Field(description="ABI of the runners it can run, such as 'x86_64-linux'")
    abis: tuple[Told, ...] = Field((), max_length=16, description="Android's own names of its ABIs, best first")
    cpu_features: tuple[Told, ...] = Field((), max_length=512)
    cores: int
    clusters: tuple[Cluster, ...] = Field((), max_length=64, description="biggest first; one where all cores are alike")
    pinned_to: tuple[CoreNumber, ...] = Field((), description="cores that its owner chose for runners")
    memory_mb: int
    page_size: int | None = Field(None, description="bytes of a page of memory")
    os: Told
    libc: Told | None = Field(None, description="C library of its programs, such as 'glibc 2.36' or 'bionic'")
    boot: Told | None = Field(None, description="its kernel's random name of this boot: another one after a restart")
    energy_counter: Told | None = Field(None, description="what tells the energy that a run took")
    tags: tuple[Told, ...] = Field((), max_length=64)
    unread: dict[str, Told] = Field(
        default_factory=dict, max_length=16, description="field -> why the device does not tell it"
    )

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """Every core that is there."""
        return tuple(sorted(core for cluster in self.clusters for core in cluster.cores)) or tuple(range(self.cores))

    def pinned(self, workload: Workload) -> Workload:
        """`workload` with the cores that it runs on here: its own, else the device's.

        Raises:
            InvalidInput: a core is not there, or the owner chose fewer cores than the workload has threads.
        """
        if workload.affinity:
            if absent := set(workload.affinity) - set(self.core_numbers):
                raise InvalidInput(
                    f"affinity: {self.id} has no core {show_cores(absent)}; it has {show_cores(self.core_numbers)}"
                )
            return workload
        return workload.model_copy(update={"affinity": self._cores_for(workload.threads)})

    def pinning(self, workload: Workload) -> str:
        """Which cores `pinned` gives the workload, and why; empty where it is not pinned."""
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
        """The owner's choice; else, of unlike clusters, the biggest, and as many more as `threads` take."""
        if self.pinned_to:
            if threads > len(self.pinned_to):
                raise InvalidInput(
                    f"{threads} threads do not fit on cores {show_cores(self.pinned_to)}, which {self.id} is pinned to"
                )
            return self.pinned_to
        if len(self.clusters) < 2:
            return ()
        taken: list[int] = []
        for cluster in self.clusters:
            if len(taken) < threads:
                taken += cluster.cores
        return tuple(sorted(taken))
