"""Gated linear attention (Yang et al. 2023): linear attention in which each key has a decay of its own."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.linear_attention import LinearAttentionKind


class GatedLinearAttention(LinearAttentionKind):
    """`G8`: 8 heads of d_model / 8 numbers unless given as `G8:128`.

    Each head keeps a square memory, to which a token adds its key times its value. How much of what belongs to a key is
    kept follows from the token, through a projection of low rank. The output is normalised by head and gated.
    In the paper keys are half as wide as values and the norm is LayerNorm; here they are as wide, and it is RMSNorm.
    """

    name = "gla"
    letter = "G"
    hue = 8
    syntax = "{heads}[:{head_dim}]"
    doc = "gated linear attention"
    args = (
        Arg("heads", int, "heads", required=True, low=1, high=1 << 15),
        Arg("head_dim", int, "numbers in a query, key or value head; d_model / heads unless given", low=2, high=1024),
        Arg("rank", int, "rank of the projection to decays", default=16, low=1, high=1024),
    )

    def count(self, block: Block, d_model: int) -> Count:
        block = block.resolve(d_model)
        inner, rank = block.int("heads") * block.int("head_dim"), block.int("rank")
        weights = 5 * d_model * inner + rank * (d_model + inner) + inner + block.int("head_dim")
        return Count(weights, weights)


GLA = GatedLinearAttention()
