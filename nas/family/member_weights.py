"""A member's weights, trained or random, one tensor at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.family.safetensors_file import Planned, write_safetensors
from nas.nn.model import Model
from nas.nn.primitives import Weights as Part
from nas.nn.primitives import generator_of
from nas.runtimes.base import Checkpoint, RandomWeights, Weights
from nas.runtimes.checkpoint_file import CheckpointFile, Floats, StateDict

_SMALL = ("conv.weight", "router.weight", "feed_forward.gate.weight")
"""Matrices that GGUF files keep in float32: taps of convolutions and routers, under our names and transformers'."""


def released_type(name: str, dimensions: int, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is released in: float32 where a GGUF file has it so, since it costs nothing."""
    return torch.float32 if dimensions == 1 or name.endswith(_SMALL) else dtype


class DrawnWeights:
    """The values of `Model(layout, seed)`, rounded as released; each tensor is drawn when it is asked for.

    A `StateDict`, which takes no more memory than its largest tensor.

    Args:
        layout: whose weights.
        seed: of them.
        dtype: what matrices are released in.
    """

    def __init__(self, layout: Layout, seed: int, dtype: torch.dtype) -> None:
        self.place = f"random weights of seed {seed}"
        self._seed, self._depth, self._dtype = seed, layout.depth, dtype
        model = _empty_model(layout)
        self._owners = {
            f"{name}.{own}": (name, part, own)
            for name, part in model.named_modules()
            if isinstance(part, Part)
            for own in _own(part)
        }
        self.names = frozenset(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `StateDict`."""
        _, part, own = self._owners[name]
        return tuple(_own(part)[own].shape)

    def floats(self, name: str, cut: tuple[Any, ...] = ()) -> Floats:
        """See `StateDict`."""
        owner, part, own = self._owners[name]
        part.to_empty(device="cpu", recurse=False)
        part.draw(generator_of(self._seed, owner), self._depth)
        drawn = _own(part)[own]
        part.to_empty(device="meta", recurse=False)
        rounded: Floats = drawn.to(released_type(name, drawn.dim(), self._dtype)).float().numpy()
        return rounded[cut] if cut else rounded


@contextlib.contextmanager
def open_weights(layout: Layout, weights: Weights, dtype: torch.dtype) -> Iterator[StateDict]:
    """The tensors of `weights`.

    Raises:
        InvalidInput: the checkpoint does not fit the layout.
    """
    if isinstance(weights, RandomWeights):
        yield DrawnWeights(layout, weights.seed, dtype)
        return
    with CheckpointFile(weights.path) as file:
        _require_fit(layout, file)
        yield file


@contextlib.contextmanager
def checkpoint_of(layout: Layout, weights: Weights, dtype: torch.dtype, scratch: Path) -> Iterator[Checkpoint]:
    """A checkpoint file of `weights`: theirs, or one at `scratch` that lasts as long as the context."""
    if isinstance(weights, Checkpoint):
        yield weights
        return
    tensors = LazyTensors(DrawnWeights(layout, weights.seed, dtype))
    # Its readers know no bfloat16, which float32 holds exactly.
    planned = [Planned(name, shape, torch.float32) for name, shape in tensors.shapes()]
    try:
        written = write_safetensors(scratch, planned, tensors.values(), {"layout": layout.format()})
        yield Checkpoint(scratch, written.sha256)
    finally:
        scratch.unlink(missing_ok=True)


class LazyTensors(Mapping[str, Tensor]):
    """A state dict as torch's tensors, float32, each read when it is asked for."""

    def __init__(self, state: StateDict) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._state.floats(name))

    def __contains__(self, name: object) -> bool:
        return name in self._state.names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._state.names))

    def __len__(self) -> int:
        return len(self._state.names)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each; reads no data."""
        return ((name, self._state.shape(name)) for name in self)


def _empty_model(layout: Layout) -> Model:
    with torch.device("meta"):
        return Model(layout, seed=None)


def _own(part: Part) -> dict[str, Tensor]:
    """What is in the state dict under the part's own name."""
    return {name: tensor for name, tensor in part.state_dict().items() if "." not in name}


def _require_fit(layout: Layout, file: CheckpointFile) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in _empty_model(layout).state_dict().items()}
    if difference := sorted(file.names ^ wanted.keys()):
        state = "lacks" if difference[0] in wanted else "has, but the layout has not,"
        raise InvalidInput(f"checkpoint {state} {difference[0]}", where=file.place)
    for name, shape in wanted.items():
        if (found := file.shape(name)) != shape:
            raise InvalidInput(f"{name} has shape {found}, the layout needs {shape}", where=file.place)
