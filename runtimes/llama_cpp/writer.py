"""Writes a layout as a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.runtimes.base import Checkpoint, RandomWeights, Weights
from nas.runtimes.checkpoint_file import CheckpointFile, StateDict
from nas.runtimes.llama_cpp.checkpoint import CheckpointTensors
from nas.runtimes.llama_cpp.layers import mixers
from nas.runtimes.llama_cpp.metadata import CONTEXT, add_metadata
from nas.runtimes.llama_cpp.random_weights import random_recipe
from nas.runtimes.llama_cpp.recipe import ALIGNMENT
from nas.runtimes.llama_cpp.support import Quantisation, architecture
from nas.runtimes.llama_cpp.tensors import Tensor, storage_type, stored_bytes, tensors
from nas.runtimes.llama_cpp.vocabulary import Vocabulary
from nas.runtimes.writing import Piece, Written, hashed, replacing, write_drawn

WRITER_VERSION = "2"
"""Raise it with every change of this package that changes the bytes of a file."""

_Stored = list[tuple[Tensor, GGMLQuantizationType]]


def write_gguf(
    layout: Layout,
    quantisation: Quantisation,
    weights: Weights | StateDict,
    destination: Path,
    *,
    recipe: bool = False,
    vocabulary: Vocabulary | None = None,
    context: int = CONTEXT,
) -> Written:
    """Writes the file, or the recipe of it, beside `destination` and renames it into place.

    Args:
        layout: what to write.
        quantisation: of the matrices.
        weights: random, trained, or any other state dict of `nas.nn.model`.
        destination: where to.
        recipe: write the recipe only, where weights are random.
        vocabulary: for text; None: the file knows token ids only, which is all that measuring needs.
        context: tokens that the model is meant for.

    Raises:
        Unsupported: neither build carries the layout.
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, most often for want of space.
    """
    arch = architecture(layout)
    stored = [(tensor, storage_type(tensor, layout, quantisation)) for tensor in tensors(layout, arch)]
    with replacing(destination) as partial:
        with closing(GGUFWriter(partial, arch)) as writer:
            add_metadata(writer, layout, quantisation, vocabulary, context)
            header = _header(writer, partial, stored)
        if isinstance(weights, RandomWeights):
            return write_drawn(random_recipe(header, stored, weights.seed), partial, recipe=recipe)
        with CheckpointFile(weights.path) if isinstance(weights, Checkpoint) else nullcontext(weights) as state:
            contents = CheckpointTensors(state)
            contents.check(tensor for tensor, _ in stored)
            return Written(hashed(_trained(header, layout, arch, stored, contents), partial))


def _header(writer: GGUFWriter, scratch: Path, stored: _Stored) -> bytes:
    """The file up to its first tensor; gguf's writer wants a file, which is `scratch`."""
    for tensor, storage in stored:
        # The dtype only has to differ from uint8, which would say that `shape` counts bytes.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), stored_bytes(tensor.shape, storage), raw_dtype=storage
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.flush()
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
