"""Which experts llama.cpp chose, read from its graph while it computes; within the binding's process only."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PREFIX = b"ffn_moe_topk-"
"""`build_moe_ffn` in src/llama-graph.cpp names the chosen experts of layer N so."""

Choices = dict[int, NDArray[np.int64]]
"""Depth -> experts of each token, [T, top_k]."""


class ExpertWatch:
    """A `ggml_backend_sched_eval_callback` that keeps the choices of every mixture of experts.

    The graph is computed up to each choice and then on: other nodes and their order stay as they are.

    Args:
        library_folder: holds the build's libggml-base.so and libggml-cpu.so.
    """

    def __init__(self, library_folder: Path) -> None:
        base = ctypes.CDLL(str(library_folder / "libggml-base.so"))
        self._name, self._rows, self._count = base.ggml_get_name, base.ggml_nrows, base.ggml_nelements
        self._element = ctypes.CDLL(str(library_folder / "libggml-cpu.so")).ggml_get_i32_nd
        for function, result in (
            (self._name, ctypes.c_char_p),
            (self._rows, ctypes.c_int64),
            (self._count, ctypes.c_int64),
        ):
            function.argtypes, function.restype = [ctypes.c_void_p], result
        self._element.argtypes, self._element.restype = [ctypes.c_void_p, *[ctypes.c_int] * 4], ctypes.c_int32
        self._chunks: dict[int, list[list[list[int]]]] = {}

    def __call__(self, tensor: int, ask: bool, data: int | None) -> bool:
        """Asked: whether a node is wanted. Told that it is computed: reads it, and lets the graph go on."""
        name: bytes = self._name(tensor)
        wanted = name.startswith(_PREFIX)
        if wanted and not ask:
            rows: int = self._rows(tensor)
            top_k: int = self._count(tensor) // rows
            chosen = [[self._element(tensor, k, row, 0, 0) for k in range(top_k)] for row in range(rows)]
            self._chunks.setdefault(int(name.removeprefix(_PREFIX)), []).append(chosen)
        return wanted if ask else True

    def choices(self) -> Choices:
        """All choices so far."""
        return {layer: np.concatenate(chunks).astype(np.int64) for layer, chunks in self._chunks.items()}
