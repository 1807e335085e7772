"""Proxy trainings as data: the job, its result, and the key of the result. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from nas.core.canonical import result_key
from nas.core.layout import Layout
from nas.core.task import TASKS, Setting, make_task, task_settings
from nas.proxy.corpus import CorpusRef
from nas.proxy.tasks import SUITE_VERSION

CHECKPOINT, WEIGHTS = "checkpoint.safetensors", "weights.safetensors"
"""Files in the folder of a key: the state that a training resumes from, and the averaged weights."""
TRAINER_VERSION = 1
"""Part of result keys: increase it with every change after which the same job gives other numbers."""


class LmRun(BaseModel):
    """Next-byte prediction on a corpus; its evaluation groups are the corpus' domains."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = "lm"
    vocab: ClassVar[int | None] = None
    """Rows of the embedding table; None: as in the layout of the job."""

    kind: Literal["lm"] = "lm"
    corpus: CorpusRef
    length: int = Field(128, ge=1, description="bytes per sequence")
    eval_bytes: int = Field(16384, ge=1, description="held-out bytes scored per domain")

    def key_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the result key."""
        return {"corpus": self.corpus.hash, "length": self.length, "eval_bytes": self.eval_bytes}


class TaskRun(BaseModel):
    """A synthetic task; it is its own evaluation group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: ClassVar[CorpusRef | None] = None
    """Tasks generate their data."""

    kind: Literal["task"] = "task"
    task: str
    settings: dict[str, Setting] = Field(default_factory=dict)
    entry: str | None = Field(None, description="its name in the rung if that is another; in no result key")

    @property
    def name(self) -> str:
        """Name in logs: the task's."""
        return self.task

    @property
    def vocab(self) -> int:
        """Number of the task's symbols."""
        return make_task(self.task, self.settings).vocab

    def key_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the result key."""
        settings = task_settings(make_task(self.task, self.settings))
        version = TASKS.version(self.task)
        plugin = {} if version is None else {"version": version}
        return {"task": self.task, "settings": settings, "suite": SUITE_VERSION} | plugin


class TrainJob(BaseModel):
    """A training of one proxy with one seed."""

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
    resume_from: str | None = Field(None, description="key of a shorter training of the same run, to resume from")

    @property
    def key(self) -> str:
        """The result key, 64 hex digits."""
        return result_key("train", **train_key_inputs(self))


class TrainResult(BaseModel):
    """The result of a finished training. On one kind of host, all but times and paths follow from the key."""

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
    """Returns every input of a training's result; without `resume_from`, as resuming gives the same numbers."""
    return run_inputs(job) | {"steps": job.steps}


def run_inputs(job: TrainJob) -> dict[str, Any]:
    """Returns the inputs that a training and its continuation have in common."""
    config = job.model_dump(mode="json", include={"batch", "lr", "warmup", "weight_decay", "clip", "ema"})
    inputs = {
        "layout": job.layout,
        "data": job.run.key_inputs(),
        "config": config,
        "seed": job.seed,
        "replicate": job.replicate,
        "trainer": TRAINER_VERSION,
    }
    plugins = Layout.from_json(job.layout).plugin_versions
    return inputs | ({"plugins": plugins} if plugins else {})


def proxy_layout(job: TrainJob) -> Layout:
    """Returns the layout that is trained: the job's, with the vocabulary of its run."""
    vocab = job.run.vocab
    return Layout.from_json(job.layout if vocab is None else job.layout | {"vocab": vocab})
