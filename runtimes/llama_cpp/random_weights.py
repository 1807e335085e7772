"""Finite pseudo-random weights, written straight as quantised blocks.

A pool of blocks is made once and tiled, each tensor from a start of its own: at memory speed, and with the same bytes
on every machine (raw PCG64 output, which numpy guarantees; its distributions may change between versions).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from gguf import GGML_QUANT_SIZES
from numpy.typing import NDArray

from nas.runtimes.llama_cpp.tensors import Tensor, Type, stored_bytes

Bytes = NDArray[np.uint8]

_STD = 0.02
"""Standard deviation of matrix entries: the usual initialisation, so activations stay as in a fresh model."""
_POOL_BYTES = 16 << 20
_STRIDE = 7919  # prime: starts of neighbouring tensors are far apart

_SCALE_OF = {
    Type.Q4_0: _STD / 4.61,  # std of uniform 4-bit values
    Type.Q8_0: _STD / 73.9,  # of uniform 8-bit values
    Type.Q6_K: _STD / (18.5 * 9.5),  # of uniform 6-bit values x the mean of sub-block scales 1..17
}


class RandomTensors:
    """Random contents for tensors, by seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pool = cache(self._make_pool)

    def data(self, tensor: Tensor, storage: Type, place: int) -> Bytes:
        """The bytes of the tensor that stands at `place` in the file, shape [stored bytes]."""
        size = stored_bytes(tensor.shape, storage)
        if tensor.role == "norm":
            return np.ones(size // 4, np.float32).view(np.uint8)
        if tensor.role == "bias":
            return np.zeros(size, np.uint8)
        if tensor.role == "decay":  # as Mamba-2 starts: heads that forget at rates from 1 to 16
            return np.linspace(-1.0, -16.0, size // 4, dtype=np.float32).view(np.uint8)
        unit = GGML_QUANT_SIZES[storage][1]
        pool = self._pool(storage, 0.3 if tensor.role == "conv" else _STD)
        return _tile(pool, place * _STRIDE % (len(pool) // unit) * unit, size)

    def _make_pool(self, storage: Type, std: float) -> Bytes:
        unit = GGML_QUANT_SIZES[storage][1]
        count = _POOL_BYTES // unit
        generator = np.random.PCG64([self._seed, int(storage)])
        raw = generator.random_raw(-(-count * unit // 8)).astype("<u8").view(np.uint8)[: count * unit]
        if storage in (Type.F32, Type.F16):
            return _uniform(raw, std, "<f4" if storage == Type.F32 else "<f2")
        blocks = raw.reshape(count, unit)
        scale = np.frombuffer(np.array(_SCALE_OF[storage], "<f2").tobytes(), np.uint8)
        if storage == Type.Q6_K:  # 128 low, 64 high, 16 sub-block scales (int8), the scale
            blocks[:, 192:208] = blocks[:, 192:208] % 17 + 1
            blocks[:, 208:] = scale
        else:  # the scale, then the values
            blocks[:, :2] = scale
        return blocks.reshape(-1)


def _uniform(raw: Bytes, std: float, dtype: str) -> Bytes:
    """Uniform values of the given standard deviation, from as many raw bits as the type is wide."""
    bits = raw.view("<u2" if dtype == "<f2" else "<u4")
    unit = bits.astype(np.float64) / (np.iinfo(bits.dtype).max / 2) - 1.0
    return (unit * (std * math.sqrt(3.0))).astype(dtype).view(np.uint8)


def _tile(pool: Bytes, start: int, size: int) -> Bytes:
    out = np.empty(size, np.uint8)
    filled = 0
    while filled < size:
        piece = pool[start : start + size - filled]
        out[filled : filled + len(piece)] = piece
        filled += len(piece)
        start = 0
    return out
