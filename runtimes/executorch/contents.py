"""The weights of an artifact: trained ones from a checkpoint, or random ones and the recipe of them.

8da4w: 4-bit weights with a bfloat16 scale per group, an 8-bit embedding with a scale per row. XNNPACK keeps group
scales as bfloat16, so weights are rounded with the scale that will be used, not with a finer one. 8da8w: 8-bit weights
with a float32 scale per row.

Random weights are finite and made at memory speed: cut from a few pools, each from a start of its own. In their recipe
(`nas.measure.runtimes.recipe`) the header is the artifact's own header and its programs, a few KB each; recipe.h makes
the same bytes. Pools:

    bytes 0 COUNT        random bytes: weights in 4 and 8 bits
    f32 SHIFT COUNT      uniform numbers: random integers of 24 bits over 2^SHIFT
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.measure.runtimes.base import Floats
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.executorch.chain import Method
from nas.measure.runtimes.executorch.programs import GROUP, Constant, Format
from nas.measure.runtimes.recipe import Bytes, Fill, Recipe, uniform_floats

Part = TypeVar("Part", covariant=True)


class Contents(Protocol[Part]):
    """Parts of a model's tensors: their bytes, or how to draw them."""

    def constant(self, method: Method, constant: Constant) -> tuple[Part, ...]:
        """Returns the constant as XNNPACK reads it, in `constant_sizes` bytes: of a matrix weights, then scales."""

    def vector(self, tensor: str, length: int) -> Part:
        """Returns a float32 vector of the state dict that the runner itself reads."""

    def embedding(self, vocab: int, d_model: int) -> tuple[Part, Part]:
        """Returns rows in int8, and float32 scales."""


def constant_sizes(constant: Constant, form: Format) -> tuple[int, ...]:
    """Returns the bytes of each part of a constant of a program with a format."""
    count = math.prod(constant.shape)
    if constant.role != "int4":
        return (count * 4,)
    rows, columns = constant.shape
    return count * form.bits // 8, rows * form.scales(columns) * (2 if form.bits == 4 else 4)


class CheckpointContents(CheckpointFile):
    """Contents from a checkpoint."""

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        """Returns a constant's stored bytes.

        Raises:
            InvalidInput: the tensor is missing, of another shape, or not finite.
        """
        if constant.role == "fill":
            return (np.full(constant.shape, constant.value, "<f4").tobytes(),)
        values = self.trained(method, constant)
        if constant.role == "int4":
            return encoded(*quantise(values, method.program.format), method.program.format)
        return (np.ascontiguousarray(-np.exp(values) if constant.role == "decay" else values, "<f4").tobytes(),)

    def vector(self, tensor: str, length: int) -> bytes:
        return self._read(tensor, (), (length,)).astype("<f4").tobytes()

    def embedding(self, vocab: int, d_model: int) -> tuple[bytes, bytes]:
        rows, scales = quantise_rows(self.table(vocab, d_model))
        return rows.tobytes(), scales.astype("<f4").tobytes()

    def table(self, vocab: int, d_model: int) -> Floats:
        """Returns the embedding, as trained."""
        return self._read("embed.weight", (), (vocab, d_model))

    def trained(self, method: Method, constant: Constant) -> Floats:
        """Returns the tensor that `constant` is, as trained."""
        cut: tuple[Any, ...] = ()
        if method.expert is not None:
            cut = (method.expert,)
        elif constant.rows is not None:
            cut = (slice(*constant.rows),)
        elif constant.column is not None:
            cut = (slice(None), constant.column)
        shape = constant.shape[:1] if constant.shape[1:] == (1,) else constant.shape
        return self._read(method.tensor(constant), cut, shape).reshape(constant.shape)

    def _read(self, name: str, cut: tuple[Any, ...], shape: tuple[int, ...]) -> Floats:
        values = self.floats(name, cut)
        if values.shape != shape:
            raise InvalidInput(f"{name} gives shape {values.shape}, the layout needs {shape}", where=str(self.path))
        return values


@dataclass(frozen=True, slots=True)
class ValuePool:
    """Random numbers that parts are cut from.

    Args:
        kind: of numbers.
        shift: of floats, how many bits the integers are shifted down.
        count: of numbers.
    """

    kind: Literal["bytes", "f32"]
    shift: int
    count: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * (1 if self.kind == "bytes" else 4)

    def describe(self) -> str:
        return f"{self.kind} {self.shift} {self.count}"

    def shape(self, raw: Bytes) -> Bytes:
        return raw if self.kind == "bytes" else uniform_floats(raw, self.shift)


_STD = 0.02
"""Standard deviation of matrix entries: the usual initialisation, so activations stay as in a fresh model."""
_INT4_SCALE = _STD / 4.61
"""Divided by the standard deviation of uniform 4-bit values."""
_INT8_SCALE = _STD / 73.9
"""Divided by the standard deviation of uniform 8-bit values."""
_POOL_BYTES = 16 << 20
_QUANTA = ValuePool("bytes", 0, _POOL_BYTES)
_MATRIX = ValuePool("f32", 28, _POOL_BYTES // 4)
"""A standard deviation of 0.018."""
_TAPS = ValuePool("f32", 24, _POOL_BYTES // 4)
"""Short filters: 0.29."""
_UNIT = 64


class RandomContents:
    """Random contents, as fills of a recipe; `pools` are those that were asked for."""

    def __init__(self) -> None:
        self._pools: dict[ValuePool, int] = {}

    @property
    def pools(self) -> tuple[ValuePool, ...]:
        """The pools by number."""
        return tuple(self._pools)

    def constant(self, method: Method, constant: Constant) -> tuple[Fill, ...]:
        form = method.program.format
        sizes, name = constant_sizes(constant, form), f"{method.tensor(constant)}:{method.expert}:{constant.name}"
        if constant.role == "int4" and form.bits == 8:
            return self._tile(name, _QUANTA, sizes[0]), _same(sizes[1], _INT8_SCALE)
        if constant.role == "int4":
            scale = bfloat16_bytes(np.full(2, _INT4_SCALE, np.float32))
            return self._tile(name, _QUANTA, sizes[0]), _word(sizes[1], scale)
        return (self._floats(constant, name, sizes[0]),)

    def vector(self, tensor: str, length: int) -> Fill:
        """Returns zeros, where sinks and expert biases start, or ones, where RoPE's divisors do."""
        return _same(4 * length, 1.0 if "rope_" in tensor else 0.0)

    def embedding(self, vocab: int, d_model: int) -> tuple[Fill, Fill]:
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

    def _tile(self, name: str, pool: ValuePool, size: int) -> Fill:
        start = zlib.crc32(name.encode()) % (_POOL_BYTES // _UNIT) * _UNIT
        return Fill(size, "tile", self._pools.setdefault(pool, len(self._pools)), start)


class DrawnContents:
    """Random contents as bytes: those of an artifact if they are read in its order."""

    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, RandomContents()

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        return tuple(map(self._draw, self._random.constant(method, constant)))

    def vector(self, tensor: str, length: int) -> bytes:
        return self._draw(self._random.vector(tensor, length))

    def embedding(self, vocab: int, d_model: int) -> tuple[bytes, bytes]:
        rows, scales = self._random.embedding(vocab, d_model)
        return self._draw(rows), self._draw(scales)

    def _draw(self, fill: Fill) -> bytes:
        return b"".join(Recipe(self._seed, b"", self._random.pools, (fill,), alignment=1).content())


def _same(size: int, value: float) -> Fill:
    return _word(size, np.array([value], "<f4").tobytes())


def _word(size: int, content: bytes) -> Fill:
    return Fill(size, "word", word=int.from_bytes(content, "little"))


def quantise(weights: Floats, form: Format) -> tuple[NDArray[np.int8], Floats]:
    """Returns weights [O, I] as values [O, I] and scales [O, scales of a row]."""
    if form.bits == 4:
        return quantise_int4(weights, form.group)
    values, scales = quantise_rows(weights)
    return values, scales[:, None]


def dequantise(values: NDArray[np.int8], scales: Floats) -> Floats:
    """Returns the weights that `quantise` stored."""
    groups = values.reshape(*scales.shape, -1).astype(np.float32)
    return (groups * scales[..., None]).reshape(values.shape)


def encoded(values: NDArray[np.int8], scales: Floats, form: Format) -> tuple[bytes, bytes]:
    """Returns values and scales as XNNPACK reads them."""
    if form.bits == 4:
        return pack_int4(values), bfloat16_bytes(scales)
    return values.tobytes(), scales.astype("<f4").tobytes()


def decoded(parts: tuple[bytes, ...], shape: tuple[int, ...], form: Format) -> tuple[NDArray[np.int8], Floats]:
    """Returns what `encoded` stored of a matrix [O, I]."""
    values, scales = parts
    if form.bits == 4:
        return unpack_int4(values).reshape(shape), bfloat16_floats(scales).reshape(shape[0], -1)
    return np.frombuffer(values, np.int8).reshape(shape), np.frombuffer(scales, "<f4").reshape(shape[0], -1)


def quantise_int4(weights: Floats, group: int = GROUP) -> tuple[NDArray[np.int8], Floats]:
    """Returns weights [O, I] as values in -8..7 [O, I] and scales [O, I / group]; a group of zeros has scale 1."""
    groups = weights.reshape(len(weights), -1, group)
    scales = round_bfloat16(np.abs(groups).max(-1) / np.float32(7.5))
    scales[scales == 0] = 1
    values = np.clip(np.rint(groups / scales[..., None]), -8, 7).astype(np.int8)
    return values.reshape(weights.shape), scales


def quantise_rows(table: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Returns a table [V, D] as values in -127..127 and scales [V]; a row of zeros has scale 1."""
    scales = (np.abs(table).max(-1) / np.float32(127)).astype(np.float32)
    scales[scales == 0] = 1
    return np.clip(np.rint(table / scales[:, None]), -127, 127).astype(np.int8), scales


def pack_int4(values: NDArray[np.int8]) -> bytes:
    """Packs two values a byte, the even column in the low half, each plus 8."""
    shifted = (values + 8).astype(np.uint8).reshape(-1)
    return (shifted[1::2] << 4 | shifted[::2]).tobytes()


def unpack_int4(content: bytes) -> NDArray[np.int8]:
    """Returns the values that `pack_int4` packed, in one row."""
    packed = np.frombuffer(content, np.uint8)
    return np.stack([packed & 15, packed >> 4], -1).reshape(-1).astype(np.int8) - np.int8(8)


def round_bfloat16(values: Floats) -> Floats:
    """Rounds to the nearest bfloat16, ties to even; finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).copy()


def bfloat16_bytes(values: Floats) -> bytes:
    """Returns `values` as bfloat16, little endian."""
    return (round_bfloat16(values).view(np.uint32) >> 16).astype("<u2").tobytes()


def bfloat16_floats(content: bytes) -> Floats:
    """Returns the values of `bfloat16_bytes`."""
    return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
