"""Mixture of SwiGLU experts with a router and a load-balancing bias (LFM2 report, section 2.3).

Routing follows transformers' modeling_lfm2_moe.py: experts are chosen by score + bias, weighted by the score alone;
with `softmax` that of modeling_qwen2_moe.py, whose bias is zero. The bias is no parameter: after each step it moves
towards the experts that got too few tokens (DeepSeek-V3 report, section 2.1.2; Wang et al. 2024, "Auxiliary-loss-free
load balancing").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import FeedForward
from nas.model.nn.growth import BlockGrowth, CannotGrow, tiled, widened
from nas.model.nn.primitives import ExpertLinear, Linear, Weights, for_examples, linear
from nas.model.nn.swiglu import SwiGLU

_NORM_EPS = 1e-6


class ExpertBias(Weights):
    """The bias of scores when experts are chosen: buffer `weight` [experts], float32, zero at the start.

    `load` [experts] counts the tokens that each expert got in training since the last `update`; not saved.
    """

    weight: Tensor
    load: Tensor

    stackable = True

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.float32), persistent=False)

    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets zeros."""
        self.weight.zero_()
        self.load.zero_()

    @torch.no_grad()
    def update(self, load: Tensor, rate: float) -> None:
        """Adds `rate` to the bias of experts below the mean load, takes it from those above."""
        self.weight += rate * torch.sign(load.mean(-1, keepdim=True) - load)


class MixtureOfExperts(FeedForward):
    """Each token goes to the `top_k` experts of highest score + bias; their outputs add up by score.

    Scores are sigmoids, or a softmax over experts (softmax=1), and those of a token's experts are divided by their sum
    unless norm_topk=0.

    Weights, with E experts of F hidden units: router.weight [E, D]; bias.weight [E] (buffer, float32); gate.weight,
    up.weight [E, F, D]; down.weight [E, D, F]; with `shared=N` shared.gate.weight, shared.up.weight [N F, D] and
    shared.down.weight [D, N F]; shared_gate.weight [1, D] (shared_gate=1).
    """

    projection = "down"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.experts, self.top_k = block.int("experts"), block.int("top_k")
        width = block.int("width")
        self.router = Linear(d_model, self.experts)
        self.bias = ExpertBias(self.experts)
        self.gate = ExpertLinear(self.experts, d_model, width)
        self.up = ExpertLinear(self.experts, d_model, width)
        self.down = ExpertLinear(self.experts, width, d_model, residual=True)
        # Side by side, several experts that every token passes are one of their joint width.
        self.shared = SwiGLU(_shared(block), d_model) if block.int("shared") else None
        self.shared_gate = Linear(d_model, 1) if block.get("shared_gate") else None
        self.softmax, self.norm_topk = bool(block.get("softmax")), bool(block.get("norm_topk"))

    def forward(self, x: Tensor) -> Tensor:
        y = self._routed(x)
        if self.shared is None:
            return y
        added: Tensor = self.shared(x)
        return y + (added if self.shared_gate is None else added * torch.sigmoid(self.shared_gate(x)))

    def _routed(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.route(tokens)
        seeds = len(self.router.weight) if self.router.weight.dim() == 3 else 0
        if seeds and x.is_cuda:
            return self._dense(tokens, weights, chosen).view(x.shape)
        if seeds:
            seed = torch.arange(seeds, device=x.device).repeat_interleave(len(tokens) // seeds)
            chosen = chosen + self.experts * seed[:, None]
        # Sorted by expert, the tokens of one expert are contiguous: one gather and one scatter, whatever the count.
        by_expert = chosen.flatten().argsort(stable=True)
        token = by_expert // self.top_k
        load = chosen.flatten().bincount(minlength=self.experts * max(seeds, 1))
        if self.training:
            self.bias.load += load.view_as(self.bias.load)
        parts = torch.split(tokens[token], load.tolist())
        experts = zip(self.gate.maps(), self.up.maps(), self.down.maps(), strict=True)
        outputs = torch.cat([_expert(part, *maps) for part, maps in zip(parts, experts, strict=True) if len(part)])
        outputs = outputs * weights.flatten()[by_expert, None].to(outputs.dtype)
        return torch.zeros_like(tokens, dtype=outputs.dtype).index_add(0, token, outputs).view(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and expert numbers, both [N, top_k], for tokens [N, D]."""
        scores = self.router(tokens)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.softmax(-1) if self.softmax else scores.sigmoid()
        chosen = (scores + for_examples(self.bias.weight, scores)).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if self.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if self.softmax else _NORM_EPS))
        return weights, chosen

    def _dense(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Computes every expert for every token: more work, but in three products and without waiting for a GPU.

        Takes the stacked weights of several seeds; rows are those of one seed after the other.
        """
        share = torch.zeros(len(tokens), self.experts, dtype=weights.dtype, device=tokens.device)
        share = share.scatter(-1, chosen, weights)
        if self.training:
            counts = torch.zeros_like(share).scatter(-1, chosen, 1.0)
            self.bias.load += counts.view(len(self.bias.load), -1, self.experts).sum(1)
        gate, up = (linear(tokens, experts.weight.flatten(-3, -2)) for experts in (self.gate, self.up))  # [N, E F]
        hidden = torch.unflatten(F.silu(gate) * up, -1, (self.experts, -1))
        down = self.down.weight.transpose(-3, -2).flatten(-2)  # [S, D, E F]
        return linear((hidden * share[..., None].to(hidden.dtype)).flatten(-2), down)

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Copies hidden units of each expert, and experts where there are more of them.

        Those no token chooses until balancing lets them in: two equal ones would take two places among the chosen.
        """
        a, b, small, start, width, rng = growing.a, growing.b, growing.small, growing.start, growing.width, growing.rng
        if a.int("top_k") != b.int("top_k"):
            raise CannotGrow("experts per token differ")
        if bool(a.int("shared")) != bool(b.int("shared")):
            raise CannotGrow("only one has shared experts")
        for name in ("softmax", "norm_topk", "shared_gate"):
            if a.get(name) != b.get(name):
                raise CannotGrow(f"{name} differs")
        if a.get("softmax") and not a.get("norm_topk") and a.int("experts") != b.int("experts"):
            raise CannotGrow("a softmax over more experts gives each less")
        old, new = a.int("experts"), b.int("experts")
        if new < old:
            raise CannotGrow(f"{new} experts have no room for {old}")
        units, experts = growing.hidden(), tiled(old, new)
        bias = small["bias.weight"][experts].clone()
        bias[old:] = small["bias.weight"].min() - 1.0  # scores are between 0 and 1
        router = growing.widened("router.weight", outputs=experts, inputs=width)
        router[old:] = start["router.weight"][old:]
        return {
            "router.weight": router,
            "bias.weight": bias,
            "gate.weight": widened(small["gate.weight"][experts], rng, outputs=units, inputs=width),
            "up.weight": widened(small["up.weight"][experts], rng, outputs=units, inputs=width),
            "down.weight": widened(small["down.weight"][experts], rng, outputs=width, inputs=units),
            **_grown_shared(growing),
        }


def _expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _shared(block: Block) -> Block:
    return Block.of("swiglu", width=block.int("shared") * block.int("width"))


def _grown_shared(growing: BlockGrowth) -> dict[str, Tensor]:
    if not growing.a.int("shared"):
        return {}
    place, gate = "shared.", "shared_gate.weight"
    gates = (
        {gate: growing.widened(gate, outputs=torch.arange(1), inputs=growing.width)} if gate in growing.small else {}
    )
    small, start = (
        {name.removeprefix(place): tensor for name, tensor in tensors.items() if name.startswith(place)}
        for tensors in (growing.small, growing.start)
    )
    part = replace(growing, a=_shared(growing.a), b=_shared(growing.b), small=small, start=start)
    return gates | {place + name: tensor for name, tensor in SwiGLU.grow(part).items()}


def balance_experts(model: nn.Module, rate: float) -> list[Tensor]:
    """Moves every expert bias of `model` by `rate` and resets the counted loads; called after each optimiser step.

    Returns:
        The tokens per expert [experts] that each mixture had counted, in the order of `model.modules()`.
    """
    loads = []
    for module in model.modules():
        if isinstance(module, ExpertBias):
            loads.append(module.load.clone())
            module.update(module.load, rate)
            module.load.zero_()
    return loads


def reference_moe(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes every expert for every token, masked down to the chosen ones: h and the output [T, D]."""
    logits = h @ weights["router.weight"].T
    soft = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    scores = soft if block.get("softmax") else 1 / (1 + torch.exp(-logits))
    ranks = (scores + weights["bias.weight"]).argsort(-1, descending=True).argsort(-1)
    chosen = torch.where(ranks < block.int("top_k"), scores, 0.0)
    share = chosen / (chosen.sum(-1, keepdim=True) + _NORM_EPS) if block.get("norm_topk") else chosen
    out = torch.zeros_like(h)
    for e in range(block.int("experts")):
        gate, up = h @ weights["gate.weight"][e].T, h @ weights["up.weight"][e].T
        out += share[:, e, None] * ((gate / (1 + torch.exp(-gate)) * up) @ weights["down.weight"][e].T)
    opening = 1 / (1 + torch.exp(-(h @ weights["shared_gate.weight"].T))) if block.get("shared_gate") else 1
    for e in range(block.int("shared")):
        rows = slice(e * block.int("width"), (e + 1) * block.int("width"))
        gate, up = h @ weights["shared.gate.weight"][rows].T, h @ weights["shared.up.weight"][rows].T
        out += opening * ((gate / (1 + torch.exp(-gate)) * up) @ weights["shared.down.weight"][:, rows].T)
    return out
