"""A member's weights as one checkpoint file, whatever they are, and its tensors one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.family.safetensors_file import Planned, write_safetensors
from nas.nn.model import Model
from nas.nn.primitives import Weights as Part
from nas.nn.primitives import generator_of
from nas.runtimes.base import Checkpoint, RandomWeights, Weights
from nas.runtimes.checkpoint_file import CheckpointFile

_SMALL = ("conv.weight", "router.weight", "feed_forward.gate.weight")
"""Matrices that GGUF files keep in float32: taps of convolutions and routers, under our names and transformers'."""


def released_type(name: str, dimensions: int, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is released in: float32 where a GGUF file has it so, since it costs nothing."""
    return torch.float32 if dimensions == 1 or name.endswith(_SMALL) else dtype


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read when it is asked for, as float32."""

    def __init__(self, file: CheckpointFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._file.names:
            raise KeyError(name)
        return torch.from_numpy(self._file.floats(name))

    def __contains__(self, name: object) -> bool:
        return name in self._file.names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._file.names))

    def __len__(self) -> int:
        return len(self._file.names)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each; reads the header only."""
        return ((name, self._file.shape(name)) for name in self)


@contextlib.contextmanager
def checkpoint_of(layout: Layout, weights: Weights, dtype: torch.dtype, scratch: Path) -> Iterator[Checkpoint]:
    """A checkpoint of `weights`: theirs, or one in `scratch` that lasts as long as the context.

    Random weights are those of `Model(layout, seed)`, drawn tensor by tensor and rounded to `dtype` as released.

    Raises:
        InvalidInput: the checkpoint does not fit the layout.
    """
    if isinstance(weights, Checkpoint):
        _require_fit(layout, weights.path)
        yield weights
        return
    try:
        yield _drawn(layout, weights, dtype, scratch)
    finally:
        scratch.unlink(missing_ok=True)


def _drawn(layout: Layout, weights: RandomWeights, dtype: torch.dtype, path: Path) -> Checkpoint:
    # Readers of checkpoints know float16 and float32, which holds bfloat16 exactly.
    stored = torch.float32 if dtype == torch.bfloat16 else dtype
    with torch.device("meta"):
        model = Model(layout, seed=None)
    planned = [
        Planned(f"{name}.{own}", tuple(tensor.shape), released_type(f"{name}.{own}", tensor.dim(), stored))
        for name, part in _parts(model)
        for own, tensor in _own(part).items()
    ]
    data = (
        tensor.to(released_type(f"{name}.{own}", tensor.dim(), dtype))
        for name, part in _parts(model)
        for own, tensor in _draw(part, name, weights.seed, layout.depth)
    )
    written = write_safetensors(path, planned, data, {"layout": layout.format()})
    return Checkpoint(path, written.sha256)


def _parts(model: Model) -> Iterator[tuple[str, Part]]:
    return ((name, part) for name, part in model.named_modules() if isinstance(part, Part))


def _own(part: Part) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in part.state_dict().items() if "." not in name}


def _draw(part: Part, name: str, seed: int, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The part's tensors, which exist only while they are used."""
    part.to_empty(device="cpu", recurse=False)
    part.draw(generator_of(seed, name), depth)
    yield from _own(part).items()
    part.to_empty(device="meta", recurse=False)


def _require_fit(layout: Layout, path: Path) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Model(layout, seed=None).state_dict().items()}
    with CheckpointFile(path) as file:
        if difference := sorted(file.names ^ wanted.keys()):
            state = "lacks" if difference[0] in wanted else "has, but the layout has not,"
            raise InvalidInput(f"checkpoint {state} {difference[0]}", where=str(path))
        for name, shape in wanted.items():
            if (found := file.shape(name)) != shape:
                raise InvalidInput(f"{name} has shape {found}, the layout needs {shape}", where=str(path))
