"""What the kinds are, without torch."""

from __future__ import annotations

from nas.core.block import Arg, Block, BlockKind, Count
from nas.model.blocks.swiglu import FeedForwardKind


class DiagonalStateSpace(BlockKind):
    """`Z16`: a diagonal state-space layer with 16 states a channel (Gu, Gupta, Goel and Ré 2022).

    Nothing of it depends on the token: what a channel keeps of the past is a sum of decays that are constants.
    """

    name = "s4d"
    letter = "Z"
    role = "mixer"
    syntax = "{state}"
    doc = "diagonal state space with constant decays"
    args = (Arg("state", int, "states a channel", required=True, low=1, high=256),)

    def count(self, block: Block, d_model: int) -> Count:
        weights = 2 * d_model * d_model + 2 * d_model * block.int("state") + 2 * d_model
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        # Per state: decay, add the input, read.
        return 4.0 * d_model * d_model + 4.0 * self.memory(block, d_model) + 2.0 * d_model

    def state_bytes(self, block: Block, d_model: int) -> float:
        return 4.0 * self.memory(block, d_model)

    def memory(self, block: Block, d_model: int) -> int:
        return d_model * block.int("state")

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """States stay: they belong to a channel."""
        return block


class ReGLU(FeedForwardKind):
    """`reglu:4608`: W_down (relu(W_gate x) * W_up x) (Shazeer 2020, equation 6)."""

    name = "reglu"
    letter = "reglu"
    hue = 8
    doc = "ReGLU feed-forward"
    matrices = 3


S4D, REGLU = DiagonalStateSpace(), ReGLU()
