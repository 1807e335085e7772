"""Optimisers of a training: AdamW for all parameters, or Muon for matrices of hidden layers and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nas.model.nn.primitives import ExpertLinear, Linear

OptimiserKind = Literal["adamw", "muon"]

_MOMENTUM = 0.95
_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RMS = 0.2
"""Root mean square of AdamW's steps, which those of Muon are scaled to (Liu et al. 2025, section 2.2)."""
_NOT_HIDDEN = {"head", "router"}


@dataclass(frozen=True)
class Optimiser:
    """Settings of the optimiser and of what else a step does.

    Args:
        weight_decay: on matrices; gains do not decay.
        clip: largest gradient norm.
        balance_rate: step of the experts' load-balancing bias.
        betas: decay of AdamW's moments (Loshchilov and Hutter 2019).
        eps: added to AdamW's denominator.
        kind: 'adamw', or 'muon' for the matrices of hidden layers.
        parts: name of a part of the model -> its learning rate as a share of the step's; 0: it is frozen. The rate of
            other parameters is the step's.
    """

    weight_decay: float
    clip: float
    balance_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    kind: OptimiserKind = "adamw"
    parts: Mapping[str, float] = field(default_factory=dict)


def make_optimisers(model: nn.Module, settings: Optimiser, stacked: bool) -> list[torch.optim.Optimizer]:
    """Returns the optimisers that together step all parameters of `model`; groups have their `share` of the rate.

    Parameters of frozen parts get no gradients any more.

    Args:
        model: to train.
        settings: of the optimisers.
        stacked: parameters are [S, ...].
    """
    hidden = {id(parameter) for parameter in hidden_matrices(model)} if settings.kind == "muon" else set()
    rest: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for share, parameters in _by_share(model, settings.parts).items():
        others = [p for p in parameters if id(p) not in hidden]
        for decays in (True, False):
            group = [p for p in others if (p.ndim >= (3 if stacked else 2)) is decays]
            decay = settings.weight_decay if decays else 0.0
            rest.append({"params": group, "weight_decay": decay, "share": share})
        matrices.append({"params": [p for p in parameters if id(p) in hidden], "share": share})
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, betas=settings.betas, eps=settings.eps, fused=True),
    ]
    if hidden:
        optimisers.append(Muon(matrices, settings.weight_decay))
    return optimisers


def _by_share(model: nn.Module, parts: Mapping[str, float]) -> dict[float, list[nn.Parameter]]:
    """Returns share of the learning rate -> parameters, and freezes those whose share is 0."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        share = next((share for part, share in parts.items() if name.startswith(f"{part}.")), 1.0)
        if share:
            groups.setdefault(share, []).append(parameter)
        else:
            parameter.requires_grad_(False)
    return groups


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of linear maps between hidden layers: without embedding, output head, routers and taps."""
    return [
        module.get_parameter("weight")
        for name, module in model.named_modules()
        if isinstance(module, Linear | ExpertLinear) and name.rpartition(".")[2] not in _NOT_HIDDEN
    ]


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised (Jordan et al. 2024, "Muon"), over matrices [..., rows, columns].

    Steps have the size of AdamW's, 0.2 sqrt(max(rows, columns)) times the orthogonal matrix (Liu et al. 2025, "Muon is
    Scalable for LLM Training", equation 4), so that both take one learning rate and one weight decay.

    Args:
        params: matrices, or groups of them; leading dimensions count matrices (experts, seeds).
        weight_decay: as AdamW's.
    """

    def __init__(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], weight_decay: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step; matrices of one shape are orthogonalised together."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                steps = orthogonalised(torch.cat(self._updates(parameters)))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                counts = [parameter.numel() // (rows * columns) for parameter in parameters]
                parts = [part.view_as(p) for part, p in zip(torch.split(steps, counts), parameters, strict=True)]
                torch._foreach_add_(parameters, parts, alpha=-group["lr"] * _RMS * max(rows, columns) ** 0.5)

    def _updates(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Advances the momentum of `parameters`; returns the updates [matrices, rows, columns] of each."""
        gradients, momenta = [], []
        for parameter in parameters:
            assert parameter.grad is not None
            gradients.append(parameter.grad)
            state: dict[str, Any] = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momenta.append(state["momentum"])
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        updates = torch._foreach_lerp(gradients, momenta, _MOMENTUM)
        return [update.flatten(0, -3) if update.dim() > 2 else update[None] for update in updates]


def orthogonalised(matrices: Tensor) -> Tensor:
    """Maps [N, rows, columns] to nearly orthogonal matrices U V^T by a quintic Newton-Schulz iteration.

    Singular values end between 0.7 and 1.2, which serves as well as 1 (Jordan et al. 2024). Products are in bfloat16 on
    a GPU.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-1] >= x.shape[-2]
    x = x if wide else x.mT
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.mT).to(matrices.dtype)


@torch.no_grad()
def clip_gradients(model: nn.Module, largest: float, stacked: bool) -> None:
    """Scales gradients down to norm `largest`, where it is finite; those of stacked models each by their own norm."""
    if math.isinf(largest):
        return  # the factor of a norm that is not finite would be none, and spoil gradients that are
    if not stacked:
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Each seed's own tensors: sums over rows of a stack are rounded otherwise than those over a single row.
    totals = [torch.nn.utils.get_total_norm([gradient[i] for gradient in gradients]) for i in range(len(gradients[0]))]
    factor = (largest / (torch.stack(totals) + 1e-6)).clamp(max=1.0)
    factors = [factor.view(-1, *(1,) * (gradient.dim() - 1)) for gradient in gradients]
    torch._foreach_mul_(gradients, factors)
