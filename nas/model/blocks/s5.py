"""S5 (Smith et al. 2022): one diagonal state space with as many inputs and outputs as channels."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count, Scalar
from nas.model.blocks.convolved import ConvolvedKind


class SharedStateSpace(ConvolvedKind):
    """`V` or `V128`: P complex states, d_model / 2 unless given, which all channels write to and read from.

    Their decays are constants. GELU and a gated linear unit follow. `V(conv=4)` has a short convolution and SiLU in
    front, as later kinds do.
    """

    name = "s5"
    letter = "V"
    hue = 16
    syntax = "[{state}]"
    doc = "S5 shared diagonal state space"
    args = (
        Arg("state", int, "complex states of all channels; d_model / 2 unless given", low=1, high=1 << 15),
        Arg("conv", int, "taps of a causal convolution in front; 0: none", default=0, low=0, high=64),
    )

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        return {"state": max(1, d_model // 2)}

    def count(self, block: Block, d_model: int) -> Count:
        state = block.resolve(d_model).int("state")
        weights = 2 * d_model * d_model + 4 * state * d_model + 3 * state + d_model * (1 + block.int("conv"))
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        # Per complex state: decay and write.
        return 2.0 * self.count(block, d_model).active + 14.0 * block.resolve(d_model).int("state")

    def state_numbers(self, block: Block, d_model: int) -> int:
        return 2 * block.int("state")

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """States are as wide as channels are: they scale with the width."""
        if "state" not in dict(block.args):
            return block
        return block.replace(state=max(1, round(block.int("state") * to / d_model))).canonical(to)


S5 = SharedStateSpace()
