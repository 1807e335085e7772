"""The built-in block kinds keep the contract of block kinds."""

from __future__ import annotations

from nas.nn.conv import reference_gated_short_conv
from nas.nn.gqa import reference_gqa
from nas.nn.moe import reference_moe
from nas.nn.swiglu import reference_swiglu
from nas.testing.block_contract import FeedForwardContract, MixerContract


class TestGatedShortConv(MixerContract):
    kind = "conv"
    examples = ("C2", "C3", "C8", "C9", "C32")
    reference = staticmethod(reference_gated_short_conv)


class TestGroupedQueryAttention(MixerContract):
    kind = "gqa"
    examples = (
        "A4/4",
        "A4/2",
        "A4/1",
        "A2/1:48",
        "A6/3:2",
        "A4/2(qk_norm=0)",
        "A4/2(rope_theta=0)",
        "A1/1(rope_theta=9)",
    )
    reference = staticmethod(reference_gqa)


class TestSwiGLU(FeedForwardContract):
    kind = "swiglu"
    examples = ("swiglu:1", "swiglu:160")
    reference = staticmethod(reference_swiglu)


class TestMixtureOfExperts(FeedForwardContract):
    kind = "moe"
    examples = ("moe:2x1:32", "moe:4x2:48", "moe:8x8:16")
    reference = staticmethod(reference_moe)
