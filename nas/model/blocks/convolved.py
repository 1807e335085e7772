"""Shared parts of recurrent kinds with the argument `conv`, taps of a short causal convolution in front; 0: none."""

from __future__ import annotations

from nas.core.block import Block, BlockKind
from nas.core.errors import InvalidInput


class ConvolvedKind(BlockKind):
    """A mixer whose state is the convolution's last inputs and what it remembers."""

    role = "mixer"

    def channels(self, block: Block, d_model: int) -> int:
        """Returns the channels of the convolution; the block is resolved."""
        return d_model

    def state_numbers(self, block: Block, d_model: int) -> int:
        """Returns the numbers of its state beside the convolution's; the block is resolved.

        They are its memory, unless it says that they hold no single tokens, as states of a filter do not.
        """
        return self.memory(block, d_model)

    def check(self, block: Block, d_model: int) -> None:
        if block.int("conv") == 1:
            raise InvalidInput(f"{self.name}: a convolution has at least 2 taps; 0 for none")

    def state_bytes(self, block: Block, d_model: int) -> float:
        full = block.resolve(d_model)
        return 4.0 * (max(0, block.int("conv") - 1) * self.channels(full, d_model) + self.state_numbers(full, d_model))
