"""mLSTM (Beck et al. 2024), as in xLSTM 7B (Beck et al. 2025): linear attention with exponential input gates."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count, Scalar
from nas.model.blocks.linear_attention import LinearAttentionKind


class MatrixLSTM(LinearAttentionKind):
    """`X4`: 4 heads with values of d_model / 4 numbers and keys of half as many.

    Each head keeps a memory, to which a token adds its key times its value, and the sum of the keys alike. An input and
    a forget gate per head weigh both; what is read is divided by the read of the sum. The output is normalised by head
    and gated.
    """

    name = "mlstm"
    letter = "X"
    hue = 7
    syntax = "{heads}[:{head_dim}]"
    doc = "mLSTM"
    args = (
        Arg("heads", int, "heads", required=True, low=1, high=1 << 15),
        Arg("head_dim", int, "numbers in a value head; d_model / heads unless given", low=2, high=1024),
        Arg("key_dim", int, "numbers in a query or key head; head_dim / 2 unless given", low=1, high=1024),
    )

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        size = super().derived(block, d_model)
        value = block.get("head_dim") or size.get("head_dim")
        return size | ({"key_dim": max(1, int(value) // 2)} if value else {})

    def count(self, block: Block, d_model: int) -> Count:
        block = block.resolve(d_model)
        heads, values, keys = (block.int(name) for name in ("heads", "head_dim", "key_dim"))
        projections = d_model * heads * (2 * keys + 3 * values + 2)
        weights = projections + 2 * heads + heads * values
        return Count(weights, weights)

    def memory(self, block: Block, d_model: int) -> int:
        """Returns the numbers in the memories and in the sums of keys."""
        return block.int("heads") * block.int("key_dim") * (block.int("head_dim") + 1)


MLSTM = MatrixLSTM()
