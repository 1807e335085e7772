"""What the kinds are, without torch."""

from __future__ import annotations

from nas.core.block import Arg, Block, BlockKind, Count


class SquaredReLU(BlockKind):
    """`sqrelu:4608`: W_down max(0, W_up x)^2 (So et al. 2021, "Primer")."""

    name = "sqrelu"
    letter = "sqrelu"
    hue = 8
    role = "ffn"
    syntax = ":{width}"
    doc = "squared-ReLU feed-forward"
    args = (Arg("width", int, "hidden width", required=True, low=1, high=1 << 20),)

    def count(self, block: Block, d_model: int) -> Count:
        weights = 2 * d_model * block.int("width")
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 2.0 * self.count(block, d_model).active

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        return block.replace(width=max(32, round(block.int("width") * to / d_model / 32) * 32))


class DecayingSum(BlockKind):
    """`Y`: s_t = s_{t-1} / 2 + W_in x_t; y = W_out s_t."""

    name = "decay"
    letter = "Y"
    role = "mixer"
    syntax = ""
    doc = "sum of past tokens that halves at each step"
    args = ()

    def count(self, block: Block, d_model: int) -> Count:
        return Count(2 * d_model * d_model, 2 * d_model * d_model)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 4.0 * d_model * d_model + 2.0 * d_model

    def state_bytes(self, block: Block, d_model: int) -> float:
        return 4.0 * d_model

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        return block


SQRELU, DECAY = SquaredReLU(), DecayingSum()
