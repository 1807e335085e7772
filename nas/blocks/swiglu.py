"""SwiGLU feed-forward (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

from nas.core.block import Arg, Block, BlockKind, Count


def narrow_width(width: int, d_model: int, to: int) -> int:
    """Returns a feed-forward width scaled with the model's, a multiple of 32 (the quantisers' block), at least 32."""
    return max(32, round(width * to / d_model / 32) * 32)


class SwiGLU(BlockKind):
    """`swiglu:4608`: W_down (silu(W_gate x) * W_up x)."""

    name = "swiglu"
    letter = "swiglu"
    hue = 4
    role = "ffn"
    syntax = ":{width}"
    doc = "SwiGLU feed-forward"
    args = (Arg("width", int, "hidden width", required=True, low=1, high=1 << 20),)

    def count(self, block: Block, d_model: int) -> Count:
        weights = 3 * d_model * block.int("width")
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 2.0 * self.count(block, d_model).active

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        return block.replace(width=narrow_width(block.int("width"), d_model, to))


SWIGLU = SwiGLU()
