"""Checkpoints: a model's state dict as one safetensors file that names its layout.

No two names of `nas.model.nn.model`'s state dict alias one tensor (a tied head and shared layers have no names of their
own), so what is saved is exactly what is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.model.nn.model import Model


def save_weights(model: Model, path: Path) -> None:
    """Writes `model`'s state dict at `path`, atomically and the same bytes for the same weights."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_durably(path, save(tensors, metadata={"layout": model.layout.format()}))


def load_weights(model: Model, path: Path) -> None:
    """Fills `model` with the weights at `path`, converted to the model's own types and device.

    Raises:
        InvalidInput: the file is no checkpoint, or one of another layout; the model stays as it was.
        FileNotFoundError: there is no such file.
    """
    layout = checkpoint_layout(path)
    if layout != model.layout:
        raise InvalidInput(f"holds weights of {layout}, not of {model.layout}", where=str(path))
    tensors = load_file(path)
    _check_shapes(tensors, model.state_dict(), path)
    model.load_state_dict(tensors)


def load_model(path: Path, layout: Layout | None = None) -> Model:
    """Returns the model of a checkpoint, in evaluation mode and without gradients.

    Args:
        path: of the checkpoint.
        layout: that it has to have.

    Raises:
        InvalidInput: the file is no checkpoint, or one of another layout.
        FileNotFoundError: there is no such file.
    """
    layout = layout or checkpoint_layout(path)
    if path.stat().st_size < layout.params.total:  # before they take memory
        raise InvalidInput(f"holds fewer weights than {layout} has", where=str(path))
    model = Model(layout, None)
    load_weights(model, path)
    return model.eval().requires_grad_(False)


def padded_weights(weights: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Returns `weights` with zeros up to the shapes that `layout` has, such as `nas.core.layout.padded` returns."""
    with torch.device("meta"):
        shapes = Model(layout, seed=None).state_dict()
    return {name: zero_padded(tensor, shapes[name].shape) for name, tensor in weights.items()}


def checkpoint_layout(path: Path) -> Layout:
    """Returns the layout of the checkpoint at `path`; reads the header only.

    Raises:
        InvalidInput: the file is no checkpoint.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        raise InvalidInput("is a folder; name the safetensors file in it", where=str(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        with path.open("rb") as stream:
            beginning = stream.read(2)
        # torch.save's archives and pickles
        if beginning in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise InvalidInput("pickled weights are never read; save them as safetensors", where=str(path)) from error
        raise InvalidInput(f"no safetensors file: {error}", where=str(path)) from error
    if "layout" not in metadata:
        raise InvalidInput("a safetensors file, but its header names no layout", where=str(path))
    return Layout.parse(metadata["layout"])


def zero_padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns `tensor` in the first rows and columns of zeros of that shape."""
    added = [(0, wide - narrow) for narrow, wide in zip(tensor.shape, shape, strict=True)]
    return F.pad(tensor, [count for pair in reversed(added) for count in pair])


def _check_shapes(tensors: dict[str, Tensor], expected: dict[str, Tensor], path: Path) -> None:
    for name in sorted(set(tensors) ^ set(expected)):
        raise InvalidInput(f"{'lacks' if name in expected else 'has an unknown tensor'} {name}", where=str(path))
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise InvalidInput(
                f"{name} has shape {list(tensor.shape)}, not {list(expected[name].shape)}", where=str(path)
            )
