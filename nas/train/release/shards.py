"""Tensors of safetensors files, and of folders of transformers with one or several. Nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nas.core.downloads import download_problem
from nas.core.errors import InvalidInput, Unsupported

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are read."""
_INDEX_BYTES = 1 << 26


class _Stored(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]


class Shards:
    """Tensors of a safetensors file, or of those of a folder. No file stays open.

    Args:
        path: of the file or folder.

    Raises:
        InvalidInput: a file is missing, is no safetensors file or holds a tensor that another one holds, too, or an
            index names a file outside of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = shard_files(path)
        """All files, sorted."""
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, _Stored] = {}
        for file in self.files:
            self._read_header(file)
        if path.is_dir() and self.files != [path / SINGLE]:
            for name, shard in _weight_map(path / INDEX).items():
                if name not in self._tensors or self._tensors[name].path != path / shard:
                    raise InvalidInput(f"{name} is not in the file that the index names", where=str(path / INDEX))

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Returns the type of a tensor, as in the header of its file."""
        return self._tensors[name].dtype

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as float32, through a mapping of its own.

        Pages that were read of a mapping count as resident memory until it ends.

        Raises:
            Unsupported: it holds no floating-point numbers.
        """
        stored = self._tensors[name]
        if stored.dtype not in FLOATS:
            raise Unsupported(f"{name} has type {stored.dtype}; {', '.join(FLOATS)} are read", where=str(self.path))
        with safe_open(stored.path, "pt") as file:
            values: Tensor = file.get_tensor(name)
        return values.float()

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                self.metadata = self.metadata or file.metadata() or {}
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    if name in self._tensors:
                        other = self._tensors[name].path.name
                        raise InvalidInput(f"holds {name}, as {other} does: which is read?", where=str(path))
                    self._tensors[name] = _Stored(path, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            problem = download_problem(path, f"{error} (an incomplete download?)")
            raise InvalidInput(f"not a safetensors file: {problem}", where=str(path)) from error


def shard_files(path: Path) -> list[Path]:
    """Returns the safetensors files of a folder, sorted; of a file itself.

    Raises:
        InvalidInput: there are none, or the index names others.
    """
    if not path.is_dir():
        return [path]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        if (path / ADAPTER).is_file():
            raise InvalidInput(ADAPTER_PROBLEM, where=str(path))
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
        hint = "; pickled weights are never read, save them as safetensors" if pickled else ""
        raise InvalidInput(f"there is no {SINGLE} and no {INDEX}{hint}", where=str(path))
    return sorted({path / name for name in _weight_map(path / INDEX).values()})


ADAPTER_PROBLEM = (
    "holds an adapter (PEFT), which is no model: merge it into its model first, `merge_and_unload()`, and save that"
)


def _weight_map(path: Path) -> dict[str, str]:
    """Returns tensor -> name of its file."""
    index = read_json(path, _INDEX_BYTES)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InvalidInput("no index of shards: it names no weights", where=str(path))
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInput(f"{name!r} is no safetensors file of this folder", where=str(path))
    return names


def read_json(path: Path, limit: int = 1 << 20) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InvalidInput: there is none, or it is larger than `limit` bytes.
    """
    try:
        if path.stat().st_size > limit:
            raise InvalidInput(f"larger than {limit:,} bytes", where=str(path))
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"no JSON: {download_problem(path, str(error))}", where=str(path)) from error
    if not isinstance(value, dict):
        raise InvalidInput("no JSON object", where=str(path))
    return value
