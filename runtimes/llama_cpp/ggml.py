"""ggml's own quantiser, so that trained weights become exactly the blocks that llama.cpp's tool would write."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray


class Quantiser:
    """`ggml_quantize_chunk` of a build's libggml-base.

    Args:
        library_folder: holds libggml-base.so.
    """

    def __init__(self, library_folder: Path) -> None:
        library = ctypes.CDLL(str(library_folder / "libggml-base.so"))
        self._chunk = library.ggml_quantize_chunk
        self._chunk.restype = ctypes.c_size_t
        floats, raw, count = ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_int64
        self._chunk.argtypes = [ctypes.c_int, floats, raw, count, count, count, floats]

    def quantise(self, values: NDArray[np.float32], storage: GGMLQuantizationType, size: int) -> NDArray[np.uint8]:
        """Blocks of `values`, rows along the last dimension: [size] bytes."""
        source = np.ascontiguousarray(values)
        out = np.empty(size, np.uint8)
        columns = source.shape[-1]
        written = self._chunk(
            int(storage),
            source.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            out.ctypes.data_as(ctypes.c_void_p),
            0,
            source.size // columns,
            columns,
            None,
        )
        assert written == size, f"ggml wrote {written} bytes where the file has {size}"
        return out
