"""Mamba-2: a selective state-space mixer with one decay per head (Dao and Gu 2024, section 7)."""

from __future__ import annotations

from nas.core.block import Arg, Block, Caches, Count, Scalar
from nas.core.errors import InvalidInput
from nas.model.blocks.attention import divisors, nearest
from nas.model.blocks.convolved import ConvolvedKind
from nas.model.blocks.linear_attention import shorter_keys

_HEAD_DIM = 64
"""Head size of the published models."""


class Mamba2(ConvolvedKind):
    """`M` or `M64`: each number of a head of size P keeps a state of N numbers, 128 unless given.

    The input projection makes a gate z, an input x (both as wide as `inner_width`, cut into heads), B and C (N numbers
    for each group of heads) and a step size per head; x, B and C pass a short causal convolution.
    """

    name = "mamba2"
    letter = "M"
    hue = 3
    syntax = "[{state}]"
    doc = "Mamba-2 selective state space"
    args = (
        Arg("state", int, "state numbers per channel", default=128, low=1, high=4096),
        Arg("heads", int, "heads; inner width / 64 unless given", low=1, high=4096),
        Arg("expand", int, "inner width / d_model", default=2, low=1, high=8),
        Arg("conv", int, "taps of the causal convolution over x, B and C; 0: none", default=4, low=0, high=64),
        Arg("groups", int, "groups of heads that share B and C; divides heads", default=1, low=1, high=1024),
        Arg("inner", int, "inner width where it is not expand * d_model; 0: it is", default=0, low=0, high=1 << 19),
        Arg("norm", bool, "RMSNorm of each group behind the gate; Falcon-H1 has none", default=True),
    )

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        inner = inner_width(block, d_model)
        return {"heads": inner // _HEAD_DIM} if inner % _HEAD_DIM == 0 else {}

    def check(self, block: Block, d_model: int) -> None:
        inner, heads = inner_width(block, d_model), block.get("heads")
        if block.int("inner") == block.int("expand") * d_model:
            raise InvalidInput(f"mamba2: inner={inner} is expand * d_model: leave it out")
        if inner % 32:
            raise InvalidInput(f"mamba2: inner width {inner} is no multiple of 32, the quantisers' block")
        if heads is None:
            raise InvalidInput(f"mamba2: inner width {inner} is no multiple of {_HEAD_DIM}; give the heads")
        if inner % int(heads):
            raise InvalidInput(f"mamba2: {heads} heads do not divide the inner width {inner}")
        super().check(block, d_model)
        if int(heads) % block.int("groups"):
            raise InvalidInput(f"mamba2: {block.int('groups')} groups do not divide {heads} heads")

    def count(self, block: Block, d_model: int) -> Count:
        block = block.resolve(d_model)
        inner, heads, mixed = inner_width(block, d_model), block.int("heads"), convolved(block, d_model)
        projections = d_model * (inner + mixed + heads) + inner * d_model
        taps = block.int("conv")
        weights = projections + mixed * (taps + (taps > 0)) + 3 * heads + (inner if block.get("norm") else 0)
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        # Per state number: decay, add the outer product of B and x, read out with C.
        return 2.0 * self.count(block, d_model).active + 5.0 * self.memory(block, d_model)

    def channels(self, block: Block, d_model: int) -> int:
        return convolved(block, d_model)

    def memory(self, block: Block, d_model: int) -> int:
        return inner_width(block, d_model) * block.int("state")

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Heads as in attention: their size scales down to 16, then there are fewer of them. The state stays."""
        if to == d_model:
            return block
        full = block.resolve(d_model)
        inner = block.int("expand") * to
        if block.int("inner"):
            inner = 32 * max(1, round(block.int("inner") * to / d_model / 32))
            block = block.replace(inner=inner if inner != block.int("expand") * to else 0)
        groups = nearest(block.int("groups"), divisors(inner // 16))
        head_dim = inner_width(full, d_model) / full.int("heads")
        size = nearest(head_dim * to / d_model, [n for n in divisors(inner // groups) if n >= 16])
        return block.replace(heads=inner // size, groups=groups)

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """The state as keys of linear attention, which B and C are."""
        return block.replace(state=shorter_keys(block.int("state"), context, length))

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """Heads that follow from the width do so there too; given ones scale as in proxies."""
        return self.narrow(block, d_model, to) if {"heads", "inner"} & set(dict(block.args)) else block


def inner_width(block: Block, d_model: int) -> int:
    """Returns the width of gate and input."""
    return block.int("inner") or block.int("expand") * d_model


def convolved(block: Block, d_model: int) -> int:
    """Returns the channels of the convolution: x, B and C."""
    return inner_width(block, d_model) + 2 * block.int("groups") * block.int("state")


MAMBA2 = Mamba2()
