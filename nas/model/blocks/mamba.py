"""Mamba (Gu and Dao 2023): a selective state-space mixer in which each channel and state has a decay of its own."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count, Scalar
from nas.model.blocks.convolved import ConvolvedKind
from nas.model.blocks.linear_attention import shorter_keys

_RANK = 16
"""d_model / rank of the published models."""


class Mamba(ConvolvedKind):
    """`H` or `H16`: each of expand * d_model channels keeps N numbers, 16 unless given.

    The input projection makes an input x and a gate z. x passes a short causal convolution, without which `H(conv=0)`
    is. From it follow a step size of each channel, through a projection of low rank, and the N numbers B and C that all
    channels share.
    """

    name = "mamba"
    letter = "H"
    hue = 14
    syntax = "[{state}]"
    doc = "Mamba selective state space"
    args = (
        Arg("state", int, "state numbers per channel", default=16, low=1, high=1024),
        Arg("expand", int, "inner width / d_model", default=2, low=1, high=8),
        Arg("conv", int, "taps of the causal convolution over x; 0: none", default=4, low=0, high=64),
        Arg("rank", int, "rank of the projection to step sizes; d_model / 16 unless given", low=1, high=4096),
    )

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        return {"rank": -(-d_model // _RANK)}

    def channels(self, block: Block, d_model: int) -> int:
        return block.int("expand") * d_model

    def count(self, block: Block, d_model: int) -> Count:
        block = block.resolve(d_model)
        inner, state, rank, conv = block.int("expand") * d_model, *(block.int(n) for n in ("state", "rank", "conv"))
        projections = 3 * inner * d_model + inner * (2 * rank + 2 * state)
        weights = projections + inner * (conv + (conv > 0)) + inner * (state + 2)
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        # Per state number: the decay of the step size, decay, add B x, read with C.
        return 2.0 * self.count(block, d_model).active + 7.0 * self.memory(block, d_model)

    def memory(self, block: Block, d_model: int) -> int:
        return block.int("expand") * d_model * block.int("state")

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """States stay: they belong to a channel. A rank that is given scales with the width."""
        if "rank" not in dict(block.args):
            return block
        return block.replace(rank=max(1, round(block.int("rank") * to / d_model))).canonical(to)

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """The state as keys of linear attention, which B and C are."""
        return block.replace(state=shorter_keys(block.int("state"), context, length))


MAMBA = Mamba()
