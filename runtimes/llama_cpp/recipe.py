"""Recipes of GGUF files: `nas.runtimes.recipe`, with these pools.

The header is the GGUF file up to its first tensor, which names every tensor with its type and shape; a fill is a
tensor. runner.c, `make_model`, makes the same bytes.

    q4_0|q8_0|q6_k SCALE COUNT     blocks of random quanta under one scale (float16 bits)
    f16|f32 SHIFT COUNT            uniform numbers: random integers over 2^SHIFT
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nas.runtimes.recipe import Bytes, uniform_floats

Type = GGMLQuantizationType

ALIGNMENT = 32
"""GGUF_DEFAULT_ALIGNMENT of ggml/include/gguf.h."""

_NAMES = {Type.Q4_0: "q4_0", Type.Q8_0: "q8_0", Type.Q6_K: "q6_k", Type.F16: "f16", Type.F32: "f32"}


@dataclass(frozen=True, slots=True)
class Pool:
    """Random blocks that tensors are cut from.

    Args:
        storage: type of the blocks.
        scale: float16 bits of the scale of quantised blocks; of floats, how many bits the integers are shifted down.
        count: of blocks.
    """

    storage: Type
    scale: int
    count: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * GGML_QUANT_SIZES[self.storage][1]

    def describe(self) -> str:
        """See the module."""
        return f"{_NAMES[self.storage]} {self.scale} {self.count}"

    def shape(self, raw: Bytes) -> Bytes:
        """See `nas.runtimes.recipe.Pool`."""
        if self.storage == Type.F16:
            halves: Bytes = np.ldexp((raw.view("<i2") >> 5).astype("<f4"), -self.scale).astype("<f2").view(np.uint8)
            return halves
        if self.storage == Type.F32:
            return uniform_floats(raw, self.scale)
        blocks = raw.reshape(self.count, -1)
        at = 0
        if self.storage == Type.Q6_K:  # 128 + 64 bytes of quanta, 16 scales of sub-blocks (int8), the scale
            blocks[:, 192:208] = blocks[:, 192:208] % 17 + 1
            at = 208
        blocks[:, at : at + 2] = np.array([self.scale], "<u2").view(np.uint8)
        return raw
