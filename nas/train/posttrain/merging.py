"""Merging of checkpoints tensor by tensor, and as a stage of a member (LFM2 report, section 4.4 and appendix B).

Inputs are safetensors files, or folders of transformers with sharded ones. One tensor of each model is in memory at a
time; the result has the types of the first model, and random choices depend on seed, model and tensor's name alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput
from nas.core.family import PRETRAININGS
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.core.progress import Log
from nas.core.strict import StrictKeys
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import Worker
from nas.model.nn.primitives import generator_of
from nas.model.nn.weights import checkpoint_layout
from nas.train.posttrain.conversations import Conversation, check_files
from nas.train.posttrain.generation import evaluated
from nas.train.pretrain.member_training import START, GivenWeights, MemberToTrain, TrainingRequest, names_of
from nas.train.release.huggingface import Planned, write_safetensors
from nas.train.release.shards import Shards

Method = Literal["soup", "task-arithmetic", "ties", "dare-linear", "dare-ties", "della"]

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MergeSettings(StrictKeys):
    """How models are merged."""

    method: Method = "soup"
    weights: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None = Field(
        None, description="of each model; none: 1 / number of models"
    )
    density: float = Field(1.0, gt=0, le=1, description="share of each task vector's values that is kept, k or 1 - p")
    epsilon: float = Field(0.0, ge=0, description="DELLA: difference of the least and the greatest drop rate")
    seed: int = Field(0, ge=0, description="of DARE and DELLA")

    @model_validator(mode="after")
    def _rates(self) -> MergeSettings:
        drop = 1 - self.density
        if self.epsilon and not (self.epsilon / 2 <= drop and drop + self.epsilon / 2 < 1):
            raise InvalidInput(
                f"drop rates from {drop - self.epsilon / 2:g} to {drop + self.epsilon / 2:g} are not all in [0, 1)",
                where="epsilon",
            )
        return self

    def weights_of(self, models: int) -> list[float]:
        """Returns a weight for each model; those of a soup are normalised to a sum of 1.

        Raises:
            InvalidInput: there are weights for another number of models, or those of a soup add up to 0 or infinity.
        """
        weights = [1 / models] * models if self.weights is None else list(self.weights)
        if len(weights) != models:
            raise InvalidInput(f"{len(weights)} weights for {models} models", where="weights")
        if self.method == "soup":
            if not (total := sum(weights)) or not math.isfinite(total):
                raise InvalidInput("the weights of a soup do not add up to a finite number but 0", where="weights")
            weights = [weight / total for weight in weights]
        return weights


def merge_tensors(name: str, models: Sequence[Tensor], base: Tensor | None, settings: MergeSettings) -> Tensor:
    """Returns one merged tensor, float32.

    Args:
        name: of the tensor, for random choices.
        models: the tensor of each model, float32.
        base: that of the model which they were trained from; only a soup needs none.
        settings: of the merge.
    """
    weights = settings.weights_of(len(models))
    if settings.method == "soup":  # equation 18
        return _weighted(models, weights)
    assert base is not None
    tasks = [model - base for model in models]
    match settings.method:
        case "task-arithmetic":  # equation 19
            return base + _weighted(tasks, weights)
        case "ties":
            return base + consensus([trim(task, settings.density) for task in tasks], weights)
    drop = 1 - settings.density
    sparse = []
    for number, task in enumerate(tasks):
        rates = torch.full_like(task, drop)
        if settings.method == "della":
            rates = della_rates(task, drop, settings.epsilon)
        sparse.append(dropped(task, rates, generator_of(settings.seed, f"{number}:{name}")))
    return base + (_weighted if settings.method == "dare-linear" else consensus)(sparse, weights)


def trim(task: Tensor, density: float) -> Tensor:
    """Returns the share `density` of values with the greatest magnitudes, and zeros elsewhere (TIES, step 1)."""
    count = max(1, round(density * task.numel()))
    if count == task.numel():
        return task
    places = task.abs().flatten().topk(count).indices
    return torch.zeros_like(task).flatten().index_copy(0, places, task.flatten()[places]).view_as(task)


def consensus(tasks: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns the weighted mean of the values whose sign is that of the sum over all task vectors (equation 20).

    Zeros agree with no sign. Where no value agrees, the result is 0.
    """
    elected = sum(tasks[1:], tasks[0]).sign()
    total, agreed = torch.zeros_like(tasks[0]), torch.zeros_like(tasks[0])
    for task, weight in zip(tasks, weights, strict=True):
        agrees = (task.sign() == elected) & (elected != 0)
        total += torch.where(agrees, weight * task, 0.0)
        agreed += torch.where(agrees, weight, 0.0)
    return torch.where(agreed == 0, 0.0, total / torch.where(agreed == 0, 1.0, agreed))


def della_rates(task: Tensor, drop: float, epsilon: float) -> Tensor:
    """Returns the drop rate of each value: the greater its magnitude, the lower (equation 22).

    Ranks begin at 0 with the greatest magnitude of the tensor.
    """
    count = task.numel()
    order = task.abs().flatten().argsort(descending=True, stable=True)
    ranks = torch.empty(count, dtype=torch.float32)
    ranks[order] = torch.arange(count, dtype=torch.float32)
    return (drop - epsilon / 2 + epsilon / count * ranks).view_as(task)


def dropped(task: Tensor, rates: Tensor, generator: torch.Generator) -> Tensor:
    """Drops each value with its rate and divides the others by 1 - rate (DARE, equation 21; DELLA, equation 23)."""
    retained = torch.rand(task.shape, generator=generator) >= rates
    return torch.where(retained, task / (1 - rates), 0.0)


def _weighted(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total += weight * tensor
    return total


def _planned(shards: Shards, name: str) -> Planned:
    """Returns shape and type of a tensor.

    Raises:
        InvalidInput: it holds no floating-point numbers of 16 or 32 bits.
    """
    if (dtype := shards.dtype(name)) not in _TYPES:
        raise InvalidInput(f"{name} has type {dtype}, not F32, F16 or BF16", where=str(shards.path))
    return Planned(name, shards.shape(name), _TYPES[dtype])


def merge(models: Sequence[Path], base: Path | None, settings: MergeSettings, out: Path) -> PlanFile:
    """Merges checkpoints into one safetensors file with the first one's metadata, atomically.

    Args:
        models: files or folders of the models, with equal tensors.
        base: that they were trained from; only a soup needs none.
        settings: of the merge.
        out: file to write.

    Raises:
        InvalidInput: files that cannot be read or differ in names or shapes, or settings that do not fit their number.
        InfrastructureFailed: the result cannot be written.
    """
    if not models:
        raise InvalidInput("name at least one model to merge")
    if base is None and settings.method != "soup":
        raise InvalidInput(f"{settings.method} needs the model that the others were trained from")
    settings.weights_of(len(models))
    sources = [Shards(path) for path in models]
    start = None if base is None or settings.method == "soup" else Shards(base)
    first = sources[0]
    planned = [_planned(first, name) for name in first.names]
    for other in (*sources[1:], *([start] if start else [])):
        _check_equal(planned, other)

    def merged() -> Iterator[Tensor]:
        for one in planned:
            # Without a name for the list, none of its tensors is left when the next ones are read.
            yield _checked(
                merge_tensors(
                    one.name,
                    [shards.tensor(one.name) for shards in sources],
                    start.tensor(one.name) if start else None,
                    settings,
                ),
                one,
            )

    return write_safetensors(out, planned, merged(), first.metadata)


def _checked(tensor: Tensor, planned: Planned) -> Tensor:
    if not tensor.to(planned.dtype).isfinite().all():
        raise InvalidInput(
            f"{planned.name} of the merged model holds NaN or infinity: one of the models does, or weights are too"
            f" great for {str(planned.dtype).removeprefix('torch.')}"
        )
    return tensor


def _check_equal(planned: Sequence[Planned], other: Shards) -> None:
    shapes = {one.name: one.shape for one in planned}
    for name in sorted(shapes.keys() ^ set(other.names)):
        raise InvalidInput(f"{'lacks' if name in shapes else 'has also'} {name}", where=str(other.path))
    for name, shape in shapes.items():
        if (actual := _planned(other, name).shape) != shape:
            raise InvalidInput(f"{name} has shape {list(actual)}, not {list(shape)}", where=str(other.path))


class MergeStageSettings(MergeSettings):
    """Settings of a merge of a member's own weights."""

    models: tuple[str, ...] = Field(
        ("sft", "prefer"), min_length=1, description="earlier stages by name or kind, or weights of the same layout"
    )
    base: str | None = Field(
        None,
        description="stage or weights that the models were trained from; none: last pre-training, or start",
    )
    evaluate: tuple[str, ...] = Field((), description="files of conversations whose answers are compared at the end")


@dataclass(frozen=True, kw_only=True)
class MergeRequest(TrainingRequest):
    """A requested merge of a member's weights.

    Args:
        settings: its paths are relative to the working folder.
    """

    kind: ClassVar[str] = "merge"

    settings: MergeStageSettings

    def check(self, stages: Collection[str]) -> None:
        super().check(stages)
        settings = self.settings
        settings.weights_of(len(settings.models))
        check_names(settings.models, stages, "models")
        if settings.method != "soup":
            check_names([self._base(stages)], stages, "base")
        check_files(((path, Conversation) for path in settings.evaluate), self.tokenizer, self.date)

    def _base(self, stages: Collection[str]) -> str:
        """Returns the name of the base; the default is the last of the kinds of pre-training, or what came before."""
        kinds = (*reversed(PRETRAININGS), "start")
        return self.settings.base or next((kind for kind in kinds if kind in stages), PRETRAININGS[0])

    def plan(self, member: MemberToTrain, log: Log) -> Merge:
        settings = self.settings
        models = [_weights(member, name, "models") for name in settings.models]
        base = None if settings.method == "soup" else _weights(member, self._base(names_of(member.before)), "base")
        return Merge.of(
            member,
            settings.seed,
            settings=settings,
            models=models,
            base=base,
            evaluations=[sha256_of(Path(path)) for path in settings.evaluate],
            date=self.date,
        )


def check_names(names: Iterable[str], stage_names: Collection[str], where: str) -> None:
    """Checks that each name is an earlier stage's, or weights on disk.

    Raises:
        InvalidInput: one is neither.
    """
    for name in names:
        if name not in stage_names and not Path(name).exists():
            stages = ", ".join(sorted(stage_names)) or "none"
            raise InvalidInput(f"{name} is neither weights nor an earlier stage; stages: {stages}", where=where)


def named_weights(member: MemberToTrain, name: str, where: str) -> Checkpoint:
    """Returns the weights of the earlier training `name`, or of that file or folder of shards.

    Raises:
        InvalidInput: there is neither.
    """
    if training := member.named(name):
        return member.weights(training)
    check_names([name], names_of(member.before), where)
    path = Path(name).resolve()
    if not path.is_dir():
        return Checkpoint(path, sha256_of(path))
    return Checkpoint(path, content_hash([[file.name, sha256_of(file)] for file in Shards(path).files]))


def _weights(member: MemberToTrain, name: str, where: str) -> Checkpoint:
    """Returns `named_weights`; raises InvalidInput where they are of another layout."""
    weights = named_weights(member, name, where)
    if (layout := _layout_of(weights.path)) != member.layout:
        raise InvalidInput(f"holds weights of {layout}, not of {member.layout}", where=str(weights.path))
    return weights


def _layout_of(path: Path) -> Layout:
    """Returns the layout that the header of weights names.

    Raises:
        InvalidInput: it names none, as that of a folder of transformers.
    """
    if not path.is_dir():
        return checkpoint_layout(path)
    metadata = Shards(path).metadata
    if "layout" not in metadata:
        raise InvalidInput("its files name no layout; `nas import` converts a folder of transformers", where=str(path))
    return Layout.parse(metadata["layout"])


class Merge(GivenWeights):
    """Plan of a merge: start weights, and nothing to train."""

    settings: MergeStageSettings
    models: list[Checkpoint]
    base: Checkpoint | None
    evaluations: list[str]
    date: str

    def key_inputs(self) -> dict[str, Any]:
        return {
            "merge": self.settings.model_dump(mode="json", exclude={"models", "base", "evaluate"}),
            "evaluations": self.evaluations,
            **self._merged,
        }

    def config(self) -> dict[str, Any]:
        return {"settings": self.settings.model_dump(mode="json"), **self._merged}

    @property
    def _merged(self) -> dict[str, Any]:
        return {"models": [model.sha256 for model in self.models], "base": self.base and self.base.sha256}

    def start(self, folder: Path, log: Log) -> tuple[Path | None, str]:
        base = None if self.base is None else self.base.path
        merge([model.path for model in self.models], base, self.settings, folder / START)
        return folder / START, f"{self.settings.method} of {', '.join(self.settings.models)}"

    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        """Returns the share of exact answers."""
        return evaluated(model, self.settings.evaluate, self.tokenizer, self.date, worker.yield_hook)
