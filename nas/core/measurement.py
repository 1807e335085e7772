"""Measured figures of one artifact on one device under one workload."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nas.core.plan import Conditions
from nas.core.workload import Workload

ClockName = Literal["cpu", "wall"]
"""What times are read from: processor time of the runner, or the time that passed."""


class Sample(BaseModel):
    """A runner's report of one repetition, in the runtime-neutral form that every `Runtime.parse` returns."""

    model_config = ConfigDict(extra="forbid")

    load_ms: float
    ttft_ms: float = Field(description="first decode call with the prompt's ids to the argmax of its last position")
    decode_ns: list[int] = Field(description="wall nanoseconds per decoded token, in order")
    peak_rss_mb: float | None = Field(None, description="VmHWM of the runner at exit, load included")
    prefill_rss_mb: float | None = Field(None, description="VmHWM of the prefill alone (clear_refs before it)")
    decode_rss_mb: float | None = Field(None, description="VmHWM of the decode alone (clear_refs before it)")
    prefill_cpu_ms: float | None = None
    decode_cpu_ns: list[int] | None = None
    finite: bool = True
    info: dict[str, Any] = Field(default_factory=dict, description="build info, system info, buffer sizes")


class ReferenceTimes(BaseModel):
    """What the reference model takes on a device: floors over several runs, on the runs' own clock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = Field(gt=0)
    decode_ms: float = Field(gt=0, description="per token")
    run_ms: float = Field(gt=0, description="all timed work of one run")


class Repetition(BaseModel):
    """A sample with its verdict."""

    model_config = ConfigDict(extra="forbid")

    valid: bool
    reason: str | None = Field(None, description="why it is not valid")
    attempt: int = 0
    sample: Sample | None
    reference: Sample | None = None
    drift: float | None = Field(None, description="reference run's time / its calibration - 1")
    foreign_cpu: float | None = Field(None, description="CPU share of other processes, in cores, over both runs")
    conditions: Conditions = Field(default_factory=Conditions)


class Figure(BaseModel):
    """A statistic over repetitions. A missing `value` is null with a reason, never 0."""

    model_config = ConfigDict(extra="forbid")

    value: float | None
    low: float | None = Field(None, description="lower end of the 95 % interval")
    high: float | None = None
    log_sd: float | None = Field(None, description="standard deviation of the logarithm of `value`")
    typical: float | None = Field(None, description="median as experienced: time that passed, not corrected")
    minimum: float | None = None
    maximum: float | None = None
    n: int = 0
    unit: str
    resolution: float | None = Field(None, description="smallest difference that could be seen, where it is coarse")
    reason: str | None = None


class Measurement(BaseModel):
    """The result of one measure stage.

    `figures` holds at least ttft, prefill_tps, decode_p50, decode_p95, decode_mean, latency, peak_rss, prefill_rss,
    decode_rss, load, energy_mj_per_token, file_size. TTFT, decode p50 and mean, and what is computed from them, are
    floors on `clock`, corrected for the speed of the machine (`nas.measure.protocol.estimator`).
    """

    model_config = ConfigDict(extra="forbid")

    artifact: str
    runtime: str
    build: str
    patched: bool
    device: str
    workload: Workload
    figures: dict[str, Figure]
    repetitions: list[Repetition]
    protocol: int = Field(description="version of the measurement protocol")
    refused_share: float = Field(description="share of repetitions that do not count")
    wall_s: float = Field(0.0, description="seconds of device time, refused repetitions and references included")
    clock: ClockName = "wall"
    foreign_cpu: float | None = Field(None, description="median CPU share of other processes, in cores")
    calibration: ReferenceTimes | None = None
    calibration_ms: float | None = Field(None, description="`calibration.run_ms`")
    drift: float | None = Field(None, description="median drift of the reference runs")
