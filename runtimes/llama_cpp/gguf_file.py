"""GGUF files that others wrote: their keys and tensors, read without trust.

Every count and length is compared with the bytes that the file has before anything of that size is made, so a damaged
or hostile file costs little time and memory. A model may be split into shards, `NAME-00001-of-0000N.gguf`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from nas.core.downloads import download_problem
from nas.core.errors import InvalidInput, Unsupported

_VERSIONS = (2, 3)
_HEADER_BYTES = 1 << 28
"""Longest header; those of the largest vocabularies have some 30 MB."""
_MOST_TENSORS = 1 << 17
_MOST_KEYS = 1 << 12
_MOST_VALUES = 1 << 22
"""Most values of an array."""
_MOST_SHARDS = 1 << 10
_MOST_DIMENSIONS = 4
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_INCOMPLETE = "it is incomplete or damaged: download it again"

_NUMBERS: Mapping[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}

Value = bool | int | float | str | list[Any]

RETRIEVAL = "hilnas.retrieval"
"""Key of a late-interaction model's settings, JSON."""


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Args:
        path: of the file.
        kind: number of its type, `ggml_type` of ggml.h.
        shape: slowest dimension first.
        offset: of its bytes in the file.
        size: its bytes; 0 where its type is not known.
    """

    path: Path
    kind: int
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def type_name(self) -> str:
        """The name of its type, such as Q4_0."""
        return GGMLQuantizationType(self.kind).name if self.kind in _TYPES else f"number {self.kind}"


_TYPES = {int(kind): kind for kind in GGMLQuantizationType}


class Header(NamedTuple):
    """The header of a model that generates text.

    Args:
        arch: name of its architecture.
        vocab: size of its vocabulary; None: it is not named.
        tokenizer: kind of its tokenizer; "none": it holds none.
    """

    arch: str
    vocab: int | None
    tokenizer: str


@dataclass(frozen=True)
class GgufFile:
    """A model in one file or several shards.

    Args:
        files: all of them, in order.
        fields: keys of the first one, and their values.
        tensors: of all files, by name.
    """

    files: tuple[Path, ...]
    fields: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]

    @staticmethod
    def read(path: Path) -> GgufFile:
        """Reads the headers of a model's file, or of all its shards where `path` is the first one.

        Raises:
            InvalidInput: it is no complete GGUF file, or shards are missing or do not belong together.
        """
        first = _Reader.open(path)
        count = first.fields.get("split.count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count <= 1:
            return GgufFile((path,), first.fields, first.tensors)
        readers = [first, *(_Reader.open(file) for file in _other_shards(path, count))]
        tensors: dict[str, StoredTensor] = {}
        for number, reader in enumerate(readers):
            place = str(reader.path)
            if (reader.fields.get("split.no"), reader.fields.get("split.count")) != (number, count):
                raise InvalidInput(f"is not shard {number + 1} of {count}, as its name says", where=place)
            if both := sorted(tensors.keys() & reader.tensors.keys()):
                raise InvalidInput(f"holds {both[0]}, as another shard does", where=place)
            tensors |= reader.tensors
        expected = first.fields.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise InvalidInput(f"its shards hold {len(tensors)} tensors, not {expected}", where=str(path))
        return GgufFile(tuple(reader.path for reader in readers), first.fields, tensors)

    @cached_property
    def header(self) -> Header:
        """What kind of model it is.

        Raises:
            InvalidInput: it names no architecture.
            Unsupported: it holds something else than a model that generates text.
        """
        where = str(self.files[0])
        arch, kind = self.fields.get("general.architecture", ""), self.fields.get("general.type", "model")
        if not isinstance(arch, str) or not arch:
            raise InvalidInput("not a GGUF file of a model: it names no architecture", where=where)
        if kind != "model" or arch == "clip":
            raise Unsupported(f"holds no model that generates text, but of type {kind} ({arch})", where=where)
        if self.fields.get(f"{arch}.attention.causal") is False and RETRIEVAL not in self.fields:
            raise Unsupported(f"{arch} generates no text: it reads a text from both sides, for embeddings", where=where)
        vocab = self.fields.get(f"{arch}.vocab_size")
        tokenizer = str(self.fields.get("tokenizer.ggml.model", "none"))
        return Header(arch, vocab if isinstance(vocab, int) else None, tokenizer)

    def values(self, name: str) -> NDArray[np.float32]:
        """Returns a tensor in float32, dequantised; exact for F32, F16 and BF16.

        Raises:
            Unsupported: its type is not known.
            InvalidInput: it cannot be read.
        """
        tensor = self.tensors[name]
        kind = _TYPES.get(tensor.kind)
        where = str(tensor.path)
        if kind is None:
            raise Unsupported(f"{name} has a type that is not read: {tensor.type_name}", where=where)
        rows = math.prod(tensor.shape[:-1])
        try:
            stored = np.fromfile(tensor.path, np.uint8, tensor.size, offset=tensor.offset)
            return dequantize(stored.reshape(rows, -1), kind).reshape(tensor.shape).astype(np.float32, copy=False)
        except NotImplementedError:
            raise Unsupported(f"{name} has a type that is not read: {tensor.type_name}", where=where) from None
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{name} cannot be read: {error}", where=where) from error


def is_gguf(path: Path) -> bool:
    """Returns whether a file is meant as one: by its name, or its first bytes."""
    if not path.is_file():
        return path.suffix.lower() == ".gguf"
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF"


def read_header(path: Path) -> Header:
    """Reads what kind of model a GGUF file holds; see `GgufFile.read` and `GgufFile.header` for what is raised."""
    return GgufFile.read(path).header


def _other_shards(path: Path, count: int) -> Iterator[Path]:
    """Yields the files of all shards but the first."""
    match = _SHARD.fullmatch(path.name)
    if count > _MOST_SHARDS:
        raise InvalidInput(f"has {count:,} shards: at most {_MOST_SHARDS:,} are read", where=str(path))
    if match is None or (int(match[2]), int(match[3])) != (1, count):
        name = f"NAME-00001-of-{count:05}.gguf"
        raise InvalidInput(f"is one of {count} shards: name the first one, {name}, beside the others", where=str(path))
    for number in range(2, count + 1):
        yield path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")


class _Reader:
    """Reads one file's header."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._size = file.seek(0, 2)
        file.seek(0)
        self.fields: dict[str, Value] = {}
        self.tensors: dict[str, StoredTensor] = {}
        if file.read(4) != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        if (version := self._number("<u4")) not in _VERSIONS:
            what = "for another byte order" if version > 1 << 16 else "not read"
            raise Unsupported(f"a GGUF file of version {version}: {what}", where=str(path))
        tensors, keys = self._number("<u8"), self._number("<u8")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._damaged(f"it names {tensors:,} tensors and {keys:,} keys")
        for _ in range(keys):
            name = self._text()
            if name in self.fields:
                raise self._damaged(f"it names {name!r} twice")
            self.fields[name] = self._value(self._kind())
        self._read_tensors(tensors)

    @staticmethod
    def open(path: Path) -> _Reader:
        """Reads the header of a file.

        Raises:
            InvalidInput: it is no complete GGUF file.
        """
        try:
            if not path.is_file():
                raise InvalidInput("no such file", where=str(path))
            with path.open("rb") as file:
                return _Reader(path, file)
        except OSError as error:
            raise InvalidInput(f"cannot be read: {error.strerror}", where=str(path)) from error

    def _read_tensors(self, count: int) -> None:
        infos = []
        for _ in range(count):
            name, dimensions = self._text(), self._number("<u4")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._damaged(f"{name!r} has {dimensions} dimensions")
            shape = tuple(reversed([self._number("<u8") for _ in range(dimensions)]))
            infos.append((name, shape, self._number("<u4"), self._number("<u8")))
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        for name, shape, kind, offset in infos:
            size = 0
            if kind in _TYPES:
                block, block_bytes = GGML_QUANT_SIZES[_TYPES[kind]]
                if shape[-1] % block:
                    raise self._damaged(f"rows of {name!r} are no multiple of {block}")
                size = math.prod(shape) // block * block_bytes
            if start + offset + size > self._size or name in self.tensors or not all(shape):
                what = "is named twice" if name in self.tensors else "lies behind the end of the file"
                raise self._damaged(f"{name!r} {what if all(shape) else 'is empty'}")
            self.tensors[name] = StoredTensor(self.path, kind, shape, start + offset, size)

    def _value(self, kind: GGUFValueType) -> Value:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._numbers(kind, 1)[0]  # type: ignore[no-any-return]
        kind, count = self._kind(), self._number("<u8")
        if kind == GGUFValueType.ARRAY or count > _MOST_VALUES:
            raise self._damaged(f"it has an array of {count:,} values")
        return [self._text() for _ in range(count)] if kind == GGUFValueType.STRING else self._numbers(kind, count)

    def _kind(self) -> GGUFValueType:
        number = self._number("<u4")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"it has a value of the unknown type {number}") from None

    def _numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = _NUMBERS[kind]
        values = np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
        # As decimals that name the same number: 1e-5, not 9.999999747378752e-06.
        return [float(str(value)) for value in values] if kind == GGUFValueType.FLOAT32 else list(values.tolist())

    def _text(self) -> str:
        try:
            return self._bytes(self._number("<u8")).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a text is no UTF-8") from None

    def _number(self, dtype: str) -> int:
        width = int(dtype[-1])
        return int(struct.unpack("<I" if width == 4 else "<Q", self._bytes(width))[0])

    def _bytes(self, count: int) -> bytes:
        if self._file.tell() + count > min(self._size, _HEADER_BYTES):
            raise self._damaged("it ends early" if self._size < _HEADER_BYTES else "its header is too long")
        return self._file.read(count)

    def _damaged(self, what: str) -> InvalidInput:
        problem = download_problem(self.path, f"{what}; {_INCOMPLETE}")
        return InvalidInput(f"not a GGUF file: {problem}", where=str(self.path))
