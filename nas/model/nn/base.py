"""The protocol between `nas.model.nn.layer` and the modules of block kinds.

A mixer has one computation in two uses: `mixer(x)` over whole sequences for training, and `mixer(x, state)` over the
next chunk of a sequence for decoding. Both return the state after the last token, so chunks compose:

    y, state = mixer(x[:, :7])
    rest, state = mixer(x[:, 7:], state)      # cat([y, rest], 1) == mixer(x)[0]

A state is a tuple of tensors and is never written in place. What its tensors mean is said by each mixer's class.

Released models (`nas.train.release.bundle`) contain these modules, so they import torch, the standard library, each
other and `nas.core.block` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.growth import BlockGrowth, CannotGrow

State = tuple[Tensor, ...]


class Padding(NamedTuple):
    """Padding of a batch, of tokens in the cache and of the chunk.

    Args:
        text: which tokens are text, bool [B, S + T]; the others are padding.
        positions: of tokens in their text [B, S + T].
    """

    text: Tensor
    positions: Tensor


def without_padding(x: Tensor, padding: Padding | None) -> Tensor:
    """Returns x [B, T, ...] with zeros at the chunk's padding."""
    if padding is None:
        return x
    text = padding.text[:, -x.shape[1] :]
    return x.masked_fill(~text.view(*text.shape, *(1,) * (x.dim() - 2)), 0)


class BlockModule(nn.Module, ABC):
    """The module of a kind of block, in `nas.model.nn.kinds.MODULES` under the kind's name.

    Args:
        block: the block; arguments that follow from the width may be missing.
        d_model: residual width D.

    Attributes:
        projection: name of the projection into the residual stream, without ".weight"; with zeros there the block adds
            nothing. Needed where layers are added to a smaller model's.
        release_code: "module:Class" of the class that released folders have instead of this one, where its own module
            imports what released folders cannot have; see docs/how-to/adding-a-block.md.
        stackable: whether it accepts stacked parameters, so that several seeds train in one pass
            (`nas.model.nn.seeds`). Modules of `nas.model.nn.primitives` do. Otherwise seeds train one after another.
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
    """A sequence mixer: subclasses say what their state is (`state_shapes`) and how a chunk is mixed (`mix`).

    Example: the sum of all tokens so far.

        class Sum(Mixer):
            def state_shapes(self) -> tuple[tuple[int, ...], ...]:
                return ((1, self.d_model),)

            def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
                total = state[0] + x.cumsum(1)
                return total, (total[:, -1:],)
    """

    both_ways = False
    """Whether it sees the tokens behind, too, and keeps no state."""

    def one_way(self) -> str:
        """Returns why `both_ways` cannot be; empty: it can."""
        return f"{self.block.kind} blocks"

    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the state's tensors before the first token, of one sequence. They begin with zeros."""

    @abstractmethod
    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        """Mixes a chunk.

        Args:
            x: normalised input [B, T, D], T >= 1; zero at padding.
            state: after the previous chunk, or `init_state`.
            padding: None: no token is padding. Padding must not change the output at text, nor the state that text
                after it meets. Zeros as input are enough for a mixer that neither decays nor counts positions.

        Returns:
            The output [B, T, D] and the state after the chunk.
        """

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """Returns the state before the first token."""
        return tuple(torch.zeros(batch, *shape, dtype=dtype, device=device) for shape in self.state_shapes())

    def forward(self, x: Tensor, state: State | None = None, padding: Padding | None = None) -> tuple[Tensor, State]:
        """Mixes a chunk, see `mix`; without a state, x starts the sequence."""
        return self.mix(x, state or self.init_state(len(x), x.dtype, x.device), padding)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mixes one token, x and y [B, D]."""
        y, state = self(x[:, None], state)
        return y[:, 0], state


class FeedForward(BlockModule):
    """A position-wise block."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [B, T, D] for the normalised input [B, T, D]."""
