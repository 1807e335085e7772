"""Squared-ReLU feed-forward (So et al. 2021, "Primer")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.swiglu import DenseFeedForward


class SquaredReLU(DenseFeedForward):
    """W_down relu(W_up x)^2."""

    gated = False

    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)).square()


def reference_relu2(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the formula, one token at a time: h and the output [T, D], `weights` the module's state dict."""
    out = []
    for x in h:
        up = weights["up.weight"] @ x
        out.append(weights["down.weight"] @ torch.where(up > 0, up * up, 0.0))
    return torch.stack(out)
