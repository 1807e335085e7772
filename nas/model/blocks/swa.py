"""Sliding-window attention: grouped-query attention over the last tokens only (Beltagy et al. 2020, section 3.1)."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.core.errors import InvalidInput
from nas.model.blocks.attention import HEAD_ARGS, AttentionKind, attention_count, attention_flops, cache_bytes

_LEAST_WINDOW = 8
"""Least window of a proxy: a shorter one would see no farther than a short convolution, whose taps do not shrink."""


class SlidingWindowAttention(AttentionKind):
    """`W16/4@512`: 16 query heads over 4 key-value heads; token i sees the tokens j <= i with i - j < 512.

    That window includes the token itself, as in llama.cpp (`LLAMA_SWA_TYPE_STANDARD`). With `sink=1`, each query head
    has a learned logit that takes part in the softmax and carries no value, so that a head may attend to nothing, as
    in gpt-oss and llama.cpp (`ggml_soft_max_add_sinks`).
    """

    name = "swa"
    letter = "W"
    hue = 2
    syntax = "{heads}/{kv_heads}@{window}[:{head_dim}]"
    doc = "sliding-window attention"
    args = (
        *HEAD_ARGS,
        Arg("window", int, "tokens seen, the current one included", required=True, low=1, high=1 << 20),
        Arg("sink", bool, "a learned logit per query head that takes attention away", default=False),
    )

    def check(self, block: Block, d_model: int) -> None:
        super().check(block, d_model)
        if block.get("sink") and block.get("softcap"):
            raise InvalidInput("swa: softcap bounds scores, which sink=1 compares with a logit: one of both")

    def count(self, block: Block, d_model: int) -> Count:
        projections = attention_count(block.resolve(d_model), d_model).total
        weights = projections + (block.int("heads") if block.get("sink") else 0)
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        tokens = min(context, block.int("window"))
        return 2.0 * self.count(block, d_model).active + attention_flops(block.resolve(d_model), tokens)

    def kv_bytes(self, block: Block, d_model: int, context: int, element: float) -> float:
        return cache_bytes(block.resolve(d_model), min(context, block.int("window")), element)

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """The window in proportion, besides what attention's positions do."""
        window = block.int("window")
        short = min(window, max(_LEAST_WINDOW, round(window * length / context)))
        return super().shorten(block, d_model, context, length).replace(window=short)


SWA = SlidingWindowAttention()
