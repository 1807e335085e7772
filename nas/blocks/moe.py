"""Mixture of SwiGLU experts with a normalised sigmoid router and a load-balancing bias (LFM2 report, section 2.3)."""

from __future__ import annotations

from nas.blocks.swiglu import FeedForwardKind
from nas.core.block import Arg, Block, Count
from nas.core.errors import InvalidInput


class MixtureOfExperts(FeedForwardKind):
    """`moe:32x4:1792`: 32 experts of width 1792, 4 of them per token.

    The load-balancing bias is a buffer that the router's loss never reaches; like transformers, counts leave it out.
    """

    name = "moe"
    letter = "moe"
    hue = 5
    syntax = ":{experts}x{top_k}:{width}"
    doc = "mixture of SwiGLU experts"
    args = (
        Arg("experts", int, "experts per layer", required=True, low=2, high=1024),
        Arg("top_k", int, "experts per token", required=True, low=1, high=1024),
        Arg("width", int, "hidden width of one expert", required=True, low=1, high=1 << 20),
    )

    def check(self, block: Block, d_model: int) -> None:
        if block.int("top_k") > block.int("experts"):
            raise InvalidInput(f"moe: top_k {block.int('top_k')} exceeds {block.int('experts')} experts")

    def count(self, block: Block, d_model: int) -> Count:
        expert, router = 3 * d_model * block.int("width"), d_model * block.int("experts")
        return Count(block.int("experts") * expert + router, block.int("top_k") * expert + router)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 2.0 * self.count(block, d_model).active


MOE = MixtureOfExperts()
