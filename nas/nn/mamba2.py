"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a selective state-space mixer with one decay per head."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.blocks.mamba2 import convolved
from nas.core.block import Block
from nas.nn.base import Mixer, State
from nas.nn.primitives import DepthwiseConv, Linear, RMSNorm, Weights
from nas.nn.ssd import ssd

_STEP = (1e-3, 1e-1)
_RATE = (1.0, 16.0)
"""Ranges that step sizes and decay rates start in: those of the published models."""


class GroupedRMSNorm(RMSNorm):
    """RMSNorm over each of `groups` equal parts of the last dimension; `weight` [width]."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__(width)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], in the weight's precision."""
        parts = torch.unflatten(x.to(self.weight.dtype), -1, (self.groups, -1))
        return F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.weight


class Mamba2(Mixer, Weights):
    """z, x, B, C, dt = W_in h; x, B, C = silu(conv(x, B, C)); out = W_out norm(silu(z) * (SSM(x, B, C, dt) + D x)).

    Step sizes are softplus(dt + dt_bias), decays exp(-step * exp(A_log)), one of each per head and token.

    State: (window [B, K - 1, I + 2 G N], memory [B, H, P, N]): the convolution's last inputs, oldest first, and what
    the heads remember; I inner width, H heads of size P = I / H, G groups, N state, K taps.
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.groups = self.block.int("heads"), self.block.int("groups")
        self.inner, self.state_size = self.block.int("expand") * d_model, self.block.int("state")
        mixed = convolved(self.block, d_model)
        self.widths = [self.inner, mixed, self.heads]
        self.in_proj = Linear(d_model, sum(self.widths))
        self.conv = DepthwiseConv(mixed, self.block.int("conv"), bias=True)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = GroupedRMSNorm(self.inner, self.groups)
        self.out = Linear(self.inner, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Step sizes log-uniform, decay rates uniform, D one.

        Logarithms are taken in double precision: what differs there between platforms is gone in single precision.
        """
        low, high = map(math.log, _STEP)
        step = torch.empty(self.heads, dtype=torch.float64).uniform_(low, high, generator=rng).exp()
        self.dt_bias.copy_(step.expm1().log())  # the inverse of softplus
        self.A_log.copy_(torch.empty(self.heads, dtype=torch.float64).uniform_(*_RATE, generator=rng).log())
        self.D.fill_(1.0)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """Zeros: before the first token the convolution sees nothing and the heads remember nothing."""
        window = torch.zeros(batch, self.conv.kernel - 1, self.widths[1], dtype=dtype, device=device)
        memory = torch.zeros(batch, self.heads, self.inner // self.heads, self.state_size, dtype=dtype, device=device)
        return window, memory

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        past, memory = state or self.init_state(len(x), x.dtype, x.device)
        gate, mixed, step = torch.split(self.in_proj(x), self.widths, -1)
        window = torch.cat([past, mixed], 1)
        value, b, c = self._split(F.silu(self.conv(window)))
        step = F.softplus(step + self.dt_bias)
        y, memory = ssd(value * step[..., None], -step * self.A_log.exp(), b, c, memory)
        y = (y + value * self.D[:, None]).flatten(2)
        out: Tensor = self.out(self.norm(y * F.silu(gate)))
        return out, (window[:, x.shape[1] :], memory)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, I + 2 G N] -> values [B, T, H, P], B and C [B, T, G, N]."""
        shared = self.groups * self.state_size
        value, b, c = torch.split(mixed, [self.inner, shared, shared], -1)
        b, c = (torch.unflatten(part, -1, (self.groups, self.state_size)) for part in (b, c))
        return torch.unflatten(value, -1, (self.heads, -1)), b, c


def reference_mamba2(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """The recurrence, one token and one head at a time.

    Args:
        block: the block, resolved.
        weights: the module's state dict.
        h: one sequence [T, D].

    Returns:
        The output [T, D].
    """
    heads, groups, state = block.int("heads"), block.int("groups"), block.int("state")
    inner = block.int("expand") * h.shape[1]
    shared = groups * state
    z, mixed, dt = torch.split(h @ weights["in_proj.weight"].T, [inner, inner + 2 * shared, heads], -1)
    x, b, c = torch.split(_reference_conv(block, weights, mixed), [inner, shared, shared], -1)
    y = torch.zeros_like(x)
    size = inner // heads
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        group = head // (heads // groups)
        part = slice(group * state, (group + 1) * state)
        memory = torch.zeros(size, state, dtype=h.dtype)
        for t in range(len(h)):
            step = torch.log1p(torch.exp(dt[t, head] + weights["dt_bias"][head]))
            # Equation 2 with A_t = exp(step A), one number per head, and B_t = step B (section 7; Gu and Dao 2023).
            decay = torch.exp(-step * torch.exp(weights["A_log"][head]))
            memory = decay * memory + step * torch.outer(x[t, own], b[t, part])
            y[t, own] = memory @ c[t, part] + weights["D"][head] * x[t, own]
    gated = (y * z * torch.sigmoid(z)).view(len(h), groups, -1)
    normed = gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return (normed.flatten(1) * weights["norm.weight"]) @ weights["out.weight"].T


def _reference_conv(block: Block, weights: Mapping[str, Tensor], mixed: Tensor) -> Tensor:
    kernel = block.int("conv")
    z = weights["conv.bias"].repeat(len(mixed), 1)
    for t in range(len(mixed)):
        for lag in range(min(kernel, t + 1)):
            z[t] += weights["conv.weight"][:, kernel - 1 - lag] * mixed[t - lag]
    return z * torch.sigmoid(z)
