"""SwiGLU feed-forward (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

from typing import ClassVar

from nas.core.block import QUANTISED, Arg, Block, BlockKind, Caches, Count


class FeedForwardKind(BlockKind):
    """A kind with a hidden `width`, such as `swiglu:4608`.

    Attributes:
        matrices: of d_model * width weights.
    """

    role = "ffn"
    syntax = ":{width}"
    args: ClassVar[tuple[Arg, ...]] = (Arg("width", int, "hidden width", required=True, low=1, high=1 << 20),)
    matrices: ClassVar[int]

    def count(self, block: Block, d_model: int) -> Count:
        weights = self.matrices * d_model * block.int("width")
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        """Two for each active weight: its products alone, whatever the context."""
        return 2.0 * self.count(block, d_model).active

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """The width in exact proportion, so that proxies have the proportions of weights that layouts have."""
        return block.replace(width=max(1, round(block.int("width") * to / d_model)))

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """The width in proportion, as a multiple of the quantisers' block."""
        width = block.int("width") * to / d_model
        return block.replace(width=max(1, round(width / QUANTISED)) * QUANTISED)

    def pad(self, block: Block, multiple: int) -> Block:
        return block.replace(width=-(-block.int("width") // multiple) * multiple)


class SwiGLU(FeedForwardKind):
    """`swiglu:4608`: W_down (silu(W_gate x) * W_up x)."""

    name = "swiglu"
    letter = "swiglu"
    hue = 4
    doc = "SwiGLU feed-forward"
    matrices = 3


SWIGLU = SwiGLU()
