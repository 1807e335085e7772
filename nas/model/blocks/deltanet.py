"""DeltaNet (Yang et al. 2024): linear attention whose memory is corrected, not only added to, and never decays."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.linear_attention import CONV, ConvolvedLinearAttentionKind


class DeltaNet(ConvolvedLinearAttentionKind):
    """`N8`: 8 heads of d_model / 8 numbers unless given as `N8:128`.

    Each head keeps a square memory. A token reads the value that the memory has for its key, and writes back a share of
    the difference from its own value; nothing decays. Queries, keys and values pass a short causal convolution, without
    which `N8(conv=0)` is; the output is normalised by head.
    """

    name = "deltanet"
    letter = "N"
    hue = 13
    syntax = "{heads}[:{head_dim}]"
    doc = "DeltaNet"
    memory_flops = 6.0
    args = (
        Arg("heads", int, "heads", required=True, low=1, high=1 << 15),
        Arg("head_dim", int, "numbers in a query, key or value head; d_model / heads unless given", low=2, high=1024),
        Arg("conv", int, CONV, default=4, low=0, high=64),
    )

    def count(self, block: Block, d_model: int) -> Count:
        full, inner = block.resolve(d_model), self.inner(block, d_model)
        weights = 4 * d_model * inner + 3 * inner * block.int("conv")
        weights += d_model * full.int("heads") + full.int("head_dim")
        return Count(weights, weights)


DELTANET = DeltaNet()
