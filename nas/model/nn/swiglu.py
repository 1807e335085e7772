"""SwiGLU feed-forward (Shazeer 2020, equation 6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import FeedForward
from nas.model.nn.growth import BlockGrowth
from nas.model.nn.primitives import Linear


class SwiGLU(FeedForward):
    """W_down (silu(W_gate x) * W_up x)."""

    projection = "down"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        width = block.int("width")
        self.gate = Linear(d_model, width)
        self.up = Linear(d_model, width)
        self.down = Linear(width, d_model, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Copies hidden units, any number of times."""
        width = growing.width
        units = growing.hidden()
        return {
            "gate.weight": growing.widened("gate.weight", outputs=units, inputs=width),
            "up.weight": growing.widened("up.weight", outputs=units, inputs=width),
            "down.weight": growing.widened("down.weight", outputs=width, inputs=units),
        }


def reference_swiglu(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the formula, one token at a time: h and the output [T, D], `weights` the module's state dict."""
    out = []
    for x in h:
        gate, up = weights["gate.weight"] @ x, weights["up.weight"] @ x
        swish = gate / (1 + torch.exp(-gate))
        out.append(weights["down.weight"] @ (swish * up))
    return torch.stack(out)
