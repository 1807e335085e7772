"""CfC (Hasani et al. 2022): a recurrent network that interpolates two states by a gate of time."""

from __future__ import annotations

from nas.core.block import Arg, Block, Count, Scalar
from nas.model.blocks.convolved import ConvolvedKind


class ClosedFormContinuous(ConvolvedKind):
    """`F` or `F256`: a hidden state of d_model / 2 numbers unless given, from itself and the input by a small network.

    Tokens are computed one after another, in training too. `F(conv=4)` has a short convolution and SiLU in front.
    """

    name = "cfc"
    letter = "F"
    hue = 17
    syntax = "[{state}]"
    doc = "CfC closed-form continuous-time recurrence"
    args = (
        Arg("state", int, "hidden numbers; d_model / 2 unless given", low=1, high=1 << 15),
        Arg("units", int, "units of the layer in front of gate and states; as many as hidden", low=1, high=1 << 15),
        Arg("conv", int, "taps of a causal convolution in front; 0: none", default=0, low=0, high=64),
    )

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        state = max(1, d_model // 2)
        return {"state": state, "units": block.get("state") or state}

    def count(self, block: Block, d_model: int) -> Count:
        full = block.resolve(d_model)
        state, units = full.int("state"), full.int("units")
        weights = d_model * (units + state + block.int("conv")) + 4 * state * units + units + 3 * state
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        return 2.0 * self.count(block, d_model).active

    def state_numbers(self, block: Block, d_model: int) -> int:
        return block.int("state")

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Hidden numbers and units scale with the width."""
        scaled = {
            name: max(1, round(block.int(name) * to / d_model))
            for name in ("state", "units")
            if name in dict(block.args)
        }
        return block.replace(**scaled).canonical(to) if scaled else block


CFC = ClosedFormContinuous()
