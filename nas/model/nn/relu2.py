"""Squared-ReLU feed-forward (So et al. 2021, "Primer")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import FeedForward
from nas.model.nn.growth import BlockGrowth
from nas.model.nn.primitives import Linear


class SquaredReLU(FeedForward):
    """W_down relu(W_up x)^2."""

    projection = "down"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        width = block.int("width")
        self.up = Linear(d_model, width)
        self.down = Linear(width, d_model, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)).square())
        return y

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Copies hidden units, any number of times."""
        units = growing.hidden()
        return {
            "up.weight": growing.widened("up.weight", outputs=units, inputs=growing.width),
            "down.weight": growing.widened("down.weight", outputs=growing.width, inputs=units),
        }


def reference_relu2(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the formula, one token at a time: h and the output [T, D], `weights` the module's state dict."""
    out = []
    for x in h:
        up = weights["up.weight"] @ x
        out.append(weights["down.weight"] @ torch.where(up > 0, up * up, 0.0))
    return torch.stack(out)
