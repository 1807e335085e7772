"""The `quality:` part of a search space: corpus, optimiser and rungs of the proxy trainings.

Budgets are in optimiser steps, never in seconds, so that a number means the same on every host. The defaults are for
one CPU thread: a byte-level model of width 64, four sequences of 128 bytes a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from nas.core.block_space import problem, refuse
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import RECALL
from nas.core.strict import Strict
from nas.core.task import Setting, make_task

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _different(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must differ, not {list(seeds)}")
    return seeds


Seeds = Annotated[tuple[Seed, ...], AfterValidator(_different)]


class CorpusFiles(Strict):
    """Files of text, JSON lines, JSON, Parquet or Arrow, and folders of them; relative to the file of the space.

    A list in place of the keys is `files`.
    """

    files: tuple[str, ...] = Field(min_length=1, description="paths, globs and folders; each is a domain of its own")
    text: str = Field("text", min_length=1, description="key or column that holds the text of a record")


CorpusSource = Literal["default", "installed"] | CorpusFiles


class ProxyTokenizer(Strict):
    """Byte-pair tokens in place of bytes, trained once on the corpus; bits per byte stay the unit."""

    vocab: int = Field(ge=512, le=8192, multiple_of=32, description="tokens, of which 256 are the bytes")


class Teacher(Strict):
    """A teacher of a rung's language models, trained once per study; its likeliest tokens are cached for all students.

    The loss is (1 - weight) of cross-entropy and `weight` of the decoupled Top-K objective of the LFM2 report (3.3).
    """

    layout: str = Field("published", description="a layout at deploy scale; 'published': that reference")
    steps: int | None = Field(None, ge=1, description="of its training; none: as many as the rung's")
    weight: float = Field(0.5, gt=0, le=1, description="of the teacher's term")
    temperature: float = Field(2.0, ge=1, description="of the tokens within the Top-K")
    k: int = Field(8, ge=1, le=64, description="tokens of the teacher at each position")

    @field_validator("layout")
    @classmethod
    def _is_layout(cls, layout: str) -> str:
        if layout != "published":
            Layout.parse(layout)
        return layout


class TaskStage(Strict):
    """One synthetic task in a rung, trained from scratch for `steps`."""

    task: str | None = Field(None, description="the quality task; the entry's name where left out")
    steps: int = Field(ge=1, description="optimiser steps")
    settings: dict[str, Setting] = Field(default_factory=dict, description="difficulty; the task's own where left out")
    seeds: Annotated[Seeds, Field(min_length=1)] | None = Field(None, description="instead of the rung's seeds")
    batch: int | None = Field(None, ge=1, description="examples per step, instead of `task_batch`")


class Anchors(Strict):
    """Layouts of the space, spread over it, that are trained beside the references to estimate signal and noise."""

    layouts: int = Field(3, ge=1, description="layouts beside the references")
    seeds: Seeds = Field((0, 1, 2), min_length=2, description="of references and anchors alike")

    @model_validator(mode="after")
    def _tells_enough(self) -> Anchors:
        dof = (_REFERENCES + self.layouts - 1) * (len(self.seeds) - 1)
        if dof < _LEAST_DOF:
            raise ValueError(
                f"{self.layouts} anchors beside {_REFERENCES} references and {len(self.seeds)} seeds leave {dof}"
                f" degrees of freedom, at least {_LEAST_DOF} are needed: give more of either"
            )
        return self


class Rescore(Strict):
    """Seeds with which the candidates on and near the front are trained once more when the search has ended."""

    seeds: Seeds = Field((100, 101, 102, 103), min_length=1, description="none that a rung trains")
    p_front: float = Field(0.1, gt=0, le=1, description="least chance to be on the front of those that are re-scored")
    tasks: dict[str, TaskStage] = Field(
        default_factory=dict,
        description="quality task -> its training, of what is re-scored alone; its `seeds` are some of these",
    )

    @model_validator(mode="after")
    def _tasks_are_known(self) -> Rescore:
        for name, stage in self.tasks.items():
            make_task(stage.task or name, stage.settings)
            if others := {*(stage.seeds or ())} - {*self.seeds}:
                raise ValueError(f"rescore: {name} has seeds {sorted(others)}, which are none of {list(self.seeds)}")
        return self

    @property
    def recalls(self) -> bool:
        """Whether one of its tasks is of recall."""
        return any(f"task/{name}".startswith(RECALL) for name in self.tasks)


class LibrarySource(Strict):
    """Scores of a library of blocks in place of trainings; `nas adapt --write-space` writes all of these keys.

    In a space, its keys stand beside `from: library`, with `keep` at most. Candidates are mixes of a
    trained model's blocks, listed as `layouts`. There are two rungs: `sum`, the sum of scores, and `assembled`, the
    assembled mix on the held-out text that the scores are from.
    """

    path: str = Field(min_length=1, description="file of scores, relative to the space's file")
    sum_sd: float = Field(gt=0, description="deviation of quality by the sum from the assembled mix's")
    part_sd: float = Field(gt=0, description="deviation of quality on one quarter of the text")
    mixes: int = Field(ge=2, description="assembled mixes that these deviations were computed from")


_REFERENCES = 2
_LEAST_DOF = 8
_ROUNDING = 1e-9
"""Less than a candidate: 0.07 of 100 are 7, not 8, though the product of the floats is a little more than 7."""


class Rung(Strict):
    """One rung of the ladder: what is trained there, and how many candidates are promoted.

    A language-model run of a later rung continues the one of the same seed from the rung before, so its `lm_steps`
    count from the start; under another teacher than there it starts again.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="what the rung is called in results")
    lm_steps: int = Field(0, ge=0, description="0: no language model in this rung")
    teacher: Teacher | None = Field(None, description="of the language models of this rung")
    tasks: dict[str, TaskStage] = Field(default_factory=dict, description="quality task -> its training")
    seeds: Seeds = Field((0,), min_length=1, description="one training each; scores are their mean")
    library: Literal["sum", "assembled"] | None = Field(
        None, description="what is evaluated in place of trainings, under `from: library`"
    )
    keep: int | float | None = Field(
        None,
        description="promoted to the next rung: a fraction below 1, a number of candidates, or all (left out)",
    )

    @field_validator("keep")
    @classmethod
    def _keep_is_share_or_count(cls, keep: int | float | None) -> int | float | None:
        if keep is None or (isinstance(keep, int) and keep >= 1) or 0 < keep < 1:
            return keep
        raise ValueError(f"keep must be a fraction between 0 and 1 or a whole number of candidates, not {keep}")

    @model_validator(mode="after")
    def _trains_something(self) -> Rung:
        if not self.lm_steps and not self.tasks and self.library is None:
            raise ValueError(f"rung {self.name!r} trains nothing: give lm_steps or tasks")
        if self.teacher and not self.lm_steps:
            raise ValueError(f"rung {self.name!r} has a teacher, but no lm_steps: teachers are for language models")
        for name, stage in self.tasks.items():
            make_task(stage.task or name, stage.settings)
        return self

    def task_seeds(self, task: str) -> tuple[int, ...]:
        """Returns the seeds of `task` in this rung."""
        return self.tasks[task].seeds or self.seeds

    @property
    def all_seeds(self) -> set[int]:
        """Every seed that something is trained with in this rung."""
        task_seeds = {seed for name in self.tasks for seed in self.task_seeds(name)}
        return task_seeds | set(self.seeds) if self.lm_steps else task_seeds

    def with_seeds(self, seeds: tuple[int, ...]) -> Rung:
        """Returns the rung with other seeds."""
        tasks = {name: stage.model_copy(update={"seeds": None}) for name, stage in self.tasks.items()}
        return self.model_copy(update={"seeds": seeds, "tasks": tasks})

    def promoted(self, candidates: int) -> int:
        """Returns how many of `candidates` are promoted; at least one where there is one."""
        if self.keep is None:
            return candidates
        count = self.keep if isinstance(self.keep, int) else math.ceil(self.keep * candidates - _ROUNDING)
        return min(candidates, count)


DEFAULT_RUNGS = (
    Rung(name="short", lm_steps=150, keep=0.5),
    Rung(name="middle", lm_steps=300, keep=0.5),
    Rung(name="long", lm_steps=600, seeds=(0, 1)),
)
"""Text alone: tasks are learned suddenly, so they need more steps than these and anchors to weigh them. At width 64 and
depth 8, on one thread of a server CPU: 5-8 s, 5-8 s and 25-40 s more per candidate."""


class Rounding(Strict):
    """Quantisations of a runtime after which trained proxies are scored."""

    runtime: str
    quantisations: tuple[str, ...]


LIBRARY_PARTS = 4
"""Parts of the held-out text, on each of which an assembled mix has a score of its own."""
_LIBRARY = "library"


class QualityConfig(Strict):
    """Corpus, optimiser and ladder of the proxy trainings of one study. All of it enters their result keys."""

    proxy_d_model: int = Field(64, ge=32, multiple_of=32, description="width of the proxies")
    corpus: CorpusSource | tuple[str, ...] = Field(
        "default",
        description="Python's library and generated text, the source and documentation of the packages installed with"
        " hilnas, or files; see [corpora](#corpora)",
    )
    tokenizer: ProxyTokenizer | None = Field(None, description="tokens of language models; none: bytes")
    batch: int = Field(4, ge=1, description="sequences per language-model step")
    length: int = Field(128, ge=16, description="bytes or tokens per sequence")
    context: int = Field(
        4096,
        ge=16,
        description="tokens at deploy scale; windows, states and the reach of positions keep their share of it",
    )
    task_batch: int = Field(8, ge=1, description="examples per task step")
    optimiser: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for matrices of hidden layers; AdamW for embeddings, gains, taps and routers"
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decays of AdamW's moments")
    lr: float = Field(3e-3, gt=0, description="learning rate; lower it as 1 / width in wider proxies")
    task_lr: float = Field(3e-3, gt=0, description="learning rate for tasks")
    warmup: int = Field(20, ge=0, description="steps of linear learning-rate warm-up")
    decay: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of a training's steps, the last ones, in which the learning rate falls to 0; a longer rung"
        " resumes from before",
    )
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of matrix products in training")
    weight_decay: float = Field(0.05, ge=0, description="of the optimiser")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    ema: float = Field(
        0.99, ge=0, lt=1, description="decay of the weight average that is evaluated; 0: the last weights"
    )
    eval_bytes: int = Field(16384, ge=1024, description="held-out bytes scored per domain")
    min_reference: float = Field(
        0.25, gt=0, description="a group where the reference scores less (bits or nats above chance) is left out"
    )
    rungs: tuple[Rung, ...] = Field(DEFAULT_RUNGS, min_length=1, description="the ladder, cheapest first")
    anchors: Anchors | None = Field(
        None, description="what noise is estimated from; left out: from the references and a prior"
    )
    rescore: Rescore | None = Field(None, description="of the front, on fresh seeds; left out: it is not re-scored")
    library: LibrarySource | None = Field(
        None, description="instead of all else, written as `from: library`, see below"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_library(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "from" not in data:
            return data
        if data["from"] != _LIBRARY:
            refuse([problem(("from",), InvalidInput(f"must be {_LIBRARY!r}; leave it out to train proxies"))])
        training_keys = {*cls.model_fields} - {_LIBRARY}
        of_trainings = [key for key in data if key in training_keys]
        refuse(
            [
                problem((key,), InvalidInput("is of trainings: leave it out beside `from: library`"))
                for key in of_trainings
            ]
        )
        settings = {key: value for key, value in data.items() if key not in ("from", "keep")}
        library = LibrarySource.model_validate(settings)
        sums = Rung.model_validate({"name": "sum", "library": "sum", "keep": data.get("keep", 0.5)})
        assembled = Rung(name="assembled", library="assembled", seeds=tuple(range(LIBRARY_PARTS)))
        return {"library": library, "rungs": (sums, assembled)}

    @field_validator("corpus")
    @classmethod
    def _names_files(cls, corpus: CorpusSource | tuple[str, ...]) -> CorpusSource | tuple[str, ...]:
        if not corpus:
            raise ValueError("corpus names no file: give paths, globs or folders, or 'default'")
        return corpus

    _rounding: Rounding | None = PrivateAttr(None)

    @property
    def rounding(self) -> Rounding | None:
        """What proxies are scored after, from the runtimes of the space; None: they are scored as trained."""
        return self._rounding

    def after(self, rounding: Rounding) -> QualityConfig:
        """Returns this with scores after quantisation."""
        copy = self.model_copy()
        copy._rounding = rounding
        return copy

    def taught_by(self, published: str) -> QualityConfig:
        """Returns this with the layout `published` in place of the name of that reference."""
        rungs = [
            rung.model_copy(update={"teacher": rung.teacher.model_copy(update={"layout": published})})
            if rung.teacher and rung.teacher.layout == "published"
            else rung
            for rung in self.rungs
        ]
        return self.model_copy(update={"rungs": tuple(rungs)})

    @model_validator(mode="after")
    def _ladder_climbs(self) -> QualityConfig:
        names = [rung.name for rung in self.rungs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two rungs are called {', '.join(sorted(twice))}")
        lm = [rung for rung in self.rungs if rung.lm_steps]
        for before, after in pairwise(lm):
            if after.lm_steps < before.lm_steps:
                raise ValueError(
                    f"rung {after.name!r} trains the language model for {after.lm_steps} steps, fewer than"
                    f" {before.lm_steps} of rung {before.name!r} before it"
                )
        if any((rung.library is None) != (self.library is None) for rung in self.rungs):
            raise ValueError("rungs of a library are those of `from: library`, which leaves `rungs` out")
        if self.rescore is not None:
            used = {seed for rung in self.rungs for seed in rung.all_seeds}
            if again := used & set(self.rescore.seeds):
                raise ValueError(f"rescore: rungs train with seeds {sorted(again)}, so these are not fresh")
        return self

    def spread(self, rung: int) -> tuple[float, float] | None:
        """Returns standard deviation and degrees of freedom of one score's quality at a rung; None: not known."""
        if self.library is None:
            return None
        sums = self.rungs[rung].library == "sum"
        return self.library.sum_sd if sums else self.library.part_sd, float(self.library.mixes)

    @property
    def rescored(self) -> QualityConfig:
        """What is trained of the front: the ladder with the fresh seeds, and at its top the tasks of `rescore`."""
        assert self.rescore is not None, "the space asks for it"
        fresh = self.with_seeds(self.rescore.seeds)
        top = fresh.rungs[-1].model_copy(update={"tasks": fresh.rungs[-1].tasks | self.rescore.tasks})
        return fresh.model_copy(update={"rungs": (*fresh.rungs[:-1], top)})

    def with_seeds(self, seeds: tuple[int, ...]) -> QualityConfig:
        """Returns the same ladder with other seeds in all rungs."""
        return self.model_copy(update={"rungs": tuple(rung.with_seeds(seeds) for rung in self.rungs)})
