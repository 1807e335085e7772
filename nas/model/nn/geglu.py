"""GEGLU feed-forward (Shazeer 2020, equation 6) with GELU's approximation by tanh (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.swiglu import DenseFeedForward


class GeGLU(DenseFeedForward):
    """W_down (gelu(W_gate x) * W_up x)."""

    gated = True

    def hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.gelu(self.gate(x), approximate="tanh") * self.up(x)
        return hidden


def reference_geglu(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the formula, one token at a time: h and the output [T, D], `weights` the module's state dict."""
    out = []
    for x in h:
        gate, up = weights["gate.weight"] @ x, weights["up.weight"] @ x
        bell = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        out.append(weights["down.weight"] @ (bell * up))
    return torch.stack(out)
