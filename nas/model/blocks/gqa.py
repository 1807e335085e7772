"""Grouped-query attention with QK-norm and RoPE: the global mixer of LFM2 (report, section 2.2)."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.core.errors import InvalidInput
from nas.model.blocks.attention import (
    HEAD_ARGS,
    ROPE_ARGS,
    AttentionKind,
    attention_count,
    attention_flops,
    cache_bytes,
)


class GroupedQueryAttention(AttentionKind):
    """`A16/8`: 16 query heads over 8 key-value heads, head size d_model / 16 unless given as `A16/8:64`."""

    name = "gqa"
    letter = "A"
    hue = 1
    syntax = "{heads}/{kv_heads}[:{head_dim}]"
    doc = "grouped-query attention"
    cache_args = ("kv_heads", "head_dim", *ROPE_ARGS)
    args = (*HEAD_ARGS, Arg("kv", int, "reuse the key-value cache of this earlier layer (0-based)", low=0))

    def check(self, block: Block, d_model: int) -> None:
        super().check(block, d_model)
        if block.get("kv") is not None and block.int("canon"):
            raise InvalidInput("gqa: canon needs a state of its own, which a block with kv has not")

    def count(self, block: Block, d_model: int) -> Count:
        return attention_count(block.resolve(d_model), d_model, own_kv=block.get("kv") is None)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 2.0 * self.count(block, d_model).active + attention_flops(block.resolve(d_model), context)

    def kv_bytes(self, block: Block, d_model: int, context: int, element: float) -> float:
        return 0.0 if block.get("kv") is not None else cache_bytes(block.resolve(d_model), context, element)


GQA = GroupedQueryAttention()
