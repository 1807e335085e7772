"""Writes a layout as a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.runtimes.base import Checkpoint, Weights
from nas.runtimes.llama_cpp.checkpoint import CheckpointTensors
from nas.runtimes.llama_cpp.header import header_bytes
from nas.runtimes.llama_cpp.layers import mixers
from nas.runtimes.llama_cpp.metadata import add_metadata
from nas.runtimes.llama_cpp.random_weights import random_recipe
from nas.runtimes.llama_cpp.recipe import ALIGNMENT
from nas.runtimes.llama_cpp.support import Quantisation, architecture
from nas.runtimes.llama_cpp.tensors import Tensor, storage_type, tensors
from nas.runtimes.writing import Piece, Written, hashed, replacing, write_drawn

WRITER_VERSION = "2"
"""Raise it with every change of this package that changes the bytes of a file."""

_Stored = list[tuple[Tensor, GGMLQuantizationType]]


def write_gguf(
    layout: Layout, quantisation: Quantisation, weights: Weights, destination: Path, *, recipe: bool = False
) -> Written:
    """Writes the file, or the recipe of it, beside `destination` and renames it into place.

    Args:
        layout: what to write.
        quantisation: of the matrices.
        weights: random or trained.
        destination: where to.
        recipe: write the recipe only, where weights are random.

    Raises:
        Unsupported: neither build carries the layout.
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, most often for want of space.
    """
    arch = architecture(layout)
    stored = [(tensor, storage_type(tensor, layout, quantisation)) for tensor in tensors(layout, arch)]
    with replacing(destination) as partial:
        header = _header(partial, layout, arch, stored, quantisation)
        if isinstance(weights, Checkpoint):
            with CheckpointTensors(weights.path) as checkpoint:
                checkpoint.check(tensor for tensor, _ in stored)
                return Written(hashed(_trained(header, layout, arch, stored, checkpoint), partial))
        return write_drawn(random_recipe(header, stored, weights.seed), partial, recipe=recipe)


def _header(scratch: Path, layout: Layout, arch: str, stored: _Stored, quantisation: Quantisation) -> bytes:
    writer = GGUFWriter(scratch, arch)
    add_metadata(writer, layout, quantisation)
    return header_bytes(writer, scratch, stored)


def _trained(
    header: bytes, layout: Layout, arch: str, stored: _Stored, checkpoint: CheckpointTensors
) -> Iterator[Piece]:
    yield header
    for tensor, storage in stored:
        data = checkpoint.data(tensor, storage)
        yield (_turned(data, tensor, layout) if arch == "llama" else data).data
        yield bytes(-data.size % ALIGNMENT)


def _turned(data: NDArray[np.uint8], tensor: Tensor, layout: Layout) -> NDArray[np.uint8]:
    """Rows of a head in the order that RoPE of `llama` pairs them.

    It turns neighbouring numbers of a head; the others (and nas.nn) number i and number i + head_dim / 2. Blocks lie
    along rows, so stored rows can be reordered.
    """
    if tensor.part not in ("attn_q", "attn_k"):
        return data
    head_dim = mixers(layout)[0].int("head_dim")
    halves = data.reshape(-1, 2, head_dim // 2, data.size // tensor.shape[0])
    return halves.swapaxes(1, 2).reshape(-1)
