"""Several models of one layout that train in one pass: the same modules, with parameters stacked [S, ...].

A batch holds the examples of the first model, then those of the second, and so on (`nas.model.nn.primitives`). On a CPU
each model's gradients are bit-identical for any number of stacked models, one included. Those of a model that is not
stacked differ by rounding, because other kernels compute them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def unstackable(model: nn.Module) -> list[str]:
    """Returns the names of classes under `model` that take no stacked parameters; empty: `stacked` works."""
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    blocks = [module for module in model.modules() if hasattr(type(module), "stackable")]
    return sorted({type(module).__name__ for module in (*owners, *blocks) if not getattr(module, "stackable", False)})


def stacked(models: Sequence[M]) -> M:
    """Returns one module with the parameters and buffers of `models`, which share a layout, stacked [S, ...]."""
    stack = copy.deepcopy(models[0])
    for module, *same in zip(stack.modules(), *(model.modules() for model in models), strict=True):
        for name, parameter in module.named_parameters(recurse=False):
            tensors = [seed.get_parameter(name).detach() for seed in same]
            module.register_parameter(name, nn.Parameter(torch.stack(tensors), parameter.requires_grad))
        for name in [name for name, _ in module.named_buffers(recurse=False)]:
            module._buffers[name] = torch.stack([seed.get_buffer(name) for seed in same])
    return stack


def of_seed(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Returns the tensors of one of the stacked models; those without dimensions are common to all."""
    return {name: tensor[index] if tensor.dim() else tensor for name, tensor in tensors.items()}


def of_seeds(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks the tensors of models; the inverse of `of_seed`."""
    first, *others = models
    return {
        name: torch.stack([tensor, *(other[name] for other in others)]) if tensor.dim() else tensor
        for name, tensor in first.items()
    }
