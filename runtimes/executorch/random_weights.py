"""Finite pseudo-random weights at memory speed: cut from a few pools, each from a start of its own."""

from __future__ import annotations

import zlib

import numpy as np

from nas.runtimes.executorch.chain import Method
from nas.runtimes.executorch.contents import constant_sizes
from nas.runtimes.executorch.numbers import bfloat16_bytes
from nas.runtimes.executorch.programs import Constant
from nas.runtimes.executorch.recipe import Pool
from nas.runtimes.recipe import Fill, Recipe

_STD = 0.02
"""Of matrix entries: the usual initialisation, so activations stay as in a fresh model."""
_INT4_SCALE, _INT8_SCALE = _STD / 4.61, _STD / 73.9
"""Over the deviations of uniform 4-bit and 8-bit values."""
_POOL_BYTES = 16 << 20
_QUANTA = Pool("bytes", 0, _POOL_BYTES)
_MATRIX = Pool("f32", 28, _POOL_BYTES // 4)
"""A standard deviation of 0.018."""
_TAPS = Pool("f32", 24, _POOL_BYTES // 4)
"""Short filters: 0.29."""
_UNIT = 64


class RandomContents:
    """How random contents are drawn; `pools` are those that were asked for."""

    def __init__(self) -> None:
        self._pools: dict[Pool, int] = {}

    @property
    def pools(self) -> tuple[Pool, ...]:
        """By number."""
        return tuple(self._pools)

    def constant(self, method: Method, constant: Constant) -> tuple[Fill, ...]:
        """See `Contents.constant`."""
        sizes, name = constant_sizes(constant), f"{method.tensor(constant)}:{method.expert}:{constant.name}"
        if constant.role == "int4":
            scale = bfloat16_bytes(np.full(2, _INT4_SCALE, np.float32))
            return self._tile(name, _QUANTA, sizes[0]), _word(sizes[1], scale)
        return (self._floats(constant, name, sizes[0]),)

    def vector(self, tensor: str, length: int) -> Fill:
        """Zeros: sinks and expert biases start there."""
        return _same(4 * length, 0.0)

    def embedding(self, vocab: int, d_model: int) -> tuple[Fill, Fill]:
        """See `Contents.embedding`."""
        return self._tile("embedding", _QUANTA, vocab * d_model), _same(4 * vocab, _INT8_SCALE)

    def _floats(self, constant: Constant, name: str, size: int) -> Fill:
        if constant.role == "fill":
            return _same(size, constant.value)
        if constant.role == "norm":
            return _same(size, 1.0)
        if constant.role == "bias":
            return _same(size, 0.0)
        if constant.role == "decay":  # as Mamba-2 starts: heads that forget at rates from 1 to 16
            return Fill(size, "decay")
        return self._tile(name, _TAPS if constant.role == "taps" else _MATRIX, size)

    def _tile(self, name: str, pool: Pool, size: int) -> Fill:
        start = zlib.crc32(name.encode()) % (_POOL_BYTES // _UNIT) * _UNIT
        return Fill(size, "tile", self._pools.setdefault(pool, len(self._pools)), start)


class DrawnContents:
    """Random contents themselves. Asked for what an artifact holds, in its order, they are the same bytes."""

    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, RandomContents()

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        """See `Contents.constant`."""
        return tuple(map(self._draw, self._random.constant(method, constant)))

    def vector(self, tensor: str, length: int) -> bytes:
        """See `Contents.vector`."""
        return self._draw(self._random.vector(tensor, length))

    def embedding(self, vocab: int, d_model: int) -> tuple[bytes, bytes]:
        """See `Contents.embedding`."""
        rows, scales = self._random.embedding(vocab, d_model)
        return self._draw(rows), self._draw(scales)

    def _draw(self, fill: Fill) -> bytes:
        return b"".join(Recipe(self._seed, b"", self._random.pools, (fill,), alignment=1).content())


def _same(size: int, value: float) -> Fill:
    return _word(size, np.array([value], "<f4").tobytes())


def _word(size: int, content: bytes) -> Fill:
    return Fill(size, "word", word=int.from_bytes(content, "little"))
