"""SwiGLU feed-forward (Shazeer 2020, equation 6)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import FeedForward
from nas.model.nn.growth import BlockGrowth
from nas.model.nn.primitives import Linear


class DenseFeedForward(FeedForward):
    """W_down hidden(x), with `width` hidden units from one or two maps of x.

    Weights, with F hidden units: gate.weight [F, D] if `gated`; up.weight [F, D]; down.weight [D, F].

    Attributes:
        gated: whether there is a second map, `gate`, besides `up`.
    """

    projection = "down"
    stackable = True
    gated: ClassVar[bool]

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        width = block.int("width")
        if self.gated:
            self.gate = Linear(d_model, width)
        self.up = Linear(d_model, width)
        self.down = Linear(width, d_model, residual=True)

    @abstractmethod
    def hidden(self, x: Tensor) -> Tensor:
        """Returns the hidden units [B, T, width] of the normalised input [B, T, D]."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.hidden(x))
        return y

    @classmethod
    def grow(cls, growing: BlockGrowth) -> dict[str, Tensor]:
        """Copies hidden units, any number of times."""
        units, width = growing.hidden(), growing.width
        names = [name for name in ("gate.weight", "up.weight") if name in growing.small]
        return {
            **{name: growing.widened(name, outputs=units, inputs=width) for name in names},
            "down.weight": growing.widened("down.weight", outputs=width, inputs=units),
        }


class SwiGLU(DenseFeedForward):
    """W_down (silu(W_gate x) * W_up x)."""

    gated = True

    def hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.silu(self.gate(x)) * self.up(x)
        return hidden


def reference_swiglu(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the formula, one token at a time: h and the output [T, D], `weights` the module's state dict."""
    out = []
    for x in h:
        gate, up = weights["gate.weight"] @ x, weights["up.weight"] @ x
        swish = gate / (1 + torch.exp(-gate))
        out.append(weights["down.weight"] @ (swish * up))
    return torch.stack(out)
