"""Shared parts of the kinds of gated linear attention: heads with a memory each, and how they scale."""

from __future__ import annotations

import math
from typing import ClassVar

from nas.core.block import QUANTISED, Block, BlockKind, Caches, Scalar
from nas.core.errors import InvalidInput
from nas.model.blocks.attention import divisors
from nas.model.blocks.convolved import ConvolvedKind

_LEAST_KEY = 2
"""Least numbers of a proxy's keys: those of one number differ in size only."""


class LinearAttentionKind(BlockKind):
    """A kind with the arguments `heads` and `head_dim`, the numbers of a head's value.

    Optional arguments: `key_heads`, heads of queries and keys (default: heads), and `key_dim`, numbers of a key
    (default: head_dim).
    """

    role = "mixer"
    memory_flops: ClassVar[float] = 5.0
    """Per number of the memory and token: decay, add the outer product, read with the query."""

    def flops(self, block: Block, d_model: int, context: int) -> float:
        active = self.count(block, d_model).active
        return 2.0 * active + self.memory_flops * self.memory(block.resolve(d_model), d_model)

    def state_bytes(self, block: Block, d_model: int) -> float:
        return 4.0 * self.memory(block.resolve(d_model), d_model)

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        heads = block.int("heads")
        size: dict[str, Scalar] = {"head_dim": d_model // heads} if d_model % heads == 0 else {}
        return size | ({"key_heads": heads} if self._has("key_heads") else {})

    def check(self, block: Block, d_model: int) -> None:
        heads, key_heads = block.int("heads"), self._key_heads(block)
        if heads % key_heads:
            raise InvalidInput(f"{self.name}: {key_heads} heads of queries and keys do not divide {heads} heads")
        if block.get("head_dim") is None:
            raise InvalidInput(f"{self.name}: {heads} heads do not divide d_model {d_model}; give the head size")

    def memory(self, block: Block, d_model: int) -> int:
        return block.int("heads") * block.int("head_dim") ** 2

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Heads keep their size, and so each value its share of memory; there are fewer, in proportion.

        The size is the nearest that divides the width of all heads, and so no greater than it.
        """
        if to == d_model:
            return block
        full = block.resolve(d_model)
        heads, size = full.int("heads"), full.int("head_dim")
        shared = heads // self._key_heads(full)
        step = math.lcm(shared * _LEAST_KEY, QUANTISED)
        inner = step * max(1, round(heads * size * to / d_model / step))
        choices = [n for n in divisors(inner // shared) if n >= _LEAST_KEY]
        return self._cut(full, inner // shared, min(choices, key=lambda n: abs(math.log(n / size)))).canonical(to)

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """Smaller heads, in proportion to the sequence, and more of them, so that weights stay but for heads' gates."""
        full = block.resolve(d_model)
        size, keys = full.int("head_dim"), self._keys(full)
        shorter = max(_LEAST_KEY, round(size * shorter_keys(keys, context, length) / keys))
        return self._cut(full, self._key_heads(full) * size, shorter).canonical(d_model)

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """Heads keep their size, so that their number changes; as many as before share keys, if that divides it."""
        full = block.resolve(d_model)
        heads, shared = full.int("heads"), full.int("heads") // self._key_heads(full)
        scaled_heads = max(1, round(heads * to / d_model))
        group = min(divisors(scaled_heads), key=lambda divisor: (abs(math.log(divisor / shared)), -divisor))
        scaled = self._with_heads(block, scaled_heads, scaled_heads // group)
        return scaled.replace(head_dim=full.int("head_dim")).canonical(to)

    def width_step(self, block: Block) -> int:
        """Returns the head size."""
        return block.int("head_dim")

    def _cut(self, full: Block, width: int, size: int) -> Block:
        """Returns a resolved block with values of `size` numbers, and keys that are to them as before.

        `width` numbers are cut into heads of keys; as many heads as before share each.
        """
        key_heads = max(1, round(width / size))
        cut = self._with_heads(full, key_heads * (full.int("heads") // self._key_heads(full)), key_heads)
        keys = max(1, round(self._keys(full) * size / full.int("head_dim")))
        return cut.replace(head_dim=size, **({"key_dim": keys} if self._has("key_dim") else {}))

    def _has(self, argument: str) -> bool:
        return any(arg.name == argument for arg in self.args)

    def _keys(self, full: Block) -> int:
        return full.int("key_dim" if self._has("key_dim") else "head_dim")

    def _key_heads(self, block: Block) -> int:
        return block.int("key_heads" if self._has("key_heads") else "heads")

    def _with_heads(self, block: Block, heads: int, key_heads: int) -> Block:
        keys: dict[str, Scalar] = {"key_heads": key_heads} if self._has("key_heads") else {}
        return block.replace(heads=heads, **keys)


CONV = "taps of a causal convolution over queries, keys and values; 0: none"


class ConvolvedLinearAttentionKind(ConvolvedKind, LinearAttentionKind):
    """One with the argument `conv`, taps of a causal convolution over queries, keys and values; 0: there is none."""

    def check(self, block: Block, d_model: int) -> None:
        LinearAttentionKind.check(self, block, d_model)
        super().check(block, d_model)

    def inner(self, block: Block, d_model: int) -> int:
        """Returns the width of all heads together."""
        full = block.resolve(d_model)
        return full.int("heads") * full.int("head_dim")

    def channels(self, block: Block, d_model: int) -> int:
        return (2 * self._key_heads(block) + block.int("heads")) * block.int("head_dim")


def shorter_keys(keys: int, context: int, length: int) -> int:
    """Returns the numbers of a key in sequences of `length` tokens, in proportion to those of `context` tokens.

    A value of P numbers takes P times its key's numbers of memory. So memory stays the same share of what attention
    would keep of a sequence, and with it what can be recalled.
    """
    return min(keys, max(_LEAST_KEY, round(keys * length / context)))


def convolved(block: Block) -> int:
    """Returns the channels of queries, keys and values of a resolved block."""
    return (2 * block.int("key_heads") + block.int("heads")) * block.int("head_dim")
