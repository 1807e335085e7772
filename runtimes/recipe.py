"""Model files as recipes: the content of a file and how to draw its weights, in a few KB.

Random weights follow from a seed, so a device needs no file: the runner makes it there, with the same bytes as this
module. A recipe is text but for the header:

    hilnas-recipe 1 SEED HEADER_BYTES POOLS FILLS
    <HEADER_BYTES bytes: the model file up to the first part that is drawn>
    <a line per pool: what each runtime draws from>
    <a line per fill:>   BYTES ones|zeros|decay         float32 constants; decay: -1, -2 .. -16, again and again
                         BYTES word NUMBER              four bytes again and again, as a little-endian integer
                         BYTES tile POOL START          the pool from byte START on, round and round

A fill is padded with zeros to the file's alignment. A pool's random bytes are splitmix64 (Steele, Lea, Flood 2014) of a
stream of its own. Only integers and powers of two enter, so every machine computes the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_CONSTANTS = {
    "ones": np.ones(1, "<f4"),
    "zeros": np.zeros(1, "<f4"),
    "decay": np.arange(-1, -17, -1, dtype="<f4"),
}


class Pool(Hashable, Protocol):
    """Random numbers that fills are cut from; equal pools draw equal numbers."""

    @property
    def size(self) -> int:
        """Bytes."""

    def describe(self) -> str:
        """Its line in the recipe."""

    def shape(self, raw: Bytes) -> Bytes:
        """Makes the pool of as many random bytes, which may be overwritten."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The content of one part of the file.

    Args:
        size: bytes, without padding.
        how: see the module.
        pool: number of the pool that is tiled.
        start: byte of the pool that comes first.
        word: that is repeated.
    """

    size: int
    how: Literal["ones", "zeros", "decay", "word", "tile"]
    pool: int = 0
    start: int = 0
    word: int = 0

    def describe(self) -> str:
        """Its line in the recipe."""
        arguments = {"tile": f" {self.pool} {self.start}", "word": f" {self.word}"}
        return f"{self.size} {self.how}{arguments.get(self.how, '')}"


@dataclass(frozen=True)
class Recipe:
    """A whole model file.

    Args:
        seed: of all pools.
        header: the file up to its first fill, padding included.
        pools: drawn from.
        fills: what follows, in file order.
        alignment: of every fill's end; the runner of a runtime knows it.
    """

    seed: int
    header: bytes
    pools: tuple[Pool, ...]
    fills: tuple[Fill, ...]
    alignment: int = 32

    def to_bytes(self) -> bytes:
        """Returns the text that the runner reads."""
        first = f"hilnas-recipe 1 {self.seed} {len(self.header)} {len(self.pools)} {len(self.fills)}\n"
        lines = [*(pool.describe() for pool in self.pools), *(fill.describe() for fill in self.fills)]
        return b"".join((first.encode(), self.header, "\n".join(("", *lines, "")).encode()))

    def content(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes of the model file, in pieces."""
        yield self.header
        seeds = splitmix64(self.seed, len(self.pools)).tolist()
        drawn = [_draw(pool, seed) for pool, seed in zip(self.pools, seeds, strict=True)]
        for fill in self.fills:
            pattern = drawn[fill.pool] if fill.how == "tile" else _pattern(fill)
            yield from (piece.data for piece in _tiles(pattern, fill.start, fill.size))
            yield bytes(-fill.size % self.alignment)


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """Returns the first `count` numbers of the stream that `seed` starts."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def uniform_floats(raw: Bytes, shift: int) -> Bytes:
    """Returns random bytes as float32: integers of 24 bits over 2^shift."""
    floats: Bytes = np.ldexp((raw.view("<i4") >> 8).astype("<f4"), -shift).view(np.uint8)
    return floats


@cache
def _draw(pool: Pool, seed: int) -> Bytes:
    """Returns the bytes of a pool; cached, because the models of one search draw from the same few pools."""
    return pool.shape(splitmix64(seed, -(-pool.size // 8)).astype("<u8").view(np.uint8)[: pool.size])


def _pattern(fill: Fill) -> Bytes:
    values = np.array([fill.word], "<u4") if fill.how == "word" else _CONSTANTS[fill.how]
    return values.view(np.uint8)


def _tiles(pattern: Bytes, start: int, size: int) -> Iterator[Bytes]:
    if len(pattern) < 1024:  # a constant
        yield np.tile(pattern, -(-size // len(pattern)))[:size]
        return
    while size:
        piece = pattern[start : start + size]
        yield piece
        size, start = size - len(piece), 0
