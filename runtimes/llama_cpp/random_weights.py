"""Finite pseudo-random weights, drawn as quantised blocks, as a recipe (`nas.measure.runtimes.recipe`).

Every tensor is cut from a pool of its storage type, from a start of its own: at memory speed, and small to describe.
The header of the recipe is the GGUF file up to its first tensor, which names every tensor with its type and shape; a
fill is a tensor. runner.c, `make_model`, makes the same bytes of the types in `MAKES`. Pools:

    q4_0|q8_0|q6_k SCALE COUNT     blocks of random quanta under one scale (float16 bits)
    f16|f32 SHIFT COUNT            uniform numbers: random integers over 2^SHIFT
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES

from nas.measure.runtimes.llama_cpp.tensors import Tensor, Type, stored_bytes
from nas.measure.runtimes.recipe import Bytes, Fill, Recipe, uniform_floats

ALIGNMENT = 32
"""GGUF_DEFAULT_ALIGNMENT of ggml/include/gguf.h."""

MAKES = frozenset((Type.Q4_0, Type.Q8_0, Type.Q6_K, Type.F16, Type.F32))
"""Types whose pools the runner makes."""


@dataclass(frozen=True, slots=True)
class BlockPool:
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
        return f"{self.storage.name.lower()} {self.scale} {self.count}"

    def shape(self, raw: Bytes) -> Bytes:
        if self.storage == Type.F16:
            halves: Bytes = np.ldexp((raw.view("<i2") >> 5).astype("<f4"), -self.scale).astype("<f2").view(np.uint8)
            return halves
        if self.storage == Type.F32:
            return uniform_floats(raw, self.scale)
        blocks = raw.reshape(self.count, -1)
        if self.storage == Type.Q6_K:  # 128 + 64 bytes of quanta, 16 scales of sub-blocks (int8), the scale
            blocks[:, 192:208] = blocks[:, 192:208] % 17 + 1
        at = _SCALE_AT.get(self.storage, 0)
        scale = np.array([self.scale], "<u2")
        blocks[:, at : at + 2] = scale.view(np.uint8)
        if self.storage in _LEAST_OF:
            least = (scale.view("<f2").astype(np.float32) * _LEAST_OF[self.storage]).astype("<f2")
            blocks[:, 2:4] = least.view(np.uint8)
        return raw


_STD = 0.02
"""Standard deviation of matrix entries: the usual initialisation, so activations stay as in a fresh model."""
_POOL_BYTES = 16 << 20
_STRIDE = 7919  # prime: starts of neighbouring tensors are far apart

_SCALE_OF = {
    Type.Q4_0: _STD / 4.61,  # std of uniform 4-bit values
    Type.Q8_0: _STD / 73.9,  # of uniform 8-bit values
    Type.Q6_K: _STD / (18.5 * 9.5),  # of uniform 6-bit values x the mean of sub-block scales 1..17
    Type.Q4_1: _STD / 4.61,
    Type.Q5_0: _STD / 9.23,  # of uniform 5-bit values
    Type.Q5_1: _STD / 9.23,
    Type.IQ4_NL: _STD / 67.8,  # of its 16 values
    # Sub-blocks have scales of 6 bits, and least values where there are any.
    Type.Q4_K: _STD / 266.0,
    Type.Q5_K: _STD / 542.0,
    Type.Q3_K: _STD / 43.3,
    Type.IQ4_XS: _STD / 1260.0,
}
_SCALE_AT = {Type.Q6_K: 208, Type.Q3_K: 108}
"""Type -> byte of a block's scale, if it is not the first."""
_LEAST_OF = {Type.Q4_1: -7.5, Type.Q5_1: -15.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}
"""Type -> its second number, as a multiple of the scale, so that values have a mean of 0."""
_SHIFT_OF = {Type.F16: 15, Type.F32: 28}
"""Integers of 11 and of 24 bits become numbers of standard deviation 0.018."""
_CONV_SHIFT = 24
"""Short filters: a standard deviation of 0.29."""


def random_recipe(header: bytes, stored: Sequence[tuple[Tensor, Type]], seed: int) -> Recipe:
    """Returns the recipe of a file with a header (padding included) and tensors with their types, in file order."""
    pools: dict[BlockPool, int] = {}
    fills = []
    for place, (tensor, storage) in enumerate(stored):
        size = stored_bytes(tensor.shape, storage)
        if tensor.role == "norm":
            fills.append(Fill(size, "ones"))
        elif tensor.role == "bias":
            fills.append(Fill(size, "zeros"))
        elif tensor.role == "decay":  # as Mamba-2 starts: heads that forget at rates from 1 to 16
            fills.append(Fill(size, "decay"))
        else:
            pool = _pool(storage, tensor.role == "conv")
            unit = GGML_QUANT_SIZES[storage][1]
            start = place * _STRIDE % pool.count * unit
            fills.append(Fill(size, "tile", pools.setdefault(pool, len(pools)), start))
    return Recipe(seed, header, tuple(pools), tuple(fills), ALIGNMENT)


def _pool(storage: Type, conv: bool) -> BlockPool:
    count = _POOL_BYTES // GGML_QUANT_SIZES[storage][1]
    if storage in _SCALE_OF:
        return BlockPool(storage, int(np.array(_SCALE_OF[storage], "<f2").view("<u2")), count)
    return BlockPool(storage, _CONV_SHIFT if conv else _SHIFT_OF[storage], count)
