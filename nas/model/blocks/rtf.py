"""RTF (Parnichkun et al. 2024): a filter of each channel by its rational transfer function."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.convolved import ConvolvedKind


class RationalTransferFunction(ConvolvedKind):
    """`R` or `R16`: each channel is a recursive filter of order N, 16 unless given: a quotient of polynomials.

    GELU and a gated linear unit follow. `R(conv=4)` has a short convolution and SiLU in front, as later kinds do.
    """

    name = "rtf"
    letter = "R"
    hue = 18
    syntax = "[{state}]"
    doc = "RTF rational transfer function"
    args = (
        Arg("state", int, "order of the filter of a channel", default=16, low=1, high=1024),
        Arg("conv", int, "taps of a causal convolution in front; 0: none", default=0, low=0, high=64),
    )

    def count(self, block: Block, d_model: int) -> Count:
        weights = 2 * d_model * d_model + d_model * (2 * block.int("state") + 1 + block.int("conv"))
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 2.0 * self.count(block, d_model).active

    def state_numbers(self, block: Block, d_model: int) -> int:
        return block.int("state") * d_model

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Coefficients stay: they belong to a channel."""
        return block


RTF = RationalTransferFunction()
