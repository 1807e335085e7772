"""Mixers with an optional short causal convolution in front."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.primitives import DepthwiseConv, reference_conv


class ConvolvedInput(Mixer):
    """A mixer whose input u is silu(conv(x)) where the block has taps (`conv`), and x where it has none.

    State: (window [B, K - 1, D], if there is a convolution; ...): its last inputs, oldest first.

    Weights: conv.weight [D, K], with a convolution.
    """

    projection = "out"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.taps = self.block.int("conv")
        if self.taps:
            self.conv = DepthwiseConv(d_model, self.taps)

    def window_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of the convolution's state, if there is one."""
        return ((self.taps - 1, self.d_model),) if self.taps else ()

    def convolved(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        """Returns u [B, T, D], and the convolution's state after the chunk."""
        if not self.taps:
            return x, ()
        window = torch.cat([state[0], x], 1)
        return F.silu(self.conv(window)), (self.conv.last_rows(window, padding),)


def reference_input(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Returns u [T, D] of one sequence, one token and one tap at a time."""
    if not block.int("conv"):
        return h
    u = reference_conv(weights["conv.weight"], h)
    return u * torch.sigmoid(u)
