"""What the kinds compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.nn.base import FeedForward, Mixer, State
from nas.nn.growth import BlockGrowth
from nas.nn.primitives import Linear


class SquaredReLU(FeedForward):
    """W_down max(0, W_up x)^2."""

    projection = "down"
    release_code = "hilnas_plugin.released:SquaredReLU"

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.up = Linear(d_model, block.int("width"))
        self.down = Linear(block.int("width"), d_model, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)).square())
        return y

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Hidden units are copied."""
        hidden, width = growing.hidden(), growing.width
        return {
            "up.weight": growing.widened("up.weight", outputs=hidden, inputs=width),
            "down.weight": growing.widened("down.weight", outputs=width, inputs=hidden),
        }


def reference_sqrelu(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """The formula, one token at a time."""
    rows = [weights["down.weight"] @ (weights["up.weight"] @ x).clamp(min=0) ** 2 for x in h]
    return torch.stack(rows)


class DecayingSum(Mixer):
    """s_t = s_{t-1} / 2 + W_in x_t; y = W_out s_t. State: (s [B, 1, D],)."""

    projection = "out"
    release_code = "hilnas_plugin.released:DecayingSum"

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.value = Linear(d_model, d_model)
        self.out = Linear(d_model, d_model, residual=True)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        return (torch.zeros(batch, 1, self.d_model, dtype=dtype, device=device),)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        (before,) = state or self.init_state(len(x), x.dtype, x.device)
        ago = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        spans = ago[:, None] - ago[None]
        mixed = torch.where(spans >= 0, 0.5 ** spans.clamp(min=0), 0.0) @ self.value(x)
        total = mixed + 0.5 ** (ago[:, None] + 1) * before
        return self.out(total), (total[:, -1:],)


def reference_decay(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """The recurrence, one token at a time."""
    total, rows = torch.zeros_like(h[0]), []
    for x in h:
        total = total / 2 + weights["value.weight"] @ x
        rows.append(weights["out.weight"] @ total)
    return torch.stack(rows)
