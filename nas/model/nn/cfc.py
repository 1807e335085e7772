"""CfC (Hasani et al. 2022, "Closed-form continuous-time neural networks")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Padding, State
from nas.model.nn.convolved import ConvolvedInput, reference_input
from nas.model.nn.primitives import Linear


class CfC(ConvolvedInput):
    """z = l(W_in u + W_hidden h + bias); f, g, s = W_heads z + bias; h <- tanh(f) sigmoid(-s) + tanh(g) sigmoid(s).

    The paper's closed form with a gate in place of the decay, and l(x) = 1.7159 tanh(0.666 x), as in the authors' code.
    Its time t between tokens is 1, so that the two maps of the gate, one of them times t, are one map. Each token's h
    depends on the last one through a hidden layer: there is no form that computes tokens at once.

    Memory: h [B, N]. Further weights: input.weight [U, D], input.bias [U]; hidden.weight [U, N]; heads.weight [3N, U],
    rows f, g, s; heads.bias [3N]; out.weight [D, N].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.size, units = self.block.int("state"), self.block.int("units")
        self.input = Linear(d_model, units, bias=True)
        self.hidden = Linear(self.size, units)
        self.heads = Linear(units, 3 * self.size, bias=True)
        self.out = Linear(self.size, d_model, residual=True)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.size,))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        u, window = self.convolved(x, state, padding)
        entries: Tensor = self.input(u)
        text = None if padding is None else padding.text[:, -x.shape[1] :, None]
        h, outputs = state[-1], []
        for t, entry in enumerate(entries.unbind(1)):
            z = 1.7159 * torch.tanh(0.666 * (entry + self.hidden(h)))
            f, g, s = self.heads(z).chunk(3, -1)
            after = torch.lerp(torch.tanh(f), torch.tanh(g), torch.sigmoid(s))
            h = after if text is None else torch.where(text[:, t], after, h)
            outputs.append(h)
        out: Tensor = self.out(torch.stack(outputs, 1))
        return out, (*window, h)


def reference_cfc(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes x(t) = s(-f t) g + (1 - s(-f t)) h of the paper at t = 1 behind a hidden layer, one token at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    inputs, rows = reference_input(block, weights, h), []
    hidden = h.new_zeros(block.int("state"))
    joint = torch.cat([weights["input.weight"], weights["hidden.weight"]], 1)
    for u in inputs:
        z = 1.7159 * torch.tanh(0.666 * (joint @ torch.cat([u, hidden]) + weights["input.bias"]))
        f, g, s = (weights["heads.weight"] @ z + weights["heads.bias"]).chunk(3)
        gate = 1 / (1 + torch.exp(s))
        hidden = gate * torch.tanh(f) + (1 - gate) * torch.tanh(g)
        rows.append(weights["out.weight"] @ hidden)
    return torch.stack(rows)
