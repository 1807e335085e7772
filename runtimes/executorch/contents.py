"""Where the parts of an artifact come from: what is asked for, and how long the answers are."""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

from nas.runtimes.executorch.chain import Method
from nas.runtimes.executorch.programs import GROUP, Constant

Part = TypeVar("Part", covariant=True)


class Contents(Protocol[Part]):
    """Parts of a model's tensors: their bytes, or how to draw them."""

    def constant(self, method: Method, constant: Constant) -> tuple[Part, ...]:
        """The constant as XNNPACK wants it, of `constant_sizes` bytes: of "int4" packed weights, then scales."""

    def vector(self, tensor: str, length: int) -> Part:
        """A float32 vector of the state dict that the runner itself reads."""

    def embedding(self, vocab: int, d_model: int) -> tuple[Part, Part]:
        """Rows in int8, and float32 scales."""


def constant_sizes(constant: Constant) -> tuple[int, ...]:
    """Bytes of each part of a constant."""
    count = math.prod(constant.shape)
    return (count // 2, count // GROUP * 2) if constant.role == "int4" else (count * 4,)
