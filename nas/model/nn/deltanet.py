"""DeltaNet (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Padding, State, without_padding
from nas.model.nn.gdn import delta_rule, unit_length
from nas.model.nn.linear import ConvolvedHeads, reference_heads
from nas.model.nn.primitives import Linear, RMSNorm


class DeltaNet(ConvolvedHeads):
    """q, k, v = silu(conv(W_qkv h)); out = W_out norm(delta(q, k, v, beta)), with beta = sigmoid(W_beta h) per head.

    Queries and keys have length 1; queries are divided by sqrt(N). beta is how much of what a memory has for a key is
    replaced (`nas.model.nn.gdn.delta_rule`, without decay).

    Memory: from keys to values [B, H, N, N]. Further weights: beta.weight [H, D]; norm.weight [N].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.beta = Linear(d_model, self.heads)
        self.norm = RMSNorm(self.size)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.heads, self.size, self.size))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        mixed, window = self.convolved(self.qkv(x), state, padding)
        q, k, v = self.by_head(F.silu(mixed))
        beta = without_padding(self.beta(x).sigmoid(), padding)
        q = unit_length(q) * self.size**-0.5
        y, memory = delta_rule(q, unit_length(k), v, torch.zeros_like(beta), beta, state[-1])
        out: Tensor = self.out(self.norm(y).flatten(2))
        return out, (*window, memory)


def reference_deltanet(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes equation 4 of Yang et al. 2024 with the layer of its section 3.3, one token and one head at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    mixed = reference_heads(block, weights, h)
    mixed = mixed * torch.sigmoid(mixed)
    beta = torch.sigmoid(h @ weights["beta.weight"].T)
    size, y = block.int("head_dim"), torch.zeros_like(mixed[:, 0])
    for head in range(block.int("heads")):
        memory = h.new_zeros(size, size)  # values by keys
        for t in range(len(h)):
            q, k, v = mixed[t, :, head]
            q, k = (part / (part @ part + 1e-6).sqrt() for part in (q, k))
            memory = memory - beta[t, head] * torch.outer(memory @ k - v, k)
            y[t, head] = memory @ q / size**0.5
    normed = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights["norm.weight"]
    return normed.flatten(1) @ weights["out.weight"].T
