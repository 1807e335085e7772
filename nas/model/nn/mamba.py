"""Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State, without_padding
from nas.model.nn.convolved import Convolved
from nas.model.nn.mamba2 import draw_steps
from nas.model.nn.primitives import Linear, Weights, for_examples, reference_conv
from nas.model.nn.ssd import float32_at_least


class Mamba(Convolved, Weights):
    """x, z = W_in h; x = silu(conv(x)); dt, B, C = W_x x; out = W_out (silu(z) * (SSM(x, B, C, step) + D x)).

    Step sizes are softplus(W_dt dt + dt_bias), one of each channel; decays exp(-step exp(A_log)).

    State: (window [B, K - 1, I], if there is a convolution; memory [B, I, N]): its last inputs, oldest first, and what
    the channels remember; I inner width, N state, K taps, R rank.

    Weights: in_proj.weight [2I, D], rows x, z; conv.weight [I, K]; conv.bias [I]; x_proj.weight [R + 2N, I], rows dt,
    B, C; dt_proj.weight [I, R]; dt_bias, D [I]; A_log [I, N]; out.weight [D, I].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.inner = self.block.int("expand") * d_model
        self.state_size, self.rank = self.block.int("state"), self.block.int("rank")
        self.in_proj = Linear(d_model, 2 * self.inner)
        self.add_taps(self.inner, bias=True)
        self.x_proj = Linear(self.inner, self.rank + 2 * self.state_size)
        self.dt_proj = Linear(self.rank, self.inner)
        self.dt_bias = nn.Parameter(torch.empty(self.inner))
        self.A_log = nn.Parameter(torch.empty(self.inner, self.state_size))
        self.D = nn.Parameter(torch.empty(self.inner))
        self.out = Linear(self.inner, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Draws step sizes log-uniform; sets decay rates to 1, 2, ..., N (S4D-Real) and D to one."""
        draw_steps(self.dt_bias, rng)
        self.A_log.copy_(torch.arange(1, self.state_size + 1, dtype=torch.float64).log().expand_as(self.A_log))
        self.D.fill_(1.0)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.inner, self.state_size))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        u, gate = self.in_proj(x).chunk(2, -1)
        u, window = self.convolved(u, state, padding)
        u = F.silu(u)
        low, b, c = torch.split(self.x_proj(u), [self.rank, self.state_size, self.state_size], -1)
        step = self.dt_proj(low)
        # Padding: a step of no length.
        step = without_padding(F.softplus(step + for_examples(self.dt_bias, step)), padding)
        rate = torch.unflatten(for_examples(self.A_log.exp().flatten(-2), u), -1, (self.inner, self.state_size))
        y, memory = selective_scan(u, step, rate, b, c, state[-1])
        out: Tensor = self.out((y + u * for_examples(self.D, u)) * F.silu(gate))
        return out, (*window, memory)


def selective_scan(
    u: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over a sequence, token by token: each state of each channel has a decay of its own.

        memory <- exp(-step rate) memory + step u b^T       y = memory c

    Computed in float32 at least. No form in chunks is products of matrices, and one that is stable for any step size
    takes as much memory for each pair of tokens as this one for each token.

    Args:
        u: [B, T, I].
        step: at least 0 [B, T, I].
        rate: above 0 [I, N], or [B, 1, I, N].
        b: [B, T, N].
        c: [B, T, N].
        memory: before the first token [B, I, N].

    Returns:
        y [B, T, I], of u's type, and the memory after the last token, float32 at least.
    """
    kind = u.dtype
    with torch.autocast(u.device.type, enabled=False):
        u, step, rate, b, c, memory = float32_at_least(u, step, rate, b, c, memory)
        decays = (-step[..., None] * rate).exp()
        added = (step * u)[..., None] * b[:, :, None]
        memories = []
        for decay, add in zip(decays.unbind(1), added.unbind(1), strict=True):
            memory = torch.addcmul(add, decay, memory)
            memories.append(memory)
        y = (torch.stack(memories, 1) @ c[..., None])[..., 0]
    return y.to(kind), memory


def reference_mamba(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes algorithm 2 of the paper in the layer of its section 3.4, one token and one channel at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    state, rank = block.int("state"), block.int("rank")
    x, z = (h @ weights["in_proj.weight"].T).chunk(2, -1)
    if block.int("conv"):
        x = reference_conv(weights["conv.weight"], x) + weights["conv.bias"]
    x = x * torch.sigmoid(x)
    low, b, c = torch.split(x @ weights["x_proj.weight"].T, [rank, state, state], -1)
    step = torch.log1p(torch.exp(low @ weights["dt_proj.weight"].T + weights["dt_bias"]))
    y = torch.zeros_like(x)
    for channel in range(x.shape[1]):
        memory, rate = h.new_zeros(state), torch.exp(weights["A_log"][channel])
        for t in range(len(h)):
            decay = torch.exp(-step[t, channel] * rate)
            memory = decay * memory + step[t, channel] * b[t] * x[t, channel]
            y[t, channel] = memory @ c[t] + weights["D"][channel] * x[t, channel]
    return (y * z * torch.sigmoid(z)) @ weights["out.weight"].T
