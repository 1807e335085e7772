"""Writes a layout as a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.runtimes.base import Checkpoint, Weights
from nas.runtimes.llama_cpp.checkpoint import CheckpointTensors
from nas.runtimes.llama_cpp.random_weights import RandomTensors
from nas.runtimes.llama_cpp.support import Quantisation, Stock, stock
from nas.runtimes.llama_cpp.tensors import Tensor, storage_type, stored_bytes, tensors

WRITER_VERSION = "1"
"""Raise it with every change of this package that changes the bytes of a file."""

_FILE_TYPE = {"f32": 0, "f16": 1, "q4_0": 2}  # llama_ftype of include/llama.h
_QUANTISATION_VERSION = 2  # GGML_QNT_VERSION
_CONTEXT = 32768
_RMS_EPS = 1e-5  # of nas.nn.primitives.RMSNorm, and of the published LFM2


class Contents(Protocol):
    """Where the bytes of tensors come from."""

    def data(self, tensor: Tensor, storage: GGMLQuantizationType, place: int) -> NDArray[np.uint8]:
        """The bytes of the tensor at `place` in the file, shape [stored bytes]."""


def write_gguf(layout: Layout, quantisation: Quantisation, weights: Weights, destination: Path) -> PlanFile:
    """Writes the file beside `destination` and renames it into place.

    Returns:
        Its hash and size.

    Raises:
        Unsupported: no stock architecture carries the layout.
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, most often for want of space.
    """
    terms = stock(layout)
    listed = list(tensors(layout, terms))
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}.partial")
    with _contents(weights, listed) as contents, _write_errors_told(destination, partial):
        _write(partial, layout, terms, listed, quantisation, contents)
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
    terms: Stock,
    listed: list[Tensor],
    quantisation: Quantisation,
    contents: Contents,
) -> None:
    writer = GGUFWriter(path, terms.arch)
    _metadata(writer, layout, terms, quantisation)
    stored = [(tensor, storage_type(tensor, layout, terms, quantisation)) for tensor in listed]
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
            writer.write_tensor_data(_turned(contents.data(tensor, storage, place), tensor, terms))


def _turned(data: NDArray[np.uint8], tensor: Tensor, terms: Stock) -> NDArray[np.uint8]:
    """Rows of a head in the order that RoPE of this architecture pairs them.

    `llama` turns neighbouring numbers of a head, the others (and nas.nn) number i and number i + head_dim / 2. Blocks
    lie along rows, so stored rows can be reordered.
    """
    if terms.arch != "llama" or tensor.part not in ("attn_q", "attn_k"):
        return data
    halves = data.reshape(-1, 2, terms.head_dim // 2, data.size // tensor.shape[0])
    return halves.swapaxes(1, 2).reshape(-1)


def _metadata(writer: GGUFWriter, layout: Layout, terms: Stock, quantisation: Quantisation) -> None:
    writer.add_file_type(_FILE_TYPE[quantisation])
    writer.add_quantization_version(_QUANTISATION_VERSION)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(layout.vocab)
    writer.add_block_count(layout.depth)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(layout.d_model)
    writer.add_layer_norm_rms_eps(_RMS_EPS)
    writer.add_rope_freq_base(terms.rope_theta)
    writer.add_head_count(terms.heads)
    if terms.kernel:
        writer.add_shortconv_l_cache(terms.kernel)
        writer.add_head_count_kv(list(terms.kv_heads))
    else:
        writer.add_head_count_kv(terms.kv_heads[0])
        writer.add_key_length(terms.head_dim)
        writer.add_value_length(terms.head_dim)
    if terms.ff:
        writer.add_feed_forward_length(terms.ff)
    if terms.experts:
        experts, top_k, width = terms.experts
        writer.add_expert_count(experts)
        writer.add_expert_used_count(top_k)
        writer.add_expert_feed_forward_length(width)
        writer.add_leading_dense_block_count(terms.dense_lead)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
