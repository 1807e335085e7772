"""A member as a folder of Hugging Face's transformers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import Unsupported
from nas.core.family import MemberFile
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.family.file_options import FileOptions
from nas.family.member_weights import LazyTensors, released_type
from nas.family.safetensors_file import Planned, shards, write_safetensors
from nas.family.tokenizer import BOS, END_OF_TEXT, END_OF_TURN, PAD, MemberTokenizer, chat_template
from nas.nn.transformers_config import transformers_config
from nas.nn.transformers_names import each_of_transformers
from nas.runtimes.checkpoint_file import StateDict
from nas.runtimes.writing import hashed, replacing

FOLDER = "transformers"
OWN_CLASS = "HilnasForCausalLM"
_CODE = Path(__file__).with_name("transformers_code")
_CODE_FILES = ("configuration_hilnas.py", "modeling_hilnas.py")


@dataclass(frozen=True)
class Target:
    """What loads a layout in transformers.

    Args:
        config: config.json, without what the tokeniser says.
        why_own: why no stock class does; empty: one does.
    """

    config: Mapping[str, Any]
    why_own: str = ""

    @property
    def name(self) -> str:
        """The class."""
        return str(self.config["architectures"][0])


def target_of(layout: Layout) -> Target:
    """The stock class that holds `layout`, else ours."""
    try:
        return Target(transformers_config(layout))
    except Unsupported as error:
        return Target(_own_config(layout), error.message)


def code_files() -> Iterator[tuple[str, bytes]]:
    """The Python files that our class needs, by name."""
    return ((name, (_CODE / name).read_bytes()) for name in _CODE_FILES)


def write_transformers(
    folder: Path, layout: Layout, state: StateDict, tokenizer: MemberTokenizer, options: FileOptions
) -> Iterator[MemberFile]:
    """Writes the folder `transformers` below `folder`, file by file.

    Raises:
        InvalidInput: values that are no float16 or float32, or not finite.
        InfrastructureFailed: a file cannot be written.
    """
    target, place = target_of(layout), folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    yield from _weights(place, layout, target, LazyTensors(state), options)
    small = {
        "config.json": _json({**target.config, **_common_config(tokenizer, options)}),
        "generation_config.json": _json(_generation_config(tokenizer)),
        **(dict(code_files()) if target.why_own else {}),
    }
    for name, content in small.items():
        yield _member_file(name, _write(place / name, content), "transformers")
    for name, content in _tokenizer_files(tokenizer, options):
        yield _member_file(name, _write(place / name, content), "tokenizer")


def _weights(
    place: Path, layout: Layout, target: Target, tensors: LazyTensors, options: FileOptions
) -> Iterator[MemberFile]:
    dtype: torch.dtype = getattr(torch, options.dtype)
    # Shapes follow from the same renaming on tensors that hold nothing.
    empty = {name: torch.empty(tensor, device="meta") for name, tensor in tensors.shapes()}
    planned = [
        Planned(name, tuple(tensor.shape), released_type(name, tensor.dim(), dtype))
        for name, tensor in _renamed(layout, target, empty)
    ]
    files = shards(planned, options.shard_bytes)
    data = (tensor for _, tensor in _renamed(layout, target, tensors))
    names = [_shard_name(i, len(files)) for i in range(len(files))]
    for name, part in zip(names, files, strict=True):
        written = write_safetensors(place / name, part, itertools.islice(data, len(part)), {"format": "pt"})
        yield _member_file(name, written, "transformers")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(one.size for one in planned)},
            "weight_map": {one.name: name for name, part in zip(names, files, strict=True) for one in part},
        }
        name = "model.safetensors.index.json"
        yield _member_file(name, _write(place / name, _json(index)), "transformers")


def _renamed(layout: Layout, target: Target, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if target.why_own:
        return ((name, tensors[name]) for name in tensors)
    return each_of_transformers(layout, tensors)


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def _own_config(layout: Layout) -> dict[str, Any]:
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
    }


def _own_layer(layout: Layout, depth: int) -> dict[str, Any]:
    layer = layout.layers[depth]
    if layer.share is not None:
        return {"share": layer.share}
    mixers = [_own_block(block, layout.d_model) for block in layer.mixers]
    for place, mixer in enumerate(mixers):
        if source := layout.cache_source(depth, place):
            mixer["reads"] = list(source)
    return {"mixers": mixers, "ffn": _own_block(layer.ffn, layout.d_model) if layer.ffn else None}


def _own_block(block: Block, d_model: int) -> dict[str, Any]:
    full = block.resolve(d_model)
    values = {arg.name: full.get(arg.name) for arg in block.spec.args}
    return {"kind": block.kind, **{name: value for name, value in values.items() if value is not None}}


def _common_config(tokenizer: MemberTokenizer, options: FileOptions) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "max_position_embeddings": options.context,
        "bos_token_id": tokenizer.special.get(BOS),
        "eos_token_id": tokenizer.special.get(END_OF_TURN),
        "pad_token_id": tokenizer.special.get(PAD),
    }


def _generation_config(tokenizer: MemberTokenizer) -> dict[str, Any]:
    special = tokenizer.special
    ends = [special[name] for name in (END_OF_TURN, END_OF_TEXT) if name in special]
    return {
        "bos_token_id": special.get(BOS),
        "eos_token_id": ends or None,
        "pad_token_id": special.get(PAD),
    }


def _tokenizer_files(tokenizer: MemberTokenizer, options: FileOptions) -> Iterator[tuple[str, bytes]]:
    yield "tokenizer.json", tokenizer.content
    names = {"bos_token": BOS, "eos_token": END_OF_TURN, "pad_token": PAD} if tokenizer.special else {}
    yield (
        "tokenizer_config.json",
        _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": options.context,
                **names,
            }
        ),
    )
    yield "special_tokens_map.json", _json(names)
    if tokenizer.special:
        yield "chat_template.jinja", chat_template().encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> PlanFile:
    with replacing(path) as partial:
        return hashed([content], partial)


def _member_file(name: str, written: PlanFile, kind: Any) -> MemberFile:
    return MemberFile(path=f"{FOLDER}/{name}", kind=kind, sha256=written.sha256, size=written.size)
