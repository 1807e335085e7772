"""Gated short convolution (LFM2 report, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.growth import BlockGrowth, CannotGrow
from nas.model.nn.primitives import DepthwiseConv, Linear, reference_conv


class GatedShortConv(Mixer):
    """(B, C, x) = W_in h; o = W_out (C * conv_k(B * x)).

    State: (window [B, K - 1, D],), the last K - 1 products B * x, oldest first.

    Weights: in_proj.weight [3D, D], rows B, then C, then x; conv.weight [D, K], last tap for the current token;
    out.weight [D, D].
    """

    projection = "out"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.in_proj = Linear(d_model, 3 * d_model)
        self.conv = DepthwiseConv(d_model, block.int("kernel"))
        self.out = Linear(d_model, d_model, residual=True)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.conv.kernel - 1, self.d_model),)

    def one_way(self) -> str:
        return "" if self.conv.kernel % 2 else f"convolutions of {self.conv.kernel} taps, which have no middle"

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        gate_in, gate_out, value = self.in_proj(x).chunk(3, -1)
        gated = gate_in * value
        if self.both_ways:
            sides = self.conv.kernel // 2
            both: Tensor = self.out(gate_out * self.conv(F.pad(gated, (0, 0, sides, sides))))
            return both, state
        window = torch.cat([state[0].to(gated.dtype), gated], 1)
        y: Tensor = self.out(gate_out * self.conv(window))
        return y, (self.conv.last_rows(window, padding),)

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Channels are copied; taps that were not there are zero."""
        a, b, small, width = growing.a, growing.b, growing.small, growing.width
        old, new = a.int("kernel"), b.int("kernel")
        if new < old:
            raise CannotGrow(f"a kernel of {new} taps cannot hold {old}")
        rows = torch.cat([width + part * (int(width.max()) + 1) for part in range(3)])
        taps = F.pad(small["conv.weight"][width], (new - old, 0))
        return {
            "in_proj.weight": growing.widened("in_proj.weight", outputs=rows, inputs=width),
            "conv.weight": taps,
            "out.weight": growing.widened("out.weight", outputs=width, inputs=width),
        }


def reference_gated_short_conv(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the formula of section 2.2 of the report, one token and one tap at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    gate_in, gate_out, value = (h @ weights["in_proj.weight"].T).chunk(3, -1)
    z = reference_conv(weights["conv.weight"], gate_in * value)
    return (gate_out * z) @ weights["out.weight"].T
