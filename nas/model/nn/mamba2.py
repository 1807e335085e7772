"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a selective state-space mixer with one decay per head."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State, without_padding
from nas.model.nn.convolved import Convolved
from nas.model.nn.growth import BlockGrowth, CannotGrow, tiled, units
from nas.model.nn.primitives import Linear, RMSNorm, Weights, for_examples, reference_conv
from nas.model.nn.ssd import ssd

_STEP = (1e-3, 1e-1)
_RATE = (1.0, 16.0)
"""Ranges that step sizes and decay rates start in: those of the published models."""


@torch.no_grad()
def draw_steps(dt_bias: Tensor, rng: torch.Generator) -> None:
    """Draws step sizes softplus(dt_bias) log-uniform.

    Logarithms are taken in double precision: what differs there between platforms is gone in single precision.
    """
    low, high = map(math.log, _STEP)
    step = torch.empty(len(dt_bias), dtype=torch.float64).uniform_(low, high, generator=rng).exp()
    dt_bias.copy_(step.expm1().log())  # the inverse of softplus


@torch.no_grad()
def draw_decays(dt_bias: Tensor, a_log: Tensor, rng: torch.Generator) -> None:
    """Draws step sizes, and decay rates uniform, for decays exp(-softplus(dt_bias) exp(a_log))."""
    draw_steps(dt_bias, rng)
    a_log.copy_(torch.empty(len(a_log), dtype=torch.float64).uniform_(*_RATE, generator=rng).log())


class GroupedRMSNorm(RMSNorm):
    """RMSNorm over each of `groups` equal parts of the last dimension; `weight` [width]."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__(width)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., width] -> [..., width], in the weight's precision."""
        parts = torch.unflatten(x.to(self.weight.dtype), -1, (self.groups, -1))
        return F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * for_examples(self.weight, x)


class Mamba2(Convolved, Weights):
    """z, x, B, C, dt = W_in h; x, B, C = silu(conv(x, B, C)); out = W_out norm(silu(z) * (SSM(x, B, C, dt) + D x)).

    The norm may be left out (norm=0).

    Step sizes are softplus(dt + dt_bias), decays exp(-step * exp(A_log)), one of each per head and token.

    State: (window [B, K - 1, I + 2 G N], if there is a convolution; memory [B, H, P, N]): its last inputs, oldest
    first, and what the heads remember; I inner width, H heads of size P = I / H, G groups, N state, K taps.

    Weights: in_proj.weight [2I + 2GN + H, D], rows z, x, B, C, dt; conv.weight [I + 2GN, K]; conv.bias [I + 2GN];
    dt_bias, A_log, D [H]; norm.weight [I] (norm=1); out.weight [D, I]. Groups are stored one after another.
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.groups = self.block.int("heads"), self.block.int("groups")
        self.inner = self.block.int("inner") or self.block.int("expand") * d_model
        self.state_size = self.block.int("state")
        mixed = self.inner + 2 * self.groups * self.state_size
        self.widths = [self.inner, mixed, self.heads]
        self.in_proj = Linear(d_model, sum(self.widths))
        self.add_taps(mixed, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = GroupedRMSNorm(self.inner, self.groups) if self.block.get("norm") else nn.Identity()
        self.out = Linear(self.inner, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Draws step sizes and decay rates; sets D to one."""
        draw_decays(self.dt_bias, self.A_log, rng)
        self.D.fill_(1.0)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.heads, self.inner // self.heads, self.state_size))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        gate, mixed, step = torch.split(self.in_proj(x), self.widths, -1)
        mixed, window = self.convolved(mixed, state, padding)
        value, b, c = self._split(F.silu(mixed))
        rate, skip = for_examples(self.A_log.exp(), step), for_examples(self.D, step)
        # Padding: a step of no length.
        step = without_padding(F.softplus(step + for_examples(self.dt_bias, step)), padding)
        y, memory = ssd(value * step[..., None], -step * rate, b, c, state[-1])
        y = (y + value * skip[..., None]).flatten(2)
        out: Tensor = self.out(self.norm(y * F.silu(gate)))
        return out, (*window, memory)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps [B, T, I + 2 G N] -> values [B, T, H, P], B and C [B, T, G, N]."""
        shared = self.groups * self.state_size
        value, b, c = torch.split(mixed, [self.inner, shared, shared], -1)
        b, c = (torch.unflatten(part, -1, (self.groups, self.state_size)) for part in (b, c))
        return torch.unflatten(value, -1, (self.heads, -1)), b, c

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Heads and the channels of each are copied.

        Channels of a head share its decay, B and C, and meet nowhere else.
        """
        a, b, small, start, width = growing.a, growing.b, growing.small, growing.start, growing.width
        for name in ("state", "groups", "expand", "norm"):
            if a.int(name) != b.int(name):
                raise CannotGrow(f"{name} differs")
        if a.int("groups") > 1:
            raise CannotGrow("groups of heads have no order that copies keep")
        old, new = a.int("conv"), b.int("conv")
        h, heads = a.int("heads"), b.int("heads")
        inner, wide = small["out.weight"].shape[1], start["out.weight"].shape[1]
        if (old == 0) != (new == 0):
            raise CannotGrow("only one of them has a convolution")
        if new < old or heads % h or wide % heads or (wide // heads) % (inner // h):
            raise CannotGrow(
                f"{heads} heads of {wide // heads} channels and {new} taps are no multiple of {h}, {inner // h}, {old}"
            )
        head = tiled(h, heads)
        channels = units(head, tiled(inner // h, wide // heads), inner // h)
        shared = torch.arange(2 * a.int("state"))  # B and C
        mixed = torch.cat([channels, shared + inner])
        rows = torch.cat([channels, mixed + inner, head + 2 * inner + len(shared)])
        return {
            "in_proj.weight": growing.widened("in_proj.weight", outputs=rows, inputs=width),
            **(
                {
                    "conv.weight": F.pad(small["conv.weight"][mixed], (new - old, 0)),
                    "conv.bias": small["conv.bias"][mixed],
                }
                if new
                else {}
            ),
            "dt_bias": small["dt_bias"][head],
            "A_log": small["A_log"][head],
            "D": small["D"][head],
            **({"norm.weight": small["norm.weight"][channels]} if a.get("norm") else {}),
            "out.weight": growing.widened("out.weight", outputs=width, inputs=channels),
        }


def reference_mamba2(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the recurrence, one token and one head at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    heads, groups, state = block.int("heads"), block.int("groups"), block.int("state")
    inner = weights["out.weight"].shape[1]
    shared = groups * state
    z, mixed, dt = torch.split(h @ weights["in_proj.weight"].T, [inner, inner + 2 * shared, heads], -1)
    if block.int("conv"):
        mixed = reference_conv(weights["conv.weight"], mixed) + weights["conv.bias"]
    x, b, c = torch.split(mixed * torch.sigmoid(mixed), [inner, shared, shared], -1)
    y = torch.zeros_like(x)
    size = inner // heads
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        group = head // (heads // groups)
        part = slice(group * state, (group + 1) * state)
        memory = torch.zeros(size, state, dtype=h.dtype)
        for t in range(len(h)):
            step = torch.log1p(torch.exp(dt[t, head] + weights["dt_bias"][head]))
            # Equation 2 with A_t = exp(step A), one number per head, and B_t = step B (section 7; Gu and Dao 2023).
            decay = torch.exp(-step * torch.exp(weights["A_log"][head]))
            memory = decay * memory + step * torch.outer(x[t, rows], b[t, part])
            y[t, rows] = memory @ c[t, part] + weights["D"][head] * x[t, rows]
    gated = (y * z * torch.sigmoid(z)).view(len(h), groups, -1)
    if block.get("norm"):
        gated = gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        gated = gated * weights["norm.weight"].view(groups, -1)
    return gated.flatten(1) @ weights["out.weight"].T
