"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): linear attention whose memory is corrected, not only added to."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.linear_attention import CONV, ConvolvedLinearAttentionKind, convolved


class GatedDeltaNet(ConvolvedLinearAttentionKind):
    """`D8`: 8 heads of d_model / 8 numbers unless given as `D8:128`; `D8/4`: pairs of heads share queries and keys.

    Each head keeps a square memory. A token lets it decay, reads the value that the memory has for its key, and writes
    back the difference from its own value. Queries, keys and values pass a short causal convolution; the output is
    normalised by head and gated.
    """

    name = "gdn"
    letter = "D"
    hue = 9
    syntax = "{heads}[/{key_heads}][:{head_dim}]"
    doc = "Gated DeltaNet"
    memory_flops = 7.0  # it reads with the key, too
    args = (
        Arg("heads", int, "heads", required=True, low=1, high=1 << 15),
        Arg(
            "key_heads",
            int,
            "heads of queries and keys; divides heads, as many unless given",
            low=1,
            high=1 << 15,
            same_as="heads",
        ),
        Arg("head_dim", int, "numbers in a query, key or value head; d_model / heads unless given", low=2, high=1024),
        Arg("conv", int, CONV, default=4, low=0, high=64),
        Arg("norm_eps", float, "added to the mean square by the norm behind", default=1e-5, low=1e-12, high=1e-2),
    )

    def count(self, block: Block, d_model: int) -> Count:
        block = block.resolve(d_model)
        heads, size, mixed = block.int("heads"), block.int("head_dim"), convolved(block)
        projections = d_model * (mixed + 2 * heads * size + 2 * heads)
        weights = projections + mixed * block.int("conv") + 2 * heads + size
        return Count(weights, weights)


GDN = GatedDeltaNet()
