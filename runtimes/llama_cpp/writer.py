"""Writes a layout as a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

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
from nas.runtimes.llama_cpp.random_weights import RandomTensors
from nas.runtimes.llama_cpp.support import Quantisation, architecture
from nas.runtimes.llama_cpp.tensors import Tensor, storage_type, stored_bytes, tensors

WRITER_VERSION = "1"
"""Raise it with every change of this package that changes the bytes of a file."""


class Contents(Protocol):
    """Where the bytes of tensors come from."""

    def data(self, tensor: Tensor, storage: GGMLQuantizationType, place: int) -> NDArray[np.uint8]:
        """The bytes of the tensor at `place` in the file, shape [stored bytes]."""


def write_gguf(layout: Layout, quantisation: Quantisation, weights: Weights, destination: Path) -> PlanFile:
    """Writes the file beside `destination` and renames it into place.

    Returns:
        Its hash and size.

    Raises:
        Unsupported: neither build carries the layout.
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, most often for want of space.
    """
    arch = architecture(layout)
    listed = list(tensors(layout, arch))
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}.partial")
    with _contents(weights, listed) as contents, _write_errors_told(destination, partial):
        _write(partial, layout, arch, listed, quantisation, contents)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = partial.stat().st_size
        partial.replace(destination)
    return PlanFile(sha256=digest, size=size)


@contextlib.contextmanager
def _contents(weights: Weights, listed: list[Tensor]) -> Iterator[Contents]:
    if isinstance(weights, Checkpoint):
        with CheckpointTensors(weights.path) as checkpoint:
            checkpoint.check(listed)
            yield checkpoint
    else:
        yield RandomTensors(weights.seed)


@contextlib.contextmanager
def _write_errors_told(destination: Path, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # numpy reports a short write as an OSError without errno
        raise InfrastructureFailed(f"cannot write {destination}: {error}; is the disk full?") from error
    finally:
        partial.unlink(missing_ok=True)


def _write(
    path: Path,
    layout: Layout,
    arch: str,
    listed: list[Tensor],
    quantisation: Quantisation,
    contents: Contents,
) -> None:
    writer = GGUFWriter(path, arch)
    add_metadata(writer, layout, quantisation)
    stored = [(tensor, storage_type(tensor, layout, quantisation)) for tensor in listed]
    for tensor, storage in stored:
        # The dtype only has to differ from uint8, which would say that `shape` counts bytes.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), stored_bytes(tensor.shape, storage), raw_dtype=storage
        )
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for place, (tensor, storage) in enumerate(stored):
            data = contents.data(tensor, storage, place)
            writer.write_tensor_data(_turned(data, tensor, layout) if arch == "llama" else data)


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
