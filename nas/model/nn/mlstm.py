"""mLSTM (Beck et al. 2024, "xLSTM"), with the layer of xLSTM 7B (Beck et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State, without_padding
from nas.model.nn.primitives import Linear, Weights, for_examples
from nas.model.nn.ssd import float32_at_least, ssd

_CAP = 15.0
"""Gates before their exponentials are at most this: so sums of them, in float32, need no running maximum."""
_EPS = 1e-5
_FORGET = (3.0, 6.0)
"""Biases that the first and the last head's forget gate start with, as in xLSTM 7B. Those of input gates start at zero:
at -10, as there, a mixer adds next to nothing until a long training has raised them."""


class MatrixLSTM(Mixer, Weights):
    """q, k, v = W_qkv h; out = W_out (norm(C q / max(|n q|, 1)) * sigmoid(W_gate h)).

    C <- f C + i v k^T and n <- f n + i k, with i = exp(cap(W_i h + b_i)) and f = sigmoid(cap(W_f h + b_f)) per head,
    where cap(x) = 15 tanh(x / 15); queries are divided by sqrt(N). The norm is LayerNorm by head without bias.

    State: (memory [B, H, P + 1, N],): C, and n in its last row; H heads with values of P and keys of N numbers.

    Weights: qkv.weight [2HN + HP, D], rows queries, keys, values; gates.weight [2H, D]; gate_bias [2H], input, then
    forget; gate.weight [HP, D]; norm_weight [HP]; out.weight [D, HP].
    """

    projection = "out"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.size, self.keys = (self.block.int(name) for name in ("heads", "head_dim", "key_dim"))
        inner = self.heads * self.size
        self.widths = [self.heads * self.keys, self.heads * self.keys, inner]
        self.qkv = Linear(d_model, sum(self.widths))
        self.gates = Linear(d_model, 2 * self.heads)
        self.gate_bias = nn.Parameter(torch.empty(2 * self.heads))
        self.gate = Linear(d_model, inner)
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.out = Linear(inner, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets biases of gates so that heads forget at several rates; the norm to one."""
        self.gate_bias.zero_()
        low, high = _FORGET
        self.gate_bias[self.heads :] = torch.linspace(low, high, self.heads)
        self.norm_weight.fill_(1.0)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.heads, self.size + 1, self.keys),)

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        parts = torch.split(self.qkv(x), self.widths, -1)
        q, k, v = (torch.unflatten(part, -1, (self.heads, -1)) for part in parts)
        (gates,) = float32_at_least(self.gates(x))
        gates = _CAP * torch.tanh((gates + for_examples(self.gate_bias, gates)) / _CAP)
        incoming, forget = gates.chunk(2, -1)
        # Padding: nothing decays, nothing comes in.
        incoming, log_decay = without_padding(incoming.exp(), padding), without_padding(F.logsigmoid(forget), padding)
        values = F.pad(v, (0, 1), value=1.0) * incoming[..., None]
        y, memory = ssd(values, log_decay, k, q * self.keys**-0.5, state[0])
        y = y[..., :-1] / y[..., -1:].abs().clamp(min=1.0)
        normed = F.layer_norm(y, (self.size,), eps=_EPS).flatten(2)
        normed = normed * for_examples(self.norm_weight, normed)
        out: Tensor = self.out((normed * self.gate(x).sigmoid()).to(x.dtype))
        return out, (memory,)


def reference_mlstm(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes equations 19 to 27 of the xLSTM paper with its running maximum, one token and one head at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    heads, size, keys = (block.int(name) for name in ("heads", "head_dim", "key_dim"))
    q, k, v = torch.split(h @ weights["qkv.weight"].T, [heads * keys, heads * keys, heads * size], -1)
    gates = 15 * torch.tanh((h @ weights["gates.weight"].T + weights["gate_bias"]) / 15)
    gate = torch.sigmoid(h @ weights["gate.weight"].T)
    y = torch.zeros(len(h), heads, size, dtype=h.dtype)
    for head in range(heads):
        rows, key = slice(head * size, (head + 1) * size), slice(head * keys, (head + 1) * keys)
        memory, total = torch.zeros(size, keys, dtype=h.dtype), torch.zeros(keys, dtype=h.dtype)
        greatest = torch.tensor(0.0, dtype=h.dtype)
        for t in range(len(h)):
            incoming, forget = gates[t, head], F.logsigmoid(gates[t, heads + head])
            before, greatest = greatest, torch.maximum(forget + greatest, incoming)
            i, f = torch.exp(incoming - greatest), torch.exp(forget + before - greatest)
            memory = f * memory + i * torch.outer(v[t, rows], k[t, key])
            total = f * total + i * k[t, key]
            query = q[t, key] / keys**0.5
            y[t, head] = memory @ query / (torch.maximum((total @ query).abs(), torch.exp(-greatest)))
    centred = y - y.mean(-1, keepdim=True)
    normed = (centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weights["norm_weight"]
    return (normed * gate) @ weights["out.weight"].T
