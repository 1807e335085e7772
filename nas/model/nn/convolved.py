"""Mixers with an optional short causal convolution in front."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.primitives import DepthwiseConv, reference_conv


class Convolved(Mixer):
    """A mixer with a causal convolution of some channels where the block has taps (`conv`).

    State: (window [B, K - 1, C], if there is a convolution; ...): its last inputs, oldest first; C channels, K taps.

    Weights: conv.weight [C, K], conv.bias [C] if asked for, with a convolution.
    """

    projection = "out"
    stackable = True

    def add_taps(self, channels: int, *, bias: bool = False) -> None:
        """Adds the convolution of the block, if it has one."""
        self.taps, self.channels = self.block.int("conv"), channels
        if self.taps:
            self.conv = DepthwiseConv(channels, self.taps, bias=bias)

    def window_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of the convolution's state, if there is one."""
        return ((self.taps - 1, self.channels),) if self.taps else ()

    def convolved(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        """Maps [B, T, C] -> [B, T, C], and returns the convolution's state after the chunk."""
        if not self.taps:
            return x, ()
        window = torch.cat([state[0], x], 1)
        return self.conv(window), (self.conv.last_rows(window, padding),)


class ConvolvedInput(Convolved):
    """A mixer whose input u [B, T, D] is silu(conv(x)) where the block has taps, and x where it has none."""

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.add_taps(d_model)

    def convolved(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        u, window = super().convolved(x, state, padding)
        return F.silu(u) if self.taps else u, window


def reference_input(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Returns u [T, D] of one sequence, one token and one tap at a time."""
    if not block.int("conv"):
        return h
    u = reference_conv(weights["conv.weight"], h)
    return u * torch.sigmoid(u)
