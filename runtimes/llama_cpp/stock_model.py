"""Models of stock architectures that no layout describes: written from their keys and tensors, with random weights.

Types of tensors are those that llama.cpp's quantiser gives a Q4_0 file without an importance matrix, as in
`nas.measure.runtimes.llama_cpp.tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from nas.core.canonical import content_hash
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.random_weights import random_recipe
from nas.measure.runtimes.llama_cpp.tensors import Tensor, stored_bytes, type_that_fits
from nas.measure.runtimes.llama_cpp.writer import FILE_TYPE, QUANTISATION_VERSION, header_bytes
from nas.measure.runtimes.writing import Written, replacing, write_drawn

Type = GGMLQuantizationType
Value = bool | int | float | str | tuple[int, ...]

QUANTISATION = "q4_0"

_VALUE_TYPES: dict[type, GGUFValueType] = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    tuple: GGUFValueType.ARRAY,
}


@dataclass(frozen=True, slots=True)
class StockModel:
    """Keys and tensors of a model's GGUF file.

    Args:
        architecture: llama.cpp's name of it.
        metadata: keys without the architecture's prefix -> value, as the loader in src/models/ reads them.
        tensors: in file order; `role` says which are weights that can be quantised.
    """

    architecture: str
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]

    @property
    def parameters(self) -> int:
        """All trained numbers."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.part not in _NOT_TRAINED)

    @property
    def active(self) -> int:
        """Those that one token uses."""
        experts = sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.part.endswith("_exps"))
        if not experts:
            return self.parameters
        count, used = self.metadata["expert_count"], self.metadata["expert_used_count"]
        assert isinstance(count, int) and isinstance(used, int)
        return self.parameters - experts // count * (count - used)

    @property
    def file_bytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(stored_bytes(tensor.shape, storage) for tensor, storage in self.stored())

    @property
    def id(self) -> str:
        """SHA-256 of everything that a file depends on, besides the weights' seed."""
        tensors = [[tensor.name, list(tensor.shape), tensor.role] for tensor in self.tensors]
        metadata = {key: list(value) if isinstance(value, tuple) else value for key, value in self.metadata.items()}
        return content_hash({"architecture": self.architecture, "metadata": metadata, "tensors": tensors})

    def stored(self) -> list[tuple[Tensor, Type]]:
        """Returns each tensor with its type in a Q4_0 file."""
        tied = all(tensor.name != "output.weight" for tensor in self.tensors)
        return [(tensor, _stored_type(tensor, tied)) for tensor in self.tensors]


_NOT_TRAINED = ("rope_freqs",)


def write_stock_model(model: StockModel, weights: RandomWeights, destination: Path, *, recipe: bool = False) -> Written:
    """Writes the Q4_0 file of `model`, or the recipe of it, next to `destination` and renames it into place.

    Raises:
        InfrastructureFailed: the file cannot be written, most often for want of space.
    """
    stored = model.stored()
    with replacing(destination) as partial:
        writer = GGUFWriter(partial, model.architecture)
        writer.add_file_type(FILE_TYPE[QUANTISATION])
        writer.add_quantization_version(QUANTISATION_VERSION)
        writer.add_tokenizer_model("none")
        for key, value in model.metadata.items():
            writer.add_key_value(f"{model.architecture}.{key}", value, _VALUE_TYPES[type(value)])
        header = header_bytes(writer, partial, stored)
        return write_drawn(random_recipe(header, stored, weights.seed), partial, recipe=recipe)


def _stored_type(tensor: Tensor, tied: bool) -> Type:
    """Returns the type by `llama_tensor_get_type` of src/llama-quant.cpp; no model here has eight experts."""
    if tensor.role != "matrix":
        return Type.F32
    makes_logits = tensor.part == "output" or (tied and tensor.part == "token_embd")
    return type_that_fits(Type.Q6_K if makes_logits else Type.Q4_0, tensor.shape[-1])
