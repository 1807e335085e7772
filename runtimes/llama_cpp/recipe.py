"""A model file as a recipe: what stands in it and how to draw its weights, in a few KB.

Random weights follow from a seed, so a device needs no file: the runner makes it there, from the same description and
with the same bytes as this module (runner.c, `make_model`). A recipe is text but for the header:

    hilnas-recipe 1 SEED HEADER_BYTES POOLS TENSORS
    <HEADER_BYTES bytes: the GGUF file up to its first tensor, which names every tensor with its type and shape>
    <a line per pool:>   q4_0|q8_0|q6_k SCALE COUNT     blocks of random quanta under one scale (float16 bits)
                         f16|f32 SHIFT COUNT            uniform numbers: random integers over 2^SHIFT
    <a line per tensor:> BYTES ones|zeros|decay         float32 constants; decay: -1, -2 .. -16, again and again
                         BYTES tile POOL START          the pool from byte START on, round and round

A tensor is padded with zeros to 32 bytes, as GGUF asks. A pool's random bytes are splitmix64 (Steele, Lea, Flood 2014)
of a stream of its own. Only integers and powers of two enter, so every machine computes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

Type = GGMLQuantizationType
Bytes = NDArray[np.uint8]

ALIGNMENT = 32
"""GGUF_DEFAULT_ALIGNMENT of ggml/include/gguf.h."""

_CONSTANTS = {
    "ones": np.ones(1, "<f4"),
    "zeros": np.zeros(1, "<f4"),
    "decay": np.arange(-1, -17, -1, dtype="<f4"),
}
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


@dataclass(frozen=True, slots=True)
class Fill:
    """What one tensor holds.

    Args:
        size: bytes, without padding.
        how: see the module.
        pool: number of the pool that is tiled.
        start: byte of the pool that comes first.
    """

    size: int
    how: Literal["ones", "zeros", "decay", "tile"]
    pool: int = 0
    start: int = 0


@dataclass(frozen=True)
class Recipe:
    """A whole model file.

    Args:
        seed: of all pools.
        header: the file up to its first tensor, padding included.
        pools: drawn from.
        fills: of the tensors, in file order.
    """

    seed: int
    header: bytes
    pools: tuple[Pool, ...]
    fills: tuple[Fill, ...]

    def to_bytes(self) -> bytes:
        """What the runner reads."""
        first = f"hilnas-recipe 1 {self.seed} {len(self.header)} {len(self.pools)} {len(self.fills)}\n"
        lines = [f"{_NAMES[pool.storage]} {pool.scale} {pool.count}" for pool in self.pools]
        for fill in self.fills:
            source = f" {fill.pool} {fill.start}" if fill.how == "tile" else ""
            lines.append(f"{fill.size} {fill.how}{source}")
        return b"".join((first.encode(), self.header, "\n".join(("", *lines, "")).encode()))

    def content(self) -> Iterator[bytes | memoryview]:
        """The bytes of the model file, in pieces."""
        yield self.header
        seeds = splitmix64(self.seed, len(self.pools)).tolist()
        drawn = [_draw(pool, seed) for pool, seed in zip(self.pools, seeds, strict=True)]
        for fill in self.fills:
            pattern = drawn[fill.pool] if fill.how == "tile" else _CONSTANTS[fill.how].view(np.uint8)
            yield from (piece.data for piece in _tiles(pattern, fill.start, fill.size))
            yield bytes(-fill.size % ALIGNMENT)


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` numbers of the stream that `seed` starts."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


@cache
def _draw(pool: Pool, seed: int) -> Bytes:
    """Kept, because the models of one search draw from the same few pools."""
    raw: Bytes = splitmix64(seed, -(-pool.size // 8)).astype("<u8").view(np.uint8)[: pool.size]
    if pool.storage == Type.F16:
        halves: Bytes = np.ldexp((raw.view("<i2") >> 5).astype("<f4"), -pool.scale).astype("<f2").view(np.uint8)
        return halves
    if pool.storage == Type.F32:
        floats: Bytes = np.ldexp((raw.view("<i4") >> 8).astype("<f4"), -pool.scale).view(np.uint8)
        return floats
    blocks = raw.reshape(pool.count, -1)
    at = 0
    if pool.storage == Type.Q6_K:  # 128 + 64 bytes of quanta, 16 scales of sub-blocks (int8), the scale
        blocks[:, 192:208] = blocks[:, 192:208] % 17 + 1
        at = 208
    blocks[:, at : at + 2] = np.array([pool.scale], "<u2").view(np.uint8)
    return raw


def _tiles(pattern: Bytes, start: int, size: int) -> Iterator[Bytes]:
    if len(pattern) < 1024:  # a constant
        yield np.tile(pattern, -(-size // len(pattern)))[:size]
        return
    while size:
        piece = pattern[start : start + size]
        yield piece
        size, start = size - len(piece), 0
