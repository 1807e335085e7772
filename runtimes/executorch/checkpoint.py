"""Trained weights: a safetensors file of `nas.nn.model`'s state dict, as the constants of programs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from nas.core.errors import InvalidInput
from nas.runtimes.executorch.chain import Method
from nas.runtimes.executorch.numbers import bfloat16_bytes, pack_int4, quantise_int4, quantise_rows
from nas.runtimes.executorch.programs import Constant

Floats = NDArray[np.float32]


class CheckpointContents(AbstractContextManager["CheckpointContents"]):
    """Contents from a checkpoint, read one tensor at a time.

    Args:
        path: the safetensors file.

    Raises:
        InvalidInput: `path` is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"not a safetensors file: {error}", where=str(path)) from error

    def __enter__(self) -> CheckpointContents:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def constant(self, method: Method, constant: Constant) -> tuple[bytes, ...]:
        """See `Contents.constant`.

        Raises:
            InvalidInput: the tensor is missing, of another shape, or not finite.
        """
        if constant.role == "fill":
            return (np.full(constant.shape, constant.value, "<f4").tobytes(),)
        values = self.floats(method, constant)
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

    def floats(self, method: Method, constant: Constant) -> Floats:
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
        if name not in self._file.keys():  # noqa: SIM118 - no mapping
            raise InvalidInput(f"checkpoint lacks {name}", where=str(self._path))
        try:
            whole = self._file.get_slice(name)
            values = np.asarray(whole[cut] if cut else whole[:], np.float32)
        except (SafetensorError, TypeError, AttributeError, IndexError) as error:
            raise InvalidInput(f"{name}: save it as float32 or float16: {error}", where=str(self._path)) from error
        if values.shape != shape:
            raise InvalidInput(f"{name} gives shape {values.shape}, the layout needs {shape}", where=str(self._path))
        if not np.isfinite(values).all():
            raise InvalidInput(f"{name} holds NaN or infinity", where=str(self._path))
        return values
