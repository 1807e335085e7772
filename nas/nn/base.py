"""The protocol between `nas.nn.model` and the modules of block kinds.

A mixer has one computation in two uses: `forward(x)` over whole sequences for training, and `forward(x, state)` over
the next chunk of a sequence for decoding. Both return the state after the last token, so chunks compose:

    y, state = mixer(x[:, :7])
    rest, state = mixer(x[:, 7:], state)      # cat([y, rest], 1) == mixer(x)[0]

A state is a tuple of tensors and is never written in place. What its tensors mean is said by each mixer's class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from nas.core.block import Block

State = tuple[Tensor, ...]


class Mixer(nn.Module, ABC):
    """A sequence mixer. Subclasses are built as `Kind(block, d_model)`, under the kind's name in `MODULES`.

    Args:
        block: the block; arguments that follow from the width may be missing.
        d_model: residual width D.
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__()
        self.block = block.resolve(d_model)
        self.d_model = d_model

    @abstractmethod
    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """The state before the first token."""

    @abstractmethod
    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Mixes a chunk.

        Args:
            x: normalised input [B, T, D], T >= 1.
            state: after the previous chunk; None: x starts the sequence.

        Returns:
            The output [B, T, D] and the state after the chunk.
        """

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mixes one token, x and y [B, D]."""
        y, state = self(x[:, None], state)
        return y[:, 0], state


class FeedForward(nn.Module, ABC):
    """A position-wise block, built as `Kind(block, d_model)`; the same arguments as `Mixer`."""

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__()
        self.block = block.resolve(d_model)
        self.d_model = d_model

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The output [B, T, D] for the normalised input [B, T, D]."""
