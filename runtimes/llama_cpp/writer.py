"""Writes a layout as a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.runtimes.base import Checkpoint, Weights
from nas.runtimes.llama_cpp.checkpoint import CheckpointTensors
from nas.runtimes.llama_cpp.layers import mixers
from nas.runtimes.llama_cpp.metadata import add_metadata
from nas.runtimes.llama_cpp.random_weights import random_recipe
from nas.runtimes.llama_cpp.recipe import ALIGNMENT
from nas.runtimes.llama_cpp.support import Quantisation, architecture
from nas.runtimes.llama_cpp.tensors import Tensor, storage_type, stored_bytes, tensors

WRITER_VERSION = "2"
"""Raise it with every change of this package that changes the bytes of a file."""

Piece = bytes | memoryview
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
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}.partial")
    with _write_errors_told(destination, partial):
        header = _header(partial, layout, arch, stored, quantisation)
        if isinstance(weights, Checkpoint):
            with CheckpointTensors(weights.path) as checkpoint:
                checkpoint.check(tensor for tensor, _ in stored)
                written = Written(_hashed(_trained(header, layout, arch, stored, checkpoint), partial))
        else:
            drawn = random_recipe(header, stored, weights.seed)
            if recipe:
                written = Written(_hashed(drawn.content()), _hashed([drawn.to_bytes()], partial))
            else:
                written = Written(_hashed(drawn.content(), partial))
        partial.replace(destination)
    return written


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_gguf` wrote.

    Args:
        file: the model file.
        recipe: what was written instead of it.
    """

    file: PlanFile
    recipe: PlanFile | None = None


def _hashed(pieces: Iterable[Piece], path: Path | None = None) -> PlanFile:
    """Hash and size of `pieces`, which are written to `path` where there is one."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") if path else contextlib.nullcontext() as out:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            if out:
                out.write(piece)
    return PlanFile(sha256=digest.hexdigest(), size=size)


@contextlib.contextmanager
def _write_errors_told(destination: Path, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InfrastructureFailed(f"cannot write {destination}: {error}; is the disk full?") from error
    finally:
        partial.unlink(missing_ok=True)


def _header(scratch: Path, layout: Layout, arch: str, stored: _Stored, quantisation: Quantisation) -> bytes:
    """The file up to its first tensor; gguf's writer wants a file, which is `scratch`."""
    writer = GGUFWriter(scratch, arch)
    add_metadata(writer, layout, quantisation)
    for tensor, storage in stored:
        # The dtype only has to differ from uint8, which would say that `shape` counts bytes.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), stored_bytes(tensor.shape, storage), raw_dtype=storage
        )
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    header = scratch.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


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
