"""Mixture of SwiGLU experts with a router and a load-balancing bias (LFM2 report, section 2.3)."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.core.errors import InvalidInput
from nas.model.blocks.swiglu import FeedForwardKind


class MixtureOfExperts(FeedForwardKind):
    """`moe:32x4:1792`: 32 experts of width 1792, 4 of them per token.

    Those of `shared` are added for every token and are not chosen (DeepSeekMoE, Dai et al. 2024, section 3.2).
    The load-balancing bias is a buffer that the router's loss never reaches; like transformers, counts leave it out.
    """

    name = "moe"
    letter = "moe"
    hue = 5
    syntax = ":{experts}x{top_k}:{width}"
    doc = "mixture of SwiGLU experts"
    args = (
        Arg("experts", int, "experts per layer", required=True, low=2, high=1024),
        Arg("top_k", int, "experts per token", required=True, low=1, high=1024),
        Arg("width", int, "hidden width of one expert", required=True, low=1, high=1 << 20),
        Arg("shared", int, "further experts that every token passes, with weight 1", default=0, low=0, high=64),
        Arg("shared_gate", bool, "shared experts times a sigmoid of the input, as in Qwen2-MoE", default=False),
        Arg("softmax", bool, "scores that add up to one over all experts, not a sigmoid of each", default=False),
        Arg("norm_topk", bool, "weights of a token's experts that add up to one", default=True),
    )

    def check(self, block: Block, d_model: int) -> None:
        if block.int("top_k") > block.int("experts"):
            raise InvalidInput(f"moe: top_k {block.int('top_k')} exceeds {block.int('experts')} experts")
        if block.get("shared_gate") and not block.int("shared"):
            raise InvalidInput("moe: shared_gate is of shared experts, of which shared=0 has none")

    def count(self, block: Block, d_model: int) -> Count:
        expert, router = 3 * d_model * block.int("width"), d_model * block.int("experts")
        common = router + block.int("shared") * expert + (d_model if block.get("shared_gate") else 0)
        return Count(block.int("experts") * expert + common, block.int("top_k") * expert + common)


MOE = MixtureOfExperts()
