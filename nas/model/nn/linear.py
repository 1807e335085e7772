"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Padding, State, without_padding
from nas.model.nn.convolved import Convolved
from nas.model.nn.primitives import Linear, reference_conv
from nas.model.nn.ssd import ssd

_EPS = 1e-6
"""Least sum that what is read is divided by."""


class ConvolvedHeads(Convolved):
    """Queries, keys and values of heads, from one projection and, where the block has taps, a causal convolution.

    State: (window [B, K - 1, 3HN], if there is a convolution; memory): its last inputs, oldest first.

    Weights: qkv.weight [3HN, D], rows queries, keys, values; conv.weight [3HN, K], with a convolution; out.weight
    [D, HN]; H heads of N numbers.
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.size = self.block.int("heads"), self.block.int("head_dim")
        self.inner = self.heads * self.size
        self.qkv = Linear(d_model, 3 * self.inner)
        self.add_taps(3 * self.inner)
        self.out = Linear(self.inner, d_model, residual=True)

    def by_head(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Maps [B, T, 3HN] -> queries, keys and values [B, T, H, N]."""
        return tuple(torch.unflatten(part, -1, (self.heads, self.size)) for part in mixed.chunk(3, -1))


class LinearAttention(ConvolvedHeads):
    """q, k, v = W_qkv h; out = W_out (S f(q) / (z f(q))), where S <- S + v f(k)^T, z <- z + f(k), f(x) = elu(x) + 1.

    Memory: S, and z in its last row [B, H, N + 1, N].
    """

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.heads, self.size + 1, self.size))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        mixed, window = self.convolved(self.qkv(x), state, padding)
        q, k, v = self.by_head(mixed)
        keys = without_padding(F.elu(k) + 1, padding)
        values = F.pad(v, (0, 1), value=1.0)
        if v.dtype == torch.float16:  # whose range sums over a thousand tokens exceed
            values = values.float()
        y, memory = ssd(values, torch.zeros_like(v[..., 0]), keys, F.elu(q) + 1, state[-1])
        out: Tensor = self.out((y[..., :-1] / y[..., -1:].clamp(min=_EPS)).flatten(2).to(v.dtype))
        return out, (*window, memory)


def reference_heads(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Returns queries, keys and values of each token [T, 3, H, N]."""
    mixed = h @ weights["qkv.weight"].T
    if block.int("conv"):
        mixed = reference_conv(weights["conv.weight"], mixed)
    return mixed.view(len(h), 3, block.int("heads"), block.int("head_dim"))


def reference_linear(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes equations 16 to 20 of Katharopoulos et al., one token and one head at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    mixed = reference_heads(block, weights, h)
    positive = torch.where(mixed > 0, mixed + 1, mixed.exp())
    size, y = block.int("head_dim"), torch.zeros_like(mixed[:, 0])
    for head in range(block.int("heads")):
        memory, total = h.new_zeros(size, size), h.new_zeros(size)  # keys by values; keys
        for t in range(len(h)):
            query, key = positive[t, 0, head], positive[t, 1, head]
            memory = memory + torch.outer(key, mixed[t, 2, head])
            total = total + key
            y[t, head] = (query @ memory) / (query @ total)
    return y.flatten(1) @ weights["out.weight"].T
