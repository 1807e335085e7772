"""Writes a member's folder for Hugging Face's transformers, and opens its weights, trained or random.

Models may not fit into memory: weights are read or drawn, renamed and written one tensor at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.family import MemberFile
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.measure.runtimes.base import Checkpoint, Floats, RandomWeights, StateDict, Weights
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.writing import Piece, hashed, replacing
from nas.model.nn.model import Model
from nas.model.nn.primitives import Weights as Part
from nas.model.nn.primitives import generator_of
from nas.model.nn.transformers import each_of_transformers, transformers_config
from nas.train.release.bundle import bundle
from nas.train.release.options import FileOptions
from nas.train.release.shards import INDEX, SINGLE
from nas.train.release.tokenizer import MemberTokenizer, json_bytes

FOLDER = "transformers"
OWN_CLASS = "HilnasForCausalLM"
_SMALL = ("conv.weight", "canon.weight", "router.weight", "feed_forward.gate.weight")
"""Matrices that GGUF files keep in float32: taps of convolutions and routers, under our names and transformers'."""
_TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# The folder `transformers`.


@dataclass(frozen=True)
class Target:
    """Loader of a layout: a class of transformers, or ours.

    Args:
        config: config.json, without the fields of the tokenizer.
        why_own: why no stock class loads it; empty: one does.
        code: the Python files that our class needs, by name.
    """

    config: Mapping[str, Any]
    why_own: str = ""
    code: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the class."""
        return str(self.config["architectures"][0])


def target_of(layout: Layout) -> Target:
    """Returns the stock class that loads `layout`, or ours if there is none.

    Raises:
        Unsupported: a kind of block has no code for ours.
    """
    try:
        return Target(transformers_config(layout))
    except Unsupported as error:
        kinds = {block.kind for layer in layout.layers for block in layer.blocks}
        return Target(own_config(layout), error.message, bundle(kinds))


def write_transformers(
    folder: Path, layout: Layout, state: StateDict, tokenizer: MemberTokenizer, options: FileOptions
) -> Iterator[MemberFile]:
    """Writes the folder `transformers` below `folder`, file by file.

    Raises:
        InvalidInput: values that are neither float16 nor float32, not finite, or too large for the released type.
        InfrastructureFailed: a file cannot be written.
    """
    target, place = target_of(layout), folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    yield from _weights(place, layout, target, LazyTensors(state), options)
    small = {
        "config.json": json_bytes({**target.config, **_common_config(tokenizer, options)}),
        "generation_config.json": json_bytes(_generation_config(tokenizer)),
        **target.code,
    }
    for name, content in small.items():
        yield _member_file(name, _write(place / name, content), "transformers")
    for name, content in tokenizer.files(options.context):
        yield _member_file(name, _write(place / name, content), "tokenizer")


def _weights(
    folder: Path, layout: Layout, target: Target, tensors: LazyTensors, options: FileOptions
) -> Iterator[MemberFile]:
    dtype: torch.dtype = getattr(torch, options.dtype)
    # Shapes follow from the same renaming of tensors without data.
    empty = {name: torch.empty(tensor, device="meta") for name, tensor in tensors.shapes()}
    planned = [
        Planned(name, tuple(tensor.shape), released_type(name, tensor.dim(), dtype))
        for name, tensor in _renamed(layout, target, empty)
    ]
    files = shards(planned, options.shard_bytes)
    data = (tensor for _, tensor in _renamed(layout, target, tensors))
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for name, part in zip(names, files, strict=True):
        written = write_safetensors(folder / name, part, itertools.islice(data, len(part)), {"format": "pt"})
        yield _member_file(name, written, "transformers")
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for tensor in planned)},
            "weight_map": {tensor.name: name for name, part in zip(names, files, strict=True) for tensor in part},
        }
        yield _member_file(INDEX, _write(folder / INDEX, json_bytes(index)), "transformers")


def _renamed(layout: Layout, target: Target, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if target.why_own:
        return ((name, tensors[name]) for name in tensors)
    return each_of_transformers(layout, tensors)


def own_config(layout: Layout) -> dict[str, Any]:
    """Returns the part of config.json that says what our class builds."""
    return {
        "architectures": [OWN_CLASS],
        "model_type": "hilnas",
        "auto_map": {
            "AutoConfig": "configuration_hilnas.HilnasConfig",
            "AutoModelForCausalLM": f"modeling_hilnas.{OWN_CLASS}",
        },
        "layers": [_own_layer(layout, depth) for depth in range(layout.depth)],
        "hidden_size": layout.d_model,
        "vocab_size": layout.vocab,
        "norm_eps": 1e-5,
        "tie_word_embeddings": layout.tied,
        **({} if layout.norms == "before" else {"norms": layout.norms}),
        **({"softcap": layout.softcap} if layout.softcap else {}),
    }


def _own_layer(layout: Layout, depth: int) -> dict[str, Any]:
    layer = layout.layers[depth]
    if layer.share is not None:
        return {"share": layer.share}
    mixers = [_own_block(block, layout.d_model) for block in layer.mixers]
    for index, mixer in enumerate(mixers):
        if source := layout.cache_source(depth, index):
            mixer["reads"] = list(source)
    return {"mixers": mixers, "ffn": _own_block(layer.ffn, layout.d_model) if layer.ffn else None}


def _own_block(block: Block, d_model: int) -> dict[str, Any]:
    full = block.resolve(d_model)
    values = {arg.name: full.get(arg.name) for arg in block.spec.args}
    return {"kind": block.kind, **{name: value for name, value in values.items() if value is not None}}


def _common_config(tokenizer: MemberTokenizer, options: FileOptions) -> dict[str, Any]:
    ids = tokenizer.ids()
    return {
        "dtype": options.dtype,
        "max_position_embeddings": options.context,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ids.get("eos"),
        "pad_token_id": ids.get("pad"),
    }


def _generation_config(tokenizer: MemberTokenizer) -> dict[str, Any]:
    ids = tokenizer.ids()
    return {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": list(tokenizer.ends) or None,
        "pad_token_id": ids.get("pad"),
    }


def _write(path: Path, content: bytes) -> PlanFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        return hashed([content], partial)


def _member_file(name: str, written: PlanFile, kind: Any) -> MemberFile:
    return MemberFile(path=f"{FOLDER}/{name}", kind=kind, sha256=written.sha256, size=written.size)


# Weights, trained or random.


def released_type(name: str, dimensions: int, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of a released tensor: `dtype`, or float32 for the small ones that GGUF files keep in float32."""
    return torch.float32 if dimensions == 1 or name.endswith(_SMALL) else dtype


class DrawnWeights:
    """A `StateDict` with the values of `Model(layout, seed)`, rounded to their released types.

    Each tensor is drawn when it is read, so memory is that of the largest tensor.

    Args:
        layout: whose weights.
        seed: of them.
        dtype: of released matrices.
    """

    def __init__(self, layout: Layout, seed: int, dtype: torch.dtype) -> None:
        self.place = f"random weights of seed {seed}"
        self._seed, self._depth, self._dtype = seed, layout.depth, dtype
        model = _empty_model(layout)
        self._owners = {
            f"{name}.{tensor}": (name, part, tensor)
            for name, part in model.named_modules()
            if isinstance(part, Part)
            for tensor in _tensors_of(part)
        }
        self.names = frozenset(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        _, part, tensor = self._owners[name]
        return tuple(_tensors_of(part)[tensor].shape)

    def floats(self, name: str, cut: tuple[Any, ...] = ()) -> Floats:
        owner, part, tensor = self._owners[name]
        part.to_empty(device="cpu", recurse=False)
        part.draw(generator_of(self._seed, owner), self._depth)
        drawn = _tensors_of(part)[tensor]
        part.to_empty(device="meta", recurse=False)
        rounded: Floats = drawn.to(released_type(name, drawn.dim(), self._dtype)).float().numpy()
        return rounded[cut] if cut else rounded


@contextlib.contextmanager
def open_weights(layout: Layout, weights: Weights, dtype: torch.dtype) -> Iterator[StateDict]:
    """Opens the tensors of `weights`.

    Raises:
        InvalidInput: the checkpoint does not fit the layout.
    """
    if isinstance(weights, RandomWeights):
        yield DrawnWeights(layout, weights.seed, dtype)
        return
    with CheckpointFile(weights.verified()) as file:
        _require_fit(layout, file)
        yield file


@contextlib.contextmanager
def checkpoint_of(layout: Layout, weights: Weights, dtype: torch.dtype, scratch: Path) -> Iterator[Checkpoint]:
    """Yields a checkpoint file of `weights`: their own, or one at `scratch` that is removed afterwards."""
    if isinstance(weights, Checkpoint):
        yield weights
        return
    tensors = LazyTensors(DrawnWeights(layout, weights.seed, dtype))
    # Readers of checkpoints do not read bfloat16; float32 represents it exactly.
    planned = [Planned(name, shape, torch.float32) for name, shape in tensors.shapes()]
    try:
        written = write_safetensors(scratch, planned, tensors.values(), {"layout": layout.format()})
        yield Checkpoint(scratch, written.sha256)
    finally:
        scratch.unlink(missing_ok=True)


class LazyTensors(Mapping[str, Tensor]):
    """A state dict of float32 tensors, each read on access."""

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
        """Yields name and shape of each tensor without reading data."""
        return ((name, self._state.shape(name)) for name in self)


def _empty_model(layout: Layout) -> Model:
    with torch.device("meta"):
        return Model(layout, seed=None)


def _tensors_of(part: Part) -> dict[str, Tensor]:
    """Returns the tensors that the part itself owns."""
    return {name: tensor for name, tensor in part.state_dict().items() if "." not in name}


def _require_fit(layout: Layout, file: CheckpointFile) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in _empty_model(layout).state_dict().items()}
    if difference := sorted(file.names ^ shapes.keys()):
        state = "lacks" if difference[0] in shapes else "has, but the layout has not,"
        raise InvalidInput(f"checkpoint {state} {difference[0]}", where=file.place)
    for name, shape in shapes.items():
        if (stored := file.shape(name)) != shape:
            raise InvalidInput(f"{name} has shape {stored}, the layout needs {shape}", where=file.place)


# Safetensors files (huggingface/safetensors, README): length of the header in 8 bytes, header in JSON, data.


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of a file to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, planned: Sequence[Planned], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> PlanFile:
    """Writes a safetensors file atomically; `tensors` come in the order of `planned`, one at a time.

    Raises:
        InvalidInput: values that a type of 16 bits does not hold.
        InfrastructureFailed: it cannot be written, usually because the disk is full.
    """
    with replacing(path) as partial:
        return hashed(_pieces(planned, tensors, metadata), partial)


def write_float32(path: Path, tensors: Mapping[str, Tensor]) -> PlanFile:
    """Writes tensors of any device as a safetensors file in float32; see `write_safetensors`."""
    planned = [Planned(name, tuple(tensor.shape), torch.float32) for name, tensor in tensors.items()]
    return write_safetensors(path, planned, (tensor.detach().cpu() for tensor in tensors.values()), {"format": "pt"})


def _pieces(planned: Sequence[Planned], tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> Iterator[Piece]:
    about: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for slot in planned:
        about[slot.name] = {
            "dtype": _TYPE_NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [end, end + slot.size],
        }
        end += slot.size
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for slot, tensor in zip(planned, tensors, strict=True):
        assert tuple(tensor.shape) == slot.shape, f"{slot.name}: {tuple(tensor.shape)} where {slot.shape} was planned"
        stored = tensor.to(slot.dtype)
        if slot.dtype != torch.float32 and not stored.isfinite().all():
            raise InvalidInput(f"{slot.name} holds values that {_TYPE_NAMES[slot.dtype]} does not")
        yield stored.contiguous().view(-1).view(torch.uint8).numpy().data


def shards(planned: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Splits `planned` into files of at most `limit` bytes of data; a larger tensor gets a file of its own."""
    files: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if files[-1] and size + tensor.size > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.size
    return files
