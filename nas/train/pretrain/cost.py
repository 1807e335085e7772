"""What a pre-training costs, before it starts: tokens, FLOPs, memory, time here and on GPUs, price."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.train.pretrain.recipe import Recipe

UTILISATION = 0.4
"""Share of a GPU's peak that a training reaches: 38 to 43 % in arXiv:2407.21783, table 4. Not measured with hilnas."""
STATE_BYTES = 16
"""Of a weight in a training: itself, its gradient and two moments, each in float32. Activations come on top."""
_PASSES = 3.0
"""FLOPs of a step as a multiple of the forward pass: the backward pass takes two."""
_TIMED_VOCABULARY = 1024
_TIMED_TOKENS = 256
_TIMED_LAYERS = 2


class Gpu(BaseModel):
    """A GPU of `gpus.json`: peak in 10^12 FLOP/s of dense BF16, and where that is from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tflops: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    source: str


@dataclass(frozen=True, slots=True)
class GpuCost:
    """Hours of a training on one GPU, their price, and how many hold the weights' state."""

    gpu: str
    hours: float
    price: float | None
    least_gpus: int


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Cost of a training.

    Args:
        tokens: trained on.
        flops: of all steps, the output head and attention included.
        state_bytes: of weights, gradients and moments; activations come on top.
        host_flops_per_s: reached here by a shortened model; see `timed_flops_per_s`.
        gpus: on one of each.
    """

    tokens: int
    flops: float
    state_bytes: int
    host_flops_per_s: float
    gpus: tuple[GpuCost, ...]

    @property
    def host_seconds(self) -> float:
        """Time on this machine."""
        return self.flops / self.host_flops_per_s


def training_cost(
    layout: Layout, recipe: Recipe, host_flops_per_s: float, price_per_hour: float | None = None
) -> TrainingCost:
    """Returns the cost of a training, with the price of a GPU's hour, if given."""
    flops = sum(
        _PASSES * layout.flops(max(1, stage.length // 2)) * recipe.steps(stage) * recipe.sequences(stage) * stage.length
        for stage in recipe.stages
    )
    state = STATE_BYTES * layout.params.total
    return TrainingCost(recipe.tokens, flops, state, host_flops_per_s, gpu_costs(flops, state, price_per_hour))


def gpu_costs(flops: float, state_bytes: int, price_per_hour: float | None = None) -> tuple[GpuCost, ...]:
    """Returns what so many FLOPs cost on each GPU of `gpus.json`, at `UTILISATION` of its peak."""
    costs = []
    for gpu in gpus():
        hours = flops / (gpu.tflops * 1e12 * UTILISATION) / 3600
        least = -int(-state_bytes // (gpu.memory_gb * 1e9))
        costs.append(GpuCost(gpu.name, hours, None if price_per_hour is None else hours * price_per_hour, least))
    return tuple(costs)


def gpus() -> list[Gpu]:
    """Returns the GPUs that costs are computed for."""
    return TypeAdapter(list[Gpu]).validate_json(Path(__file__).with_name("gpus.json").read_bytes())


def timed_flops_per_s(layout: Layout) -> float:
    """Returns the FLOPs per second that a step of the layout's first layers, with few words, reaches on this CPU.

    Takes seconds. A whole training has longer sequences and an optimiser as well, so that it may reach less.
    """
    layers = tuple(layout.layer_at(index) for index in range(min(_TIMED_LAYERS, layout.depth)))
    short = layout.with_layers(layers, vocab=min(layout.vocab, _TIMED_VOCABULARY))
    model, ids = Model(short), torch.randint(0, short.vocab, (1, _TIMED_TOKENS))
    seconds = []
    for _ in range(2):  # the first allocates
        start = time.perf_counter()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
        seconds.append(time.perf_counter() - start)
    return _PASSES * short.flops(_TIMED_TOKENS // 2) * _TIMED_TOKENS / min(seconds)
