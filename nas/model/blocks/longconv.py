"""Long convolution with an implicit filter (Poli et al. 2023, Hyena)."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.convolved import ConvolvedKind


class LongConvolution(ConvolvedKind):
    """`Y` or `Y4096`: a gated convolution over all tokens so far, with a filter that a small network makes of each lag.

    What is 4096, and 2048 unless given, is the reach: lags over which features of the filter repeat and channels fade.
    A short convolution is in front, as in the paper; `Y(conv=0)` has none. All inputs are remembered, one number for
    each channel and token: half of what attention keeps that shares no keys, for half of its products.
    """

    name = "longconv"
    letter = "Y"
    hue = 19
    syntax = "[{reach}]"
    doc = "long convolution (Hyena)"
    args = (
        Arg("reach", int, "tokens over which the filter fades", default=2048, low=1, high=1 << 20),
        Arg("bands", int, "frequencies among the features of a lag", default=8, low=0, high=1024),
        Arg("units", int, "units of the filter's network", default=64, low=1, high=1024),
        Arg("conv", int, "taps of the causal convolution in front; 0: none", default=3, low=0, high=64),
    )

    def channels(self, block: Block, d_model: int) -> int:
        return 3 * d_model

    def count(self, block: Block, d_model: int) -> Count:
        units = block.int("units")
        network = units * (2 * block.int("bands") + 2 + units + 1 + d_model)
        weights = 4 * d_model * d_model + d_model * (3 * block.int("conv") + 2) + network
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        # The filter is computed once, not for each token.
        return 8.0 * d_model * d_model + d_model * (6.0 * block.int("conv") + 2.0 * context + 4.0)

    def kv_bytes(self, block: Block, d_model: int, context: int, element: float) -> float:
        return element * context * d_model

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        return block

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """The reach is a share of the sequence."""
        return block.replace(reach=max(1, min(block.int("reach"), round(block.int("reach") * length / context))))


LONGCONV = LongConvolution()
