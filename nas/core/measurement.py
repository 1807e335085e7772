"""Measured figures of one artifact on one device under one workload."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nas.core.device import DeviceText
from nas.core.plan import Conditions
from nas.core.tower import Media
from nas.core.workload import Workload

ClockName = Literal["cpu", "wall"]
"""What times are read from: processor time of the runner, or the time that passed."""


class GpuUse(BaseModel):
    """The GPU that computed everything in a run, as the runtime's back end reports it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: DeviceText
    description: DeviceText
    software: bool = Field(description="a driver that computes on the processor: its times say nothing about a GPU")
    memory_mb: float = Field(ge=0, lt=1e9, description="of the model's buffers on it: weights, caches and scratch")


Nanoseconds = Annotated[int, Field(ge=0, lt=10**15)]


class MediaUse(BaseModel):
    """What happened to the images or sounds of a request, as its runner reports it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(ge=1, lt=1 << 24, description="that the language model saw of all")
    wall_ns: tuple[tuple[Nanoseconds, Nanoseconds, Nanoseconds], ...] = Field(
        min_length=1, description="nanoseconds of preparation, encoder and connector in each pass over the prompt"
    )
    cpu_ns: tuple[tuple[Nanoseconds, Nanoseconds, Nanoseconds], ...] = Field(
        min_length=1, description="the same of processor time"
    )


MEDIA_STEPS: dict[Media, tuple[str, str, str]] = {
    "images": ("image_scaling", "image_encoder", "image_connector"),
    "sounds": ("sound_features", "sound_encoder", "sound_connector"),
}
"""Names of the figures of `MediaUse`'s times."""
FIRST_STEP: dict[Media, str] = {"images": "scaling", "sounds": "features"}
_LATER_PARTS = ("encoder", "connector", "language model")
TTFT_PARTS: dict[Media, dict[str, str]] = {
    media: dict(zip((*MEDIA_STEPS[media], "prompt_reading"), (first, *_LATER_PARTS), strict=True))
    for media, first in FIRST_STEP.items()
}
"""Figures of the parts of TTFT with images or sounds, which add up to it, and what each is called."""


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
    prefill_ns: list[int] = Field(default_factory=list, description="wall nanoseconds of each pass over the prompt")
    prefill_cpu_ns: list[int] | None = None
    turns: list[int] = Field(
        default_factory=list, description="tokens decoded in each turn; before each, the reference decoded as many"
    )
    finite: bool = True
    info: dict[str, Any] = Field(
        default_factory=dict,
        description="build info, system info, `gpu` as in `GpuUse`, `images` or `sounds` as in `MediaUse`",
    )
    reference: Sample | None = Field(None, description="the reference model's, which took turns with this one")

    @model_validator(mode="after")
    def _gpu_is_readable(self) -> Sample:
        if "gpu" in self.info:
            GpuUse.model_validate(self.info["gpu"])
        if self.media is not None and len(self.media.wall_ns) != len(self.media.cpu_ns):
            raise ValueError("times of images or sounds on one clock alone")
        return self

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU that computed it; None: the processor did."""
        return GpuUse.model_validate(self.info["gpu"]) if "gpu" in self.info else None

    @property
    def media(self) -> MediaUse | None:
        """What happened to images or sounds; None: there were none."""
        use = next((self.info[name] for name in MEDIA_STEPS if name in self.info), None)
        return None if use is None else MediaUse.model_validate(use)


class ReferenceTimes(BaseModel):
    """What the reference model takes on a device that nothing disturbs, on the runs' own clock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = Field(gt=0)
    decode_ms: float | None = Field(None, gt=0, description="per token, median; null where nothing is decoded")
    run_ms: float = Field(gt=0, description="the prompt and all tokens of one run")
    decode_mean_ms: float | None = Field(None, gt=0, description="per token, mean")
    decode_p95_ms: float | None = Field(None, gt=0, description="per token, 95th percentile")
    log_sd: dict[str, float] = Field(
        default_factory=dict, description="time, without its unit -> standard deviation of its logarithm"
    )


class Repetition(BaseModel):
    """A sample with its verdict."""

    model_config = ConfigDict(extra="forbid")

    valid: bool
    reason: str | None = Field(None, description="why it is not valid")
    attempt: int = 0
    sample: Sample | None
    reference: Sample | None = None
    drift: float | None = Field(None, description="reference's time / its calibration - 1")
    foreign_cpu: float | None = Field(None, description="CPU share of other processes, in cores, over its processes")
    conditions: Conditions = Field(default_factory=Conditions)


class Figure(BaseModel):
    """A statistic over repetitions. A missing `value` is null with a reason, never 0; unknown noise is null, never 0.

    Its noise has two parts. Two figures of one device and calibration differ by their own noise alone; a figure and a
    number of another origin, such as a limit in milliseconds, differ by the shared noise as well.
    """

    model_config = ConfigDict(extra="forbid")

    value: float | None
    low: float | None = Field(None, description="lower end of the 95 % interval, of all noise")
    high: float | None = None
    log_sd: float | None = Field(
        None, description="standard deviation of the logarithm of `value`, of its own noise; null: not known"
    )
    shared_log_sd: float | None = Field(
        None, description="the same of the noise that all figures of its device share; null: there is none"
    )
    typical: float | None = Field(None, description="median as experienced: time that passed, not corrected")
    minimum: float | None = None
    maximum: float | None = None
    n: int = 0
    unit: str
    resolution: float | None = Field(None, description="smallest difference that could be seen, where it is coarse")
    reason: str | None = None

    @property
    def whole_log_sd(self) -> float | None:
        """Standard deviation of the logarithm of `value`, of all noise; None: not known."""
        return None if self.log_sd is None else math.hypot(self.log_sd, self.shared_log_sd or 0.0)

    def report(self, *names: str) -> dict[str, Any]:
        """Returns the value and its interval as reports of commands have them, and the fields `names`."""
        return {"value": self.value, "ci95": [self.low, self.high], **{name: getattr(self, name) for name in names}}


class Measurement(BaseModel):
    """The result of one measure stage.

    `figures` holds at least ttft, prefill_tps, decode_p50, decode_p95, decode_mean, latency, peak_rss, prefill_rss,
    decode_rss, gpu_memory, load, energy_mj_per_token, file_size; of a workload that encodes also encoding,
    documents_per_s and index_bytes; of one with images image_encoding, its parts in `MEDIA_STEPS`, prompt_reading and
    image_tokens, with sounds likewise, and sound_factor. TTFT, decode p50, p95 and mean, and what follows,
    are estimates of a device that nothing disturbs: measured ratio to the reference model, on `clock`, times what that
    takes by its calibration (`nas.measure.protocol.estimator`).
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
    drift: float | None = Field(None, description="median drift of the reference model")
