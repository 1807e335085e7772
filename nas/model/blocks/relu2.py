"""Squared-ReLU feed-forward (So et al. 2021, "Primer"), as in PLM and Nemotron."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.swiglu import FeedForwardKind


class SquaredReLU(FeedForwardKind):
    """`relu2:8192`: W_down relu(W_up x)^2."""

    name = "relu2"
    letter = "relu2"
    hue = 10
    syntax = ":{width}"
    doc = "squared-ReLU feed-forward"
    args = (Arg("width", int, "hidden width", required=True, low=1, high=1 << 20),)

    def count(self, block: Block, d_model: int) -> Count:
        weights = 2 * d_model * block.int("width")
        return Count(weights, weights)


RELU2 = SquaredReLU()
