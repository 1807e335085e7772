"""Shared parts of the kinds of gated linear attention: heads with a square memory each, and how they scale."""

from __future__ import annotations

import math

from nas.blocks.attention import divisors, narrow_heads
from nas.core.block import Block, BlockKind, Caches, Scalar
from nas.core.errors import InvalidInput


class LinearAttentionKind(BlockKind):
    """A kind with the arguments `heads` and `head_dim`, perhaps `key_heads`: those of queries and keys, else as many.

    Memories are not `shorten`ed for shorter sequences: a proxy's heads are narrower already, and with them the number
    of keys that a memory tells apart.
    """

    role = "mixer"

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        heads = block.int("heads")
        size: dict[str, Scalar] = {"head_dim": d_model // heads} if d_model % heads == 0 else {}
        return size | ({"key_heads": heads} if self._shares_keys else {})

    def check(self, block: Block, d_model: int) -> None:
        heads, key_heads = block.int("heads"), self._key_heads(block)
        if heads % key_heads:
            raise InvalidInput(f"{self.name}: {key_heads} heads of queries and keys do not divide {heads} heads")
        if block.get("head_dim") is None:
            raise InvalidInput(f"{self.name}: {heads} heads do not divide d_model {d_model}; give the head size")

    def memory(self, block: Block) -> int:
        """Returns the numbers in the memories of all heads of a resolved block."""
        return block.int("heads") * block.int("head_dim") ** 2

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Heads as in attention: their size scales down to 16, then there are fewer of them."""
        if to == d_model:
            return block
        full = block.resolve(d_model)
        heads, key_heads, size = narrow_heads(
            full.int("heads"), self._key_heads(full), full.int("head_dim"), d_model, to
        )
        return self._with_heads(block, heads, key_heads, size).canonical(to)

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """Heads keep their size, so that their number changes; as many as before share keys, if that divides it."""
        full = block.resolve(d_model)
        heads, shared = full.int("heads"), full.int("heads") // self._key_heads(full)
        wanted = max(1, round(heads * to / d_model))
        group = min(divisors(wanted), key=lambda each: (abs(math.log(each / shared)), -each))
        return self._with_heads(block, wanted, wanted // group, full.int("head_dim")).canonical(to)

    @property
    def _shares_keys(self) -> bool:
        return any(arg.name == "key_heads" for arg in self.args)

    def _key_heads(self, block: Block) -> int:
        return block.int("key_heads" if self._shares_keys else "heads")

    def _with_heads(self, block: Block, heads: int, key_heads: int, size: int) -> Block:
        keys: dict[str, Scalar] = {"key_heads": key_heads} if self._shares_keys else {}
        return block.replace(heads=heads, head_dim=size, **keys)

    def width_step(self, block: Block) -> int:
        """Returns the head size."""
        return block.int("head_dim")


def convolved(block: Block) -> int:
    """Returns the channels of queries, keys and values of a resolved block."""
    return (2 * block.int("key_heads") + block.int("heads")) * block.int("head_dim")
