"""Safetensors files written tensor by tensor, for models that do not fit into memory.

The format (huggingface/safetensors, README): the header's length in 8 bytes, the header in JSON, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nas.core.plan import PlanFile
from nas.runtimes.writing import Piece, hashed, replacing

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the file before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, planned: Sequence[Planned], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> PlanFile:
    """Writes the file atomically; `tensors` come in the order of `planned`, and one at a time is in memory.

    Raises:
        InfrastructureFailed: it cannot be written, most often for want of space.
    """
    with replacing(path) as partial:
        return hashed(_pieces(planned, tensors, metadata), partial)


def _pieces(planned: Sequence[Planned], tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> Iterator[Piece]:
    about: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for one in planned:
        about[one.name] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [end, end + one.size],
        }
        end += one.size
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for one, tensor in zip(planned, tensors, strict=True):
        assert tuple(tensor.shape) == one.shape, f"{one.name}: {tuple(tensor.shape)} where {one.shape} was planned"
        yield tensor.to(one.dtype).contiguous().view(-1).view(torch.uint8).numpy().data


def shards(planned: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """`planned` in files of at most `limit` bytes of data; a larger tensor has a file of its own."""
    files: list[list[Planned]] = [[]]
    size = 0
    for one in planned:
        if files[-1] and size + one.size > limit:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.size
    return files
