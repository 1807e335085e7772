"""S4 in its diagonal form (Gu et al. 2022, S4D), and Liquid-S4 (Hasani et al. 2022)."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count
from nas.model.blocks.convolved import ConvolvedKind


class DiagonalStateSpace(ConvolvedKind):
    """`S` or `S32`: each channel has N complex states of its own, 32 unless given, whose decays are constants.

    So it is a convolution as long as the sequence, with a kernel of N oscillations that die away. GELU and a gated
    linear unit follow, as in the paper. `S(conv=4)` has a short convolution and SiLU in front, as later kinds do.
    `S(liquid=1)` is Liquid-S4: the input acts on the decays, too.
    """

    name = "s4"
    letter = "S"
    hue = 15
    syntax = "[{state}]"
    doc = "S4D diagonal state space"
    args = (
        Arg("state", int, "complex states per channel", default=32, low=1, high=1024),
        Arg("conv", int, "taps of a causal convolution in front; 0: none", default=0, low=0, high=64),
        Arg("liquid", bool, "Liquid-S4: inputs are added to the decays", default=False),
    )

    def count(self, block: Block, d_model: int) -> Count:
        weights = 2 * d_model * d_model + d_model * (4 * block.int("state") + 2 + block.int("conv"))
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        # Per complex state: decay, write, read; a liquid one writes to the decay, too.
        per_state = 18.0 if block.get("liquid") else 14.0
        weights = 2 * d_model * d_model + d_model * (1 + block.int("conv"))
        return 2.0 * weights + per_state * block.int("state") * d_model

    def state_numbers(self, block: Block, d_model: int) -> int:
        return 2 * block.int("state") * d_model

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """States stay: they belong to a channel."""
        return block


S4 = DiagonalStateSpace()
