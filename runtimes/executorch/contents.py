"""Where the bytes of an artifact come from: what is asked for, and how long the answers are."""

from __future__ import annotations

import math
from typing import Protocol

from nas.runtimes.executorch.chain import Method
from nas.runtimes.executorch.programs import GROUP, Constant


class Contents(Protocol):
    """Bytes of a model's tensors."""

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        """The constant as XNNPACK wants it, of `constant_sizes` bytes: of "int4" packed weights, then scales."""

    def vector(self, tensor: str, length: int) -> bytes:
        """A float32 vector of the state dict that the runner itself reads."""

    def embedding(self, vocab: int, d_model: int) -> tuple[bytes, bytes]:
        """Rows in int8, and float32 scales."""


def constant_sizes(constant: Constant) -> tuple[int, ...]:
    """Bytes of each part of a constant."""
    count = math.prod(constant.shape)
    return (count // 2, count // GROUP * 2) if constant.role == "int4" else (count * 4,)
