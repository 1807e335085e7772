"""The part of a GGUF file before its first tensor: keys and values, then names, shapes and types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from nas.runtimes.llama_cpp.recipe import ALIGNMENT
from nas.runtimes.llama_cpp.tensors import Tensor, stored_bytes


def header_bytes(writer: GGUFWriter, scratch: Path, stored: Iterable[tuple[Tensor, GGMLQuantizationType]]) -> bytes:
    """The header, padding included.

    Args:
        writer: opened for `scratch`; has the keys and values already.
        scratch: gguf's writer wants a file.
        stored: the tensors in file order, with their types.
    """
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
