"""Finite pseudo-random weights at memory speed: slices of one pool, each from a start of its own.

Raw PCG64 output, which numpy guarantees: the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from nas.runtimes.executorch.chain import Method
from nas.runtimes.executorch.contents import constant_sizes
from nas.runtimes.executorch.numbers import bfloat16_bytes
from nas.runtimes.executorch.programs import Constant

_STD = 0.02
"""Of matrix entries: the usual initialisation, so activations stay as in a fresh model."""
_TAPS_STD = 0.3
_POOL_BYTES = 16 << 20
_UNIT = 64


class RandomContents:
    """Random contents, by seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        """See `Contents.constant`."""
        sizes = constant_sizes(constant)
        if constant.role == "int4":
            scale = np.full(sizes[1] // 2, _STD / 4.61, np.float32)  # over the deviation of uniform 4-bit values
            return self._slice(_name(method, constant), sizes[0]), bfloat16_bytes(scale)
        return (self._floats(constant, _name(method, constant), sizes[0] // 4),)

    def vector(self, tensor: str, length: int) -> bytes:
        """Zeros: sinks and expert biases start there."""
        return bytes(4 * length)

    def embedding(self, vocab: int, d_model: int) -> tuple[bytes, bytes]:
        """See `Contents.embedding`."""
        scales = np.full(vocab, _STD / 73.9, "<f4")  # over the deviation of uniform 8-bit values
        return self._slice("embedding", vocab * d_model), scales.tobytes()

    @cached_property
    def _pool(self) -> bytes:
        raw = np.random.PCG64(self._seed).random_raw(_POOL_BYTES // 8)
        return bytes(np.asarray(raw).astype("<u8").tobytes())

    def _floats(self, constant: Constant, name: str, count: int) -> bytes:
        if constant.role == "fill":
            values = np.full(count, constant.value)
        elif constant.role == "norm":
            values = np.ones(count)
        elif constant.role == "bias":
            values = np.zeros(count)
        elif constant.role == "decay":  # as Mamba-2 starts: heads that forget at rates from 1 to 16
            values = np.linspace(-1.0, -16.0, count)
        else:
            std = _TAPS_STD if constant.role == "taps" else _STD
            units = np.frombuffer(self._slice(name, 4 * count), "<u4") / float(1 << 31) - 1.0
            values = units * (std * 3.0**0.5)
        return values.astype("<f4").tobytes()

    def _slice(self, name: str, size: int) -> bytes:
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        start = digest % (_POOL_BYTES // _UNIT) * _UNIT
        whole, rest = divmod(max(0, size - (_POOL_BYTES - start)), _POOL_BYTES)
        return self._pool[start : start + size] + self._pool * whole + self._pool[:rest]


def _name(method: Method, constant: Constant) -> str:
    return f"{method.tensor(constant)}:{method.expert}:{constant.name}"
