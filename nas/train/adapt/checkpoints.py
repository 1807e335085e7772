"""Reads trained models as a layout and weights under our names: folders of Hugging Face's transformers, GGUF files.

Only config.json and safetensors files of a folder are read: no pickle, no download, no code of the folder. A GGUF file
is read as the folder that it was made of, see `nas.train.adapt.gguf_model`. Of a model with towers
(`nas.train.towers`), its language model is read.

What a configuration says is read by `nas.train.adapt.configuration`; families are in `nas.train.adapt.stock_families`
and `nas.train.adapt.hybrid_families`. Everything that a layout cannot say (other biases than those of Qwen2, RoPE of
type dynamic, mixers and feed-forwards beside each other ...) is refused, all of it at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported, is_out_of_memory
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile, is_gguf
from nas.model.nn.model import Model
from nas.model.nn.transformers import TensorName
from nas.train.adapt.configuration import ACTIVATIONS, EPS, SEVERAL_BASES, Factor, Options, Source, TrainedModel
from nas.train.adapt.gguf_model import EMBEDDING, HEAD, GgufModel, TheirTensors, few
from nas.train.adapt.hybrid_families import HYBRIDS
from nas.train.adapt.model_types import MODEL_TYPES
from nas.train.adapt.stock_families import STOCK
from nas.train.release.huggingface import Planned, write_safetensors
from nas.train.release.shards import ADAPTER, ADAPTER_PROBLEM, Shards, read_json, shard_files

IMPORT_VERSION = 5
"""Increase it with every change after which the same files give other weights."""
WITH_TOWERS = ("lfm2_vl", "hilnas_vl", "hilnas_audio")
"""Types of models that consist of a language model and towers: transformers' class, and ours where it has none."""
_TEXT_TYPES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", "tie_word_embeddings": False},
}  # fmt: skip
"""Other types with an encoder of images, which is left out -> what files of their language model leave out."""
_QUANTISED = ("quantization_config", "quantization")
"""Keys that say how weights are quantised; the second one is of MLX."""
_FURTHER = ("mtp.", "model.mtp.")
"""Prefixes of layers that predict further tokens, which transformers leaves out."""
LANGUAGE_MODEL = "model.language_model."
"""Prefix of the language model's tensors there, but for those of an output head."""
_EARLIER_LANGUAGE_MODEL = "language_model."
"""The same in files of transformers before 4.52, of the head, too."""
_FROM_ROTARY = "rotary_emb.inv_freq"
"""A buffer that old releases of transformers saved; it follows from the configuration."""


def read_model(source: Path) -> TrainedModel:
    """Reads the configuration in a folder of transformers, or that of a GGUF file.

    Raises:
        Unsupported: layouts cannot say this model; the message lists everything that is missing.
        InvalidInput: there is no readable configuration.
    """
    return _read(_opened(source))


def _read(source: Source) -> TrainedModel:
    where, config = source.where, source.config
    kind = config.get("model_type")
    options = Options(config, source, where)
    if not isinstance(kind, str) or kind not in FAMILIES:
        traits = _unsayable(options)
        missing = f"; missing: {'; '.join(traits)}" if traits else ""
        families = ", ".join(sorted(FAMILIES))
        raise Unsupported(
            f"no layout says models of type {kind!r}{missing}; families that are read: {families}", where=where
        )
    for name in _QUANTISED:
        options.refuse(config.get(name) is not None, f"weights that are quantised ({name})")
    try:
        model = FAMILIES[kind](options)
    except InvalidInput as error:
        if error.where == where:
            raise
        options.missing.append(error.message)
        model = None
    if options.missing or model is None:
        raise Unsupported(f"no layout says this {kind} model; missing: {'; '.join(options.missing)}", where=where)
    return replace(model, left_out=source.left_out)


def import_model(source: Path, output: Path) -> TrainedModel:
    """Writes the weights of a folder of transformers, or of a GGUF file, as a checkpoint of `nas.model.nn.model`.

    Weights are read, converted to float32 and written one tensor at a time.

    Raises:
        Unsupported: layouts cannot say this model.
        InvalidInput: the files are damaged or do not fit the configuration.
        InfrastructureFailed: the disk is full.
    """
    opened = _opened(source)
    model = _read(opened)
    names = model.names or tuple(TensorName((name,), name) for name in _shapes(model.layout))
    origin = {key: name for name in names for key in name.keys}
    shapes = _shapes(model.layout)
    assert origin.keys() == shapes.keys(), "the family names every tensor of the layout"
    tensors = opened.tensors()
    tensors.check({name.upstream for name in names if name.upstream}, tied=model.layout.tied)
    planned = [Planned(name, shape, torch.float32) for name, shape in sorted(shapes.items())]
    values = (_converted(tensor, origin, model.factors, tensors, str(source)) for tensor in planned)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(output, planned, values, {"layout": model.layout.format()})
    return model


def model_files(source: Path) -> list[Path]:
    """Returns the files of a folder, or of a model in GGUF, that `import_model` reads.

    Raises:
        InvalidInput: it has no weights, or an index names files elsewhere.
    """
    if is_gguf(source):
        return list(GgufFile.read(source).files)
    return [source / "config.json", *shard_files(source)]


def _opened(source: Path) -> Source:
    return GgufModel(GgufFile.read(source)) if is_gguf(source) else _Folder(source)


class _Folder:
    """A folder of transformers."""

    rope_dim = 0

    def __init__(self, folder: Path) -> None:
        self._folder, self.where = folder, str(folder / "config.json")
        if folder.is_file():
            raise InvalidInput(
                "is a file: name a GGUF file, or a folder with config.json and safetensors files", where=str(folder)
            )
        if (folder / ADAPTER).is_file():
            raise InvalidInput(ADAPTER_PROBLEM, where=str(folder))
        if not (folder / "config.json").is_file():
            raise InvalidInput("no such file: name a folder of transformers, with config.json", where=self.where)
        self.config: Mapping[str, Any] = read_json(folder / "config.json")
        self._inside = self.left_out = ""
        kind = str(self.config.get("model_type"))
        if kind in WITH_TOWERS or kind in _TEXT_TYPES:
            usual = _TEXT_TYPES.get(kind, {"tie_word_embeddings": True})
            tied = self.config.get(
                "tie_embedding", self.config.get("tie_word_embeddings", usual["tie_word_embeddings"])
            )
            self._inside, text = LANGUAGE_MODEL, self.config.get("text_config")
            rounded = {name: self.config[name] for name in _QUANTISED if name in self.config}
            ties = {"tie_word_embeddings": tied, "tie_embedding": tied}
            self.config = {**usual, **(text if isinstance(text, dict) else {}), **ties, **rounded}
            self.left_out = "all but the language model, such as its encoder of images"

    def tensors(self) -> _Tensors:
        return _Tensors(self._folder, self._inside)

    def has_other_head(self) -> bool:
        try:
            return self.tensors().has_other_head()
        except InvalidInput:  # which `import_model` says
            return False


def is_imported(source: Path, output: Path) -> bool:
    """Returns whether `output` is what `import_once` wrote from the files that are there now."""
    try:
        record = json.loads(_record(output).read_bytes())
        return bool(record == _import_record(source, output))
    except (OSError, ValueError):
        return False


def import_once(source: Path, output: Path) -> None:
    """Imports a model (see `import_model`), and records beside `output` from what."""
    import_model(source, output)
    write_durably(_record(output), json.dumps(_import_record(source, output)).encode())


def _record(output: Path) -> Path:
    return output.with_suffix(".json")


def _import_record(source: Path, output: Path) -> dict[str, Any]:
    """Returns `IMPORT_VERSION` and the SHA-256 of the files that are read and written."""
    return {"v": IMPORT_VERSION, "files": [sha256_of(path) for path in (*model_files(source), output)]}


def _converted(
    one: Planned,
    origin: Mapping[str, TensorName],
    factors: Mapping[str, Factor],
    files: Mapping[str, Tensor],
    where: str,
) -> Tensor:
    source = origin[one.name]
    try:
        tensor = source.split(files)[one.name] if source.upstream else torch.ones(one.shape)
    except (IndexError, RuntimeError) as error:  # of shapes that cannot be joined or reordered
        if is_out_of_memory(error):
            raise
        raise InvalidInput(f"{source.upstream} does not have the shape that {one.name} needs", where=where) from error
    if tuple(tensor.shape) != one.shape:
        raise InvalidInput(
            f"{origin[one.name].upstream} gives {one.name} the shape {list(tensor.shape)}, its layout needs"
            f" {list(one.shape)}",
            where=where,
        )
    if not tensor.isfinite().all():
        raise InvalidInput(f"{origin[one.name].upstream} holds NaN or infinity", where=where)
    if (factor := factors.get(one.name, 1.0)) == 1.0:
        return tensor
    rows = torch.tensor(factor).view(-1, *[1] * (tensor.ndim - 1))
    if not (tensor := tensor * rows).isfinite().all():
        raise InvalidInput(
            f"{origin[one.name].upstream} becomes infinite: constants of its configuration multiply it by"
            f" {rows.max():g}",
            where=where,
        )
    return tensor


def _shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Model(layout, seed=None).state_dict().items()}


def _renamed(name: str) -> str:
    """Returns the name under which a tensor of Nemotron-H, Mixtral or Granite's experts is looked up; others stay."""
    for old, new in (("backbone.", "model."), ("model.embeddings.", "model.embed_tokens.")):
        name = new + name.removeprefix(old) if name.startswith(old) else name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return next((name.removesuffix(old) + new for old, new in _EXPERTS.items() if name.endswith(old)), name)


_EXPERTS = {
    ".mlp.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".mlp.output_linear.weight": ".mlp.experts.down_proj",
    ".mlp.router.layer.weight": ".mlp.router.weight",
}
"""Names of Granite's experts in files, and in transformers 5."""


class _Tensors(TheirTensors):
    """The tensors of a folder under transformers' names of today, each read on access.

    Args:
        folder: of the model.
        inside: prefix of the names that are read; an output head has none.
    """

    def __init__(self, folder: Path, inside: str = "") -> None:
        self.folder, self._shards = folder, Shards(folder)
        if inside and not any(name.startswith(inside) for name in self._shards.names):
            inside = _EARLIER_LANGUAGE_MODEL
        stored = {name.removeprefix(inside): name for name in self._shards.names if name.startswith((inside, HEAD))}
        # The model without its head was saved: the names lack the name of that part.
        prefix = "model." if EMBEDDING.removeprefix("model.") in stored else ""
        self._stored = {name if name == HEAD else _renamed(prefix + name): place for name, place in stored.items()}
        if EMBEDDING not in self._stored and HEAD in self._stored:
            self._stored[EMBEDDING] = self._stored.pop(HEAD)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._stored and name.endswith((".gate_up_proj", ".down_proj")):
            return self._experts(name)
        return self._shards.tensor(self._stored[name])

    def __contains__(self, name: object) -> bool:
        return name in self._stored or bool(isinstance(name, str) and self._parts(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def has_other_head(self) -> bool:
        """Returns whether there is a head that differs from the embedding: then transformers does not tie them."""
        return HEAD in self._stored and not torch.equal(self[HEAD], self[EMBEDDING])

    def check(self, names: set[str], *, tied: bool) -> None:
        if lacking := sorted(name for name in names if name not in self):
            hint = "; if the embedding is the head, set tie_word_embeddings to true" if lacking == [HEAD] else ""
            raise InvalidInput(f"lacks {few(lacking)}{hint}", where=str(self.folder))
        used = names | {part for name in names for part in self._parts(name)} | ({HEAD} if tied else set())
        unread = (name for name in self if not name.endswith(_FROM_ROTARY) and not name.startswith(_FURTHER))
        if others := sorted({*unread} - used):
            raise Unsupported(f"has tensors that no block of the layout holds: {few(others)}", where=str(self.folder))

    def _parts(self, name: str) -> list[str]:
        """Returns the tensors of single experts of which transformers 5 makes `name`; none if they are not there."""
        prefix, _, joined = name.rpartition(".")
        parts: list[str] = []
        for kinds in _PARTS.get(joined, ()):
            expert = [f"{prefix}.0.{kind}.weight" for kind in kinds]
            while all(part in self._stored for part in expert):
                parts += expert
                expert = [f"{prefix}.{len(parts) // len(kinds)}.{kind}.weight" for kind in kinds]
        return parts

    def _experts(self, name: str) -> Tensor:
        parts = [self[part] for part in self._parts(name)]
        if name.endswith(".down_proj"):
            return torch.stack(parts)
        return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])


_PARTS = {
    "gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")),
    "down_proj": (("w2",), ("down_proj",)),
}
"""Tensor of all experts -> the tensors of one of which it is made, under each of their names."""


def _hilnas_model(options: Options) -> TrainedModel:
    """Reads a folder that hilnas wrote, without its code."""
    eps = options.number("norm_eps", EPS)
    options.refuse(eps != EPS, f"norms of epsilon {eps:g}, other than {EPS:g}")
    layers = options.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise InvalidInput("layers must be a list of objects", where=options.where)
    layout = Layout.from_json(
        {
            "v": 1,
            "d_model": options.whole("hidden_size"),
            "vocab": options.whole("vocab_size"),
            "layers": [_own_layer(layer) for layer in layers],
            "tied": options.flag("tie_word_embeddings", True),
            "norms": options.get("norms", "before"),
            "softcap": options.get("softcap", 0.0),
        }
    )
    return TrainedModel(layout, "hilnas")


def _own_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    if layer.get("share") is not None:
        return {"share": layer["share"]}
    mixers = layer.get("mixers") or []
    if not isinstance(mixers, list) or not all(isinstance(block, dict) for block in mixers):
        raise InvalidInput("mixers must be a list of objects")
    mixers = [{name: value for name, value in block.items() if name != "reads"} for block in mixers]
    return ({"mixers": mixers} if mixers else {}) | ({"ffn": layer["ffn"]} if layer.get("ffn") else {})


_ANY_HEAD = 64
"""Size of a head where it does not matter."""


def _unsayable(options: Options) -> list[str]:
    """Returns what no layout says of a model whose type is not read: what the type has, and what its values show."""
    kind = MODEL_TYPES.get(str(options.get("model_type")))
    for trait in kind.missing if kind else ():
        options.refuse(True, trait)
    activations = {activation for names in ACTIVATIONS.values() for activation in names}
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        value = options.get(name)
        options.refuse(isinstance(value, str) and value not in activations, f"activation {value!r}")
    for name in ("attention_bias", "mlp_bias", "use_bias", "bias"):
        options.refuse(options.get(name) is True, f"biases ({name})")
    options.refuse(options.get("vision_config") is not None, "images")
    options.refuse(options.get("alibi") is True, "positions as biases of scores (alibi)")
    options.refuse(options.get("parallel_attn") is True, "mixer and feed-forward beside each other (parallel_attn)")
    with contextlib.suppress(InvalidInput):  # values of no known form are no trait
        options.rope(part_of=_ANY_HEAD)
    return [trait for trait in options.missing if trait != SEVERAL_BASES]  # each block has its own


FAMILIES: dict[str, Callable[[Options], TrainedModel]] = {
    **{name: stock.read for name, stock in STOCK.items()},
    **HYBRIDS,
    "hilnas": _hilnas_model,
}
"""transformers' `model_type` -> reader of its configuration; also that of folders that hilnas wrote."""
