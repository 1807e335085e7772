"""The Mamba-2 mixer (Dao and Gu 2024) as llama.cpp stores it: `build_mamba2_layer` of src/models/mamba-base.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.family.references.decoder import Part, matrix
from nas.runtimes.llama_cpp.stock_model import Value


@dataclass(frozen=True, kw_only=True)
class Mamba2Mixer:
    """Sizes of the mixer.

    Args:
        width: of the residual stream.
        heads: each has a rate of forgetting of its own.
        state: numbers that a channel remembers.
        expand: inner channels per channel of the residual stream.
        conv: kernel of the short convolution.
        groups: of heads that share their input and output maps.
    """

    width: int
    heads: int
    state: int = 128
    expand: int = 2
    conv: int = 4
    groups: int = 1

    @property
    def inner(self) -> int:
        """Channels inside."""
        return self.expand * self.width

    def metadata(self) -> dict[str, Value]:
        """Keys without the architecture's prefix."""
        return {
            "ssm.conv_kernel": self.conv,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.heads,
            "ssm.group_count": self.groups,
        }

    def parts(self) -> Iterator[Part]:
        """Its tensors; what is not a big matrix stays float32."""
        mixed = self.inner + 2 * self.groups * self.state
        yield matrix("ssm_in", self.inner + mixed + self.heads, self.width)
        yield "ssm_conv1d.weight", (mixed, self.conv), "conv"
        yield "ssm_conv1d.bias", (mixed,), "bias"
        yield "ssm_dt.bias", (self.heads,), "bias"
        yield "ssm_a", (self.heads, 1), "decay"
        yield "ssm_d", (self.heads, 1), "norm"
        yield "ssm_norm.weight", (self.groups, self.inner // self.groups), "norm"
        yield matrix("ssm_out", self.width, self.inner)
