"""Trained weights: a safetensors file of `nas.nn.model`'s state dict, as the constants of programs."""

from __future__ import annotations

from typing import Any

import numpy as np

from nas.core.errors import InvalidInput
from nas.runtimes.checkpoint_file import CheckpointFile, Floats
from nas.runtimes.executorch.chain import Method
from nas.runtimes.executorch.numbers import bfloat16_bytes, pack_int4, quantise_int4, quantise_rows
from nas.runtimes.executorch.programs import Constant


class CheckpointContents(CheckpointFile):
    """Contents from a checkpoint."""

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        """See `Contents.constant`.

        Raises:
            InvalidInput: the tensor is missing, of another shape, or not finite.
        """
        if constant.role == "fill":
            return (np.full(constant.shape, constant.value, "<f4").tobytes(),)
        values = self.trained(method, constant)
        if constant.role == "int4":
            rounded, scales = quantise_int4(values)
            return pack_int4(rounded), bfloat16_bytes(scales)
        return (np.ascontiguousarray(-np.exp(values) if constant.role == "decay" else values, "<f4").tobytes(),)

    def vector(self, tensor: str, length: int) -> bytes:
        """See `Contents.vector`."""
        return self._read(tensor, (), (length,)).astype("<f4").tobytes()

    def embedding(self, vocab: int, d_model: int) -> tuple[bytes, bytes]:
        """See `Contents.embedding`."""
        rows, scales = quantise_rows(self.table(vocab, d_model))
        return rows.tobytes(), scales.astype("<f4").tobytes()

    def table(self, vocab: int, d_model: int) -> Floats:
        """The embedding, as trained."""
        return self._read("embed.weight", (), (vocab, d_model))

    def trained(self, method: Method, constant: Constant) -> Floats:
        """The tensor that `constant` is, as trained."""
        cut: tuple[Any, ...] = ()
        if method.expert is not None:
            cut = (method.expert,)
        elif constant.rows is not None:
            cut = (slice(*constant.rows),)
        elif constant.column is not None:
            cut = (slice(None), constant.column)
        shape = constant.shape[:1] if constant.shape[1:] == (1,) else constant.shape
        return self._read(method.tensor(constant), cut, shape).reshape(constant.shape)

    def _read(self, name: str, cut: tuple[Any, ...], shape: tuple[int, ...]) -> Floats:
        values = self.floats(name, cut)
        if values.shape != shape:
            raise InvalidInput(f"{name} gives shape {values.shape}, the layout needs {shape}", where=str(self.path))
        return values
