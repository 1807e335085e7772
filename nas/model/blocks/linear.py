"""Linear attention (Katharopoulos et al. 2020): sums of keys times values, of which nothing is forgotten."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.linear_attention import CONV, ConvolvedLinearAttentionKind


class LinearAttention(ConvolvedLinearAttentionKind):
    """`K8`: 8 heads of d_model / 8 numbers unless given as `K8:128`.

    Each head keeps a memory, to which a token adds its key times its value, and the sum of the keys. Queries and keys
    are made positive by elu(x) + 1; what is read is divided by the read of the sum. `K8(conv=4)` has a short
    convolution in front, as later kinds do.
    """

    name = "linear"
    letter = "K"
    hue = 12
    syntax = "{heads}[:{head_dim}]"
    doc = "linear attention"
    memory_flops = 4.0  # nothing decays
    args = (
        Arg("heads", int, "heads", required=True, low=1, high=1 << 15),
        Arg("head_dim", int, "numbers in a query, key or value head; d_model / heads unless given", low=2, high=1024),
        Arg("conv", int, CONV, default=0, low=0, high=64),
    )

    def count(self, block: Block, d_model: int) -> Count:
        inner = self.inner(block, d_model)
        weights = 4 * d_model * inner + 3 * inner * block.int("conv")
        return Count(weights, weights)

    def memory(self, block: Block, d_model: int) -> int:
        """Returns the numbers in the memories and in the sums of keys."""
        return block.int("heads") * block.int("head_dim") * (block.int("head_dim") + 1)


LINEAR = LinearAttention()
