"""The protocol between `nas.model.nn.model` and the modules of block kinds, and their registry.

A mixer has one computation in two uses: `forward(x)` over whole sequences for training, and `forward(x, state)` over
the next chunk of a sequence for decoding. Both return the state after the last token, so chunks compose:

    y, state = mixer(x[:, :7])
    rest, state = mixer(x[:, 7:], state)      # cat([y, rest], 1) == mixer(x)[0]

A state is a tuple of tensors and is never written in place. What its tensors mean is said by each mixer's class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from nas.core.block import Block
from nas.core.registry import Registry
from nas.model.nn.growth import BlockGrowth, CannotGrow

State = tuple[Tensor, ...]


class BlockModule(nn.Module, ABC):
    """The module of a kind of block. Built as `Kind(block, d_model)`, under the kind's name in `MODULES`.

    Args:
        block: the block; arguments that follow from the width may be missing.
        d_model: residual width D.

    Attributes:
        projection: name of the projection into the residual stream, without ".weight"; zero there is a block that adds
            nothing. Needed where layers are added to a smaller model's.
        release_code: "module:Class" of what computes the block in released folders, for kinds that are not built in:
            that module's file is copied there, so it needs torch only; see docs/how-to/adding-a-block.md.
        stackable: whether it touches parameters only through modules of `nas.model.nn.primitives`, or takes stacked
        ones, so
            that several seeds train in one pass (`nas.model.nn.seeds`). Where not, they train one after another.
    """

    stackable: ClassVar[bool] = False
    projection: ClassVar[str] = ""
    release_code: ClassVar[str] = ""

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__()
        self.block = block.resolve(d_model)
        self.d_model = d_model

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Returns the larger block's tensors, which compute the same as the smaller one's.

        Raises:
            CannotGrow: the block cannot be carried over.
        """
        raise CannotGrow(f"its module has no `grow` for {growing.a.kind} blocks")


class Mixer(BlockModule):
    """A sequence mixer."""

    @abstractmethod
    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """Returns the state before the first token."""

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


class FeedForward(BlockModule):
    """A position-wise block."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [B, T, D] for the normalised input [B, T, D]."""


MODULES: Registry[type[Mixer] | type[FeedForward]] = Registry(
    "module of block kind",
    "nas.modules",
    {
        "conv": "nas.model.nn.conv:GatedShortConv",
        "gqa": "nas.model.nn.gqa:GroupedQueryAttention",
        "swa": "nas.model.nn.swa:SlidingWindowAttention",
        "mla": "nas.model.nn.mla:MultiHeadLatentAttention",
        "mamba2": "nas.model.nn.mamba2:Mamba2",
        "gdn": "nas.model.nn.gdn:GatedDeltaNet",
        "gla": "nas.model.nn.gla:GatedLinearAttention",
        "mlstm": "nas.model.nn.mlstm:MatrixLSTM",
        "swiglu": "nas.model.nn.swiglu:SwiGLU",
        "relu2": "nas.model.nn.relu2:SquaredReLU",
        "moe": "nas.model.nn.moe:MixtureOfExperts",
    },
)
"""Block kind -> torch module. Names are those of `nas.core.block.BLOCKS`."""
