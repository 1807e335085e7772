"""Gated short convolution: the local mixer of LFM2 (report, section 2.2)."""

from __future__ import annotations

from nas.core.block import Arg, Block, BlockKind, Count


class GatedShortConv(BlockKind):
    """`C3`: B, C, x = W_in h; out = W_out (C * conv_k(B * x)), a causal depthwise convolution."""

    name = "conv"
    letter = "C"
    hue = 0
    role = "mixer"
    syntax = "{kernel}"
    doc = "gated short convolution"
    args = (Arg("kernel", int, "taps of the causal depthwise convolution", required=True, low=2, high=64),)

    def count(self, block: Block, d_model: int) -> Count:
        weights = 4 * d_model * d_model + block.int("kernel") * d_model
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 8.0 * d_model * d_model + 2.0 * (block.int("kernel") + 2) * d_model

    def state_bytes(self, block: Block, d_model: int) -> float:
        return 4.0 * (block.int("kernel") - 1) * d_model

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        return block


CONV = GatedShortConv()
