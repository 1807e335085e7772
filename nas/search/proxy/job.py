"""Proxy trainings as data: the job, its result, and the key of the result. No torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from nas.core.canonical import content_hash, result_key
from nas.core.layout import Layout, padded
from nas.core.quality_config import Rounding
from nas.core.task import TASKS, Setting, SpectraTask, make_task, task_settings
from nas.model.text.bpe import BPE_VERSION
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.tasks import SUITE_VERSION

CHECKPOINT = "checkpoint.safetensors"
"""File in the folder of a key: the state that a training resumes from after a kill."""
STABLE = "stable.safetensors"
"""The state before the learning rate decays, which a longer training resumes from."""
WEIGHTS = "weights.safetensors"
"""The weights that were evaluated."""
PARTS = ("recall", "rest", "late")
"""Parts of a domain's labels that are scored apart, as `lm/DOMAIN.PART`; see `nas.search.proxy.data.LmData`."""
TRAINER_VERSION = 2
"""Part of result keys: increase it with every change after which the same job gives other numbers."""
ROUNDING_VERSION = 1
"""The same of scores after quantisation."""
MIXES_VERSION = 1
"""The same of `LibraryRun`."""


_CONFIG = {"batch", "lr", "warmup", "decay", "optimiser", "betas", "precision", "weight_decay", "clip", "ema"}
"""Settings of a job that are in its key."""


class LmRun(BaseModel):
    """Next-byte or next-token prediction on a corpus; its evaluation groups are the corpus' domains."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = "lm"

    kind: Literal["lm"] = "lm"
    corpus: CorpusRef
    bpe: int | None = Field(None, description="byte-pair tokens of the corpus; None: bytes")
    length: int = Field(128, ge=1, description="bytes or tokens per sequence")
    eval_bytes: int = Field(16384, ge=1, description="held-out bytes scored per domain")

    def key_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the result key."""
        inputs = {"corpus": self.corpus.hash, "length": self.length, "eval_bytes": self.eval_bytes}
        return inputs | ({} if self.bpe is None else {"bpe": [BPE_VERSION, self.bpe]})


def is_part(group: str, groups: Container[str]) -> bool:
    """Returns whether a group of a language model is a part of another of `groups`, whose labels it shares.

    A domain has the name that its user wrote, which may end like a part: `docs/*.rest`.
    """
    whole, _, part = group.rpartition(".")
    return group.startswith("lm/") and part in PARTS and whole in groups


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

    def key_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the result key."""
        settings = task_settings(make_task(self.task, self.settings))
        version = TASKS.version(self.task)
        plugin = {} if version is None else {"version": version}
        return {"task": self.task, "settings": settings, "suite": SUITE_VERSION} | plugin


class LibraryRun(BaseModel):
    """Scores of a mix of a library's blocks in place of a training; see `nas.search.proxy.mixes`.

    The job's layout is the candidate's at deploy scale, its seed the part of the held-out text; it has one step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = "library"
    corpus: ClassVar[CorpusRef | None] = None
    """The text is stored in a file next to the scores."""

    kind: Literal["library"] = "library"
    path: str = Field(description="of the file of scores; in no result key")
    sha256: str = Field(description="of its content")
    evaluated: Literal["sum", "assembled"]

    def key_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the result key."""
        return {"library": self.sha256, "evaluated": self.evaluated, "version": MIXES_VERSION}


class TrainJob(BaseModel):
    """A training of one proxy with one seed, or the evaluation of a mix on one part of the held-out text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: dict[str, Any] = Field(description="canonical JSON of the proxy; a task replaces its vocabulary")
    run: Annotated[LmRun | TaskRun | LibraryRun, Field(discriminator="kind")]
    steps: int = Field(ge=1)
    batch: int = Field(ge=1, description="sequences per step")
    lr: float = Field(gt=0)
    warmup: int = Field(ge=0, description="steps of linear warm-up")
    decay: float = Field(0.0, ge=0, le=1, description="share of the steps, the last ones, in which the rate falls to 0")
    optimiser: Literal["adamw", "muon"] = Field("adamw", description="muon: AdamW for all but hidden matrices")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decays of AdamW's moments")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of matrix products, by autocast")
    weight_decay: float = Field(ge=0, description="on matrices")
    clip: float = Field(gt=0, description="largest gradient norm")
    ema: float = Field(ge=0, lt=1, description="decay of the weight average that is evaluated; 0: the last weights")
    seed: int = Field(ge=0)
    replicate: int = Field(0, ge=0)
    resume_from: str | None = Field(None, description="key of a shorter training of the same run, to resume from")
    teacher: Teaching | None = None
    rounding: Rounding | None = Field(None, description="quantisations that the trained weights are scored in, too")

    @property
    def key(self) -> str:
        """The result key, 64 hex digits."""
        return result_key("train", **train_key_inputs(self))

    @property
    def seeds_key(self) -> str:
        """The same for jobs that differ in seed and replicate alone."""
        return content_hash(train_key_inputs(self) | {"seed": None, "replicate": None})

    @property
    def decay_steps(self) -> int:
        """Number of steps in which the learning rate falls."""
        return round(self.decay * self.steps)


class Teaching(BaseModel):
    """A teacher and how its predictions enter the loss; see `nas.core.quality_config.Teacher`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: TrainJob
    weight: float = Field(gt=0, le=1)
    temperature: float = Field(ge=1)
    k: int = Field(ge=1)

    def key_inputs(self) -> dict[str, Any]:
        """Returns the inputs of a student's result key."""
        return {"teacher": self.job.key, "weight": self.weight, "temperature": self.temperature, "k": self.k}


class TrainResult(BaseModel):
    """The result of a finished training. On one kind of host, all but times follow from the key.

    Its weights are at `weights_file`.
    """

    model_config = ConfigDict(extra="forbid")

    key: str
    scores: dict[str, float] = Field(
        description="evaluation group -> amount above chance: 'lm/DOMAIN' and its parts 'lm/DOMAIN.recall', '.rest' and"
        " '.late' in bits per byte, 'task/NAME' in nats (of retrieval in nDCG@10, of detokenization in nepers),"
        " 'lm/library' in nats"
    )
    losses: dict[str, float] = Field(description="evaluation group -> loss, in bits per byte or nats per label")
    accuracy: dict[str, float] = Field(description="evaluation group -> share of labels predicted")
    curve: list[tuple[int, float]] = Field(description="(step, mean training loss in nats since the point before)")
    steps: int
    tokens: int = Field(description="input tokens trained on, a continued training's earlier part included")
    seconds: float = Field(
        description="wall time under this key, without waiting for the host lock; of seeds that trained in one pass,"
        " an equal share"
    )
    cpu_seconds: float = Field(description="processor time under this key, likewise")
    device: str
    weights_sha256: str = Field(description="of the file with the averaged weights")
    rounded: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="quantisation of the job's `rounding` -> `scores` after it"
    )


def weights_file(checkpoint_dir: Path, key: str) -> Path:
    """Returns where a finished training's averaged weights are, padded as `exported_layout` is."""
    return checkpoint_dir / key / WEIGHTS


def train_key_inputs(job: TrainJob) -> dict[str, Any]:
    """Returns every input of a training's result; without `resume_from`, as resuming gives the same numbers."""
    rounding = None if job.rounding is None else [ROUNDING_VERSION, job.rounding.model_dump(mode="json")]
    return run_inputs(job) | {"steps": job.steps} | ({} if rounding is None else {"rounding": rounding})


def run_inputs(job: TrainJob) -> dict[str, Any]:
    """Returns the inputs that a training and its continuation have in common."""
    config = job.model_dump(mode="json", include=_CONFIG)
    inputs = {
        "layout": job.layout,
        "data": job.run.key_inputs(),
        "config": config,
        "seed": job.seed,
        "replicate": job.replicate,
        "trainer": TRAINER_VERSION,
    }
    plugins = Layout.from_json(job.layout).plugin_versions
    taught = {} if job.teacher is None else {"teacher": job.teacher.key_inputs()}
    return inputs | ({"plugins": plugins} if plugins else {}) | taught


def proxy_layout(job: TrainJob) -> Layout:
    """Returns the layout that is trained: the job's, with the vocabulary of its run, and the bands of spectra."""
    if not isinstance(job.run, TaskRun):
        return Layout.from_json(job.layout)
    task = make_task(job.run.task, job.run.settings)
    bands = {"vectors": task.bands} if isinstance(task, SpectraTask) else {}
    return Layout.from_json(job.layout | {"vocab": task.vocab} | bands)


def exported_layout(job: TrainJob) -> Layout:
    """Returns the layout that a training's weights are written for: its proxy, padded to quantisers' blocks.

    A projection to token vectors and a tower are left out: gates compare what a runtime's graph computes between them.
    """
    return replace(padded(proxy_layout(job)), vectors=0, tower=None)
