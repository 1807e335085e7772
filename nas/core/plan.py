"""Plans: data that a device executes, without any runtime code on the device.

A runtime yields a `Plan`; a device executes it and returns `RawRun`s; the runtime parses those on the coordinator's
side. So an agent can run nothing but known runners, identified by hash.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from nas.core.device import CoreNumber

MAX_OUTPUT = 1 << 20
"""Bytes of a process's stdout."""
MAX_REPETITIONS = 10_000
"""Of one round."""


class PlanFile(BaseModel):
    """An input file, by content: the device verifies the hash before it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")


class InputFile(PlanFile):
    """An input of a plan. With a recipe, the runner makes the file on the device: a few KB travel instead of it."""

    recipe: PlanFile | None = None

    @property
    def travels(self) -> PlanFile:
        """The file that is stored and sent to a device."""
        return self.recipe or self


class Runner(BaseModel):
    """A runner build: the executable and the files next to it by content, and the options that measuring needs.

    A runner may have more options, such as one that writes logits to a file; no plan can use those.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: str
    build: str = Field(description="build id: hash of source, patches, compiler and flags")
    target: str = Field(description="ABI, such as 'x86_64-linux'")
    patched: bool = False
    files: dict[str, PlanFile] = Field(description="file name -> content; 'main' names the executable")
    main: str
    options: tuple[str, ...] = Field((), description="arguments beginning with '-' that a plan may give it")


class Plan(BaseModel):
    """One process to run on a device.

    `args` are options of the runner and their values; the value `{model}` is replaced by the path of the input file
    called `model`. An input with a recipe is made by the same runner: `runner --recipe FILE --output FILE`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: Runner
    inputs: dict[str, InputFile]
    args: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    threads: int = Field(1, ge=1)
    affinity: tuple[CoreNumber, ...] = ()
    deadline_s: float = Field(gt=0, description="the process group is killed after this many seconds")
    output_limit: int = Field(
        MAX_OUTPUT, gt=0, le=MAX_OUTPUT, description="bytes of stdout kept; more is the runner's fault"
    )

    @property
    def files(self) -> tuple[PlanFile, ...]:
        """Every file that is sent to the device: inputs, then the runner's."""
        return (*(file.travels for file in self.inputs.values()), *self.runner.files.values())


class EnergyUsed(BaseModel):
    """Difference of an energy counter's readings before and after a process.

    It includes all that the counter covers, idle hardware and other processes included, from just before the process is
    started until just after it ended: loading, warm-up, prompt and decode.
    """

    model_config = ConfigDict(extra="forbid")

    counter: str = Field(max_length=200)
    joules: float = Field(ge=0, lt=1e15)
    steps: int = Field(ge=0, lt=1 << 63, description="the same in the counter's own unit")


class Conditions(BaseModel):
    """Conditions on the device around one process. `unread` has the reason of each `None`."""

    model_config = ConfigDict(extra="forbid")

    foreign_cpu: float | None = Field(None, description="CPU share of other processes, in cores, during the process")
    busy_cpu_s: float | None = Field(None, description="CPU seconds of all processes between the readings")
    interval_s: float | None = Field(None, description="seconds between the readings, by the device's uptime")
    load_1min: float | None = Field(None, description="processes that ran or waited for a disk, mean of a minute")
    temperature_c: float | None = None
    throttled: bool | None = None
    thermal_status: int | None = Field(
        None, description="throttling as Android grades it: 0 none, 1 light, 2 moderate, 3 severe, up to 6 shutdown"
    )
    governor: str | None = None
    frequency_mhz: float | None = None
    cluster_mhz: dict[str, float] | None = Field(None, description="cores of a cluster -> their frequency")
    power_source: str | None = None
    battery_percent: float | None = None
    battery_status: str | None = Field(None, description="Charging, Discharging, Full or Not charging")
    battery_temperature_c: float | None = None
    charger: str | None = Field(
        None, description="what an Android phone is plugged into: AC, USB, Wireless, Dock, none"
    )
    power_saver: bool | None = Field(None, description="whether Android's battery saver is on, which may slow it down")
    energy: EnergyUsed | None = None
    free_memory_mb: float | None = None
    free_disk_mb: float | None = Field(None, description="where hilnas keeps its files")
    screen_on: bool | None = None
    oom_kills: int | None = Field(None, description="processes that the kernel killed for memory meanwhile")
    unread: dict[str, str] = Field(default_factory=dict, description="field -> why it could not be read")


class RawRun(BaseModel):
    """Output and resource use of one process."""

    model_config = ConfigDict(extra="forbid")

    exit_code: int = Field(description="negative: killed by that signal")
    stdout: str = Field(max_length=MAX_OUTPUT)
    stderr_tail: str = Field("", max_length=MAX_OUTPUT)
    wall_s: float
    cpu_s: float | None = None
    overhead_cpu_s: float = Field(0.0, description="CPU seconds of what started and watched the process")
    timed_out: bool = False
    truncated: bool = False
    started_at: float
    conditions: Conditions = Field(default_factory=Conditions)


REFERENCE = "reference"
"""Input of a plan whose runner lets a reference model take turns with the candidate."""


class Round(BaseModel):
    """One batch of a measurement job.

    The reference model is an input of the candidate's own process, or else a process before each repetition.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: Plan
    reference: Plan | None = None
    alone: Plan | None = Field(None, description="the candidate without the reference, for its energy")
    repetitions: int = Field(ge=1, le=MAX_REPETITIONS)
    cool_down_s: float = Field(0.0, ge=0)
    v: int = 1

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The processes of one repetition."""
        return tuple(plan for plan in (self.reference, self.alone, self.candidate) if plan is not None)

    @property
    def compares(self) -> bool:
        """Whether a candidate is measured against the reference model."""
        return self.reference is not None or REFERENCE in self.candidate.inputs

    @property
    def deadline_s(self) -> float:
        """Seconds that all its processes may take together."""
        return self.repetitions * sum(plan.deadline_s for plan in self.plans)

    @property
    def files(self) -> frozenset[str]:
        """SHA-256 of every file that it needs: what its agent may download, and what must stay in the store."""
        return frozenset(file.sha256 for plan in self.plans for file in plan.files)


class Pair(BaseModel):
    """The runs of one repetition, in order."""

    model_config = ConfigDict(extra="forbid")

    reference: RawRun | None
    alone: RawRun | None = None
    candidate: RawRun
    foreign_cpu: float | None = Field(None, description="CPU share of other processes, in cores, over all of them")

    @property
    def runs(self) -> tuple[RawRun, ...]:
        """All runs, in order."""
        return tuple(run for run in (self.reference, self.alone, self.candidate) if run is not None)


class RoundResult(BaseModel):
    """An agent's result for a `Round`."""

    model_config = ConfigDict(extra="forbid")

    pairs: list[Pair] = Field(max_length=MAX_REPETITIONS)
    wall_s: float = Field(0.0, ge=0, description="seconds of the whole round on the device, pushing included")
