"""Checkpoints on disk: a safetensors file of `nas.model.nn.model`'s state dict."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from nas.core.errors import InvalidInput
from nas.measure.runtimes.base import Floats


class CheckpointFile:
    """The tensors of a checkpoint, read one at a time while the context is open.

    Args:
        path: the safetensors file.

    Raises:
        InvalidInput: `path` is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file: Any = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"not a safetensors file: {error}", where=str(path)) from error
        self._file = file
        self.names: frozenset[str] = frozenset(file.keys())
        self.place = str(path)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that exists."""
        return tuple(self._file.get_slice(name).get_shape())

    def floats(self, name: str, cut: tuple[Any, ...] = ()) -> Floats:
        """Returns a tensor, or the part of it that `cut` indexes.

        Raises:
            InvalidInput: it is missing, holds other than finite float16 or float32, or has no such part.
        """
        if name not in self.names:
            raise InvalidInput(f"checkpoint lacks {name}", where=str(self.path))
        try:
            whole = self._file.get_slice(name)
            values = np.asarray(whole[cut] if cut else whole[:], np.float32)
        except (SafetensorError, TypeError, AttributeError, IndexError) as error:
            raise InvalidInput(f"{name}: save it as float32 or float16: {error}", where=str(self.path)) from error
        if not np.isfinite(values).all():
            raise InvalidInput(f"{name} holds NaN or infinity", where=str(self.path))
        return values
