"""A proxy training as data: what is trained, how, and the key its result is stored under. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nas.core.canonical import result_key
from nas.core.layout import Layout
from nas.core.task import Setting, make_task, task_settings
from nas.proxy.corpus import CorpusRef
from nas.proxy.tasks import SUITE_VERSION

CHECKPOINT, WEIGHTS = "checkpoint.safetensors", "weights.safetensors"
"""What a training leaves in the folder of its key: all that it could go on from, and the averaged weights."""
TRAINER_VERSION = 1
"""Enters result keys: raise it whenever the same job gives other numbers."""


class LmRun(BaseModel):
    """Next-byte prediction on a corpus; its evaluation groups are the corpus' domains."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["lm"] = "lm"
    corpus: CorpusRef
    length: int = Field(128, ge=1, description="bytes per sequence")
    eval_bytes: int = Field(16384, ge=1, description="held-out bytes scored per domain")


class TaskRun(BaseModel):
    """One synthetic task; it is its own evaluation group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["task"] = "task"
    task: str
    settings: dict[str, Setting] = Field(default_factory=dict)


class TrainJob(BaseModel):
    """One training of one proxy with one seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: dict[str, Any] = Field(description="canonical JSON of the proxy; a task replaces its vocabulary")
    run: Annotated[LmRun | TaskRun, Field(discriminator="kind")]
    steps: int = Field(ge=1)
    batch: int = Field(ge=1, description="sequences per step")
    lr: float = Field(gt=0)
    warmup: int = Field(ge=0, description="steps of linear warm-up; constant from there on")
    weight_decay: float = Field(ge=0, description="on matrices")
    clip: float = Field(gt=0, description="largest gradient norm")
    ema: float = Field(ge=0, lt=1, description="decay of the weight average that is evaluated")
    seed: int = Field(ge=0)
    replicate: int = Field(0, ge=0)
    resume_from: str | None = Field(None, description="key of a shorter training of the same run, to go on from")

    @property
    def key(self) -> str:
        """The result key, 64 hex digits."""
        return result_key("train", **train_key_inputs(self))


class TrainResult(BaseModel):
    """What a finished training leaves behind. On one kind of host, all but times and paths follow from the key."""

    model_config = ConfigDict(extra="forbid")

    key: str
    scores: dict[str, float] = Field(
        description="evaluation group -> amount above chance: 'lm/DOMAIN' in bits per byte, 'task/NAME' in nats"
    )
    losses: dict[str, float] = Field(description="evaluation group -> loss, in bits per byte or nats per label")
    accuracy: dict[str, float] = Field(description="evaluation group -> share of labels predicted")
    curve: list[tuple[int, float]] = Field(description="(step, mean training loss in nats since the point before)")
    steps: int
    tokens: int = Field(description="input tokens trained on, a continued training's earlier part included")
    seconds: float = Field(description="wall time under this key, without waiting for the host lock")
    cpu_seconds: float = Field(description="processor time under this key")
    device: str
    weights: str = Field(description="path of the averaged weights")
    weights_sha256: str


def train_key_inputs(job: TrainJob) -> dict[str, Any]:
    """Every input of a training's result. `resume_from` is none: continuing and training at once give the same."""
    return run_inputs(job) | {"steps": job.steps}


def run_inputs(job: TrainJob) -> dict[str, Any]:
    """The inputs that a training and its continuation have in common."""
    config = job.model_dump(mode="json", include={"batch", "lr", "warmup", "weight_decay", "clip", "ema"})
    return {
        "layout": job.layout,
        "data": _data_inputs(job.run),
        "config": config,
        "seed": job.seed,
        "replicate": job.replicate,
        "trainer": TRAINER_VERSION,
    }


def _data_inputs(run: LmRun | TaskRun) -> dict[str, Any]:
    if isinstance(run, LmRun):
        return {"corpus": run.corpus.hash, "length": run.length, "eval_bytes": run.eval_bytes}
    settings = task_settings(make_task(run.task, run.settings))
    return {"task": run.task, "settings": settings, "suite": SUITE_VERSION}


def proxy_layout(job: TrainJob) -> Layout:
    """The layout that is trained: the job's, with the task's vocabulary where a task is trained."""
    if isinstance(job.run, LmRun):
        return Layout.from_json(job.layout)
    vocab = make_task(job.run.task, job.run.settings).vocab
    return Layout.from_json(job.layout | {"vocab": vocab})
