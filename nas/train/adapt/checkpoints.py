"""Reads trained models as a layout and weights under our names: folders of Hugging Face's transformers, GGUF files.

Only config.json and safetensors files of a folder are read: no pickle, no download, no code of the folder. A GGUF file
is read as the folder that it was made of, see `nas.train.adapt.gguf_model`. Families whose forward
pass is that of `nas.model.nn.model` up to constants are read; constants become part of the weights:

    rms_norm_eps e        Our epsilon is E = 1e-5. With c = sqrt(E / e), RMSNorm(c x; E) = RMSNorm(x; e). So the
                          embedding and every projection into the residual stream are multiplied by c, and the
                          projections in front of QK-norm, too.
    embedding_multiplier  on the embedding; residual_multiplier and routed_scaling_factor on those projections
    attention_multiplier  times sqrt(head_dim) on the queries, since we divide scores by sqrt(head_dim); with QK-norm on
                          its gain. query_pre_attn_scalar of Gemma is 1 / attention_multiplier^2.
    logits_scaling        on the last norm's gain, as is what a tied embedding must not add to the logits
    attention_factor      of YaRN, squared, on the queries likewise; of LongRoPE on their rows that turn
    multipliers           of Falcon-H1, on the rows of the projections in front of them or behind them
    norms by 1 + w        w + 1 is the gain
    LayerNorm without     Means are subtracted from the embedding and from projections into the residual stream, which
      weights and biases  has none then, so that LayerNorm is RMSNorm.

Of a model with towers (`nas.train.towers`), its language model is read.

Everything else that a layout cannot say (other biases than those of Qwen2, RoPE of type dynamic, mixers and
feed-forwards beside each other ...) is refused, all of it at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import MAX_DEPTH, Layer, Layout, Norms
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile, is_gguf
from nas.model.blocks.mamba2 import inner_width
from nas.model.nn.model import Model
from nas.model.nn.rope import turned_numbers
from nas.model.nn.transformers import CONV_NAMES, TensorName, stock_names, tensor_names, weight_name
from nas.train.adapt.gguf_model import EMBEDDING, HEAD, GgufModel, TheirTensors, few
from nas.train.adapt.model_types import MODEL_TYPES
from nas.train.release.huggingface import Planned, write_safetensors
from nas.train.release.shards import ADAPTER, ADAPTER_PROBLEM, Shards, read_json, shard_files

IMPORT_VERSION = 3
"""Increase it with every change after which the same files give other weights."""
EPS = 1e-5
"""Epsilon of every norm of `nas.model.nn.model`."""
_MOST_SHARE = 2.0
"""A share of a head that no check lets pass, for those above 1."""
_CONFIG_BYTES = 1 << 20
"""Largest config.json."""
_INTO_RESIDUAL = ("o.weight", "out.weight", "down.weight")
"""Projections into the residual stream."""
WITH_TOWERS = ("lfm2_vl", "hilnas_vl", "hilnas_audio")
"""Types of models that consist of a language model and towers: transformers' class, and ours where it has none."""
_TEXT_TYPES = {"qwen3_5": "qwen3_5_text"}
"""Other types with an encoder of images, which is left out -> type of their language model."""
LANGUAGE_MODEL = "model.language_model."
"""Prefix of the language model's tensors there, but for those of an output head."""
_FROM_ROTARY = "rotary_emb.inv_freq"
"""A buffer that old releases of transformers saved; it follows from the configuration."""


Factor = float | tuple[float, ...]
"""What a tensor is multiplied by: all of it, or each of its rows."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that is adapted.

    Args:
        layout: of it.
        family: transformers' name of the architecture, or "hilnas".
        names: tensors of the files, and what ours they hold; none: they have our names. One without a name of theirs
            holds ones.
        factors: our tensor -> what it is multiplied by; those left out are as in the file.
        left_out: what the model has besides.
    """

    layout: Layout
    family: str
    names: tuple[TensorName, ...] = ()
    factors: Mapping[str, Factor] = field(default_factory=dict)
    left_out: str = ""


def read_model(source: Path) -> TrainedModel:
    """Reads the configuration in a folder of transformers, or that of a GGUF file.

    Raises:
        Unsupported: layouts cannot say this model; the message lists everything that is missing.
        InvalidInput: there is no readable configuration.
    """
    return _read(_opened(source))


def _read(source: _Source) -> TrainedModel:
    where, config = source.where, source.config
    kind = config.get("model_type")
    options = _Options(config, source, where)
    if not isinstance(kind, str) or kind not in FAMILIES:
        traits = _unsayable(options)
        missing = f"; missing: {'; '.join(traits)}" if traits else ""
        families = ", ".join(sorted(FAMILIES))
        raise Unsupported(
            f"no layout says models of type {kind!r}{missing}; families that are read: {families}", where=where
        )
    if config.get("quantization_config") is not None:
        options.missing.append("weights that are quantised (quantization_config)")
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
    origin = {ours: name for name in names for ours in name.ours}
    shapes = _shapes(model.layout)
    assert origin.keys() == shapes.keys(), "the family names every tensor of the layout"
    tensors = opened.tensors()
    tensors.check({name.theirs for name in names if name.theirs}, tied=model.layout.tied)
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


class _Source(Protocol):
    """A model that is read."""

    @property
    def where(self) -> str:
        """Its file, for messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """What its config.json says, or would say."""
        ...

    @property
    def left_out(self) -> str:
        """What is not read of it."""
        ...

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that RoPE turns, where the file says that apart from its configuration; 0: it does not."""
        ...

    def tensors(self) -> TheirTensors:
        """Opens the weights."""
        ...

    def has_other_head(self) -> bool:
        """Returns whether there is a head that differs from the embedding: then transformers does not tie them."""
        ...


def _opened(source: Path) -> _Source:
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
        self.config: Mapping[str, Any] = read_json(folder / "config.json", _CONFIG_BYTES)
        self._inside = self.left_out = ""
        kind = str(self.config.get("model_type"))
        if kind in WITH_TOWERS or kind in _TEXT_TYPES:
            tied = self.config.get("tie_embedding", self.config.get("tie_word_embeddings", kind in WITH_TOWERS))
            self._inside, text = LANGUAGE_MODEL, self.config.get("text_config")
            named = {"model_type": _TEXT_TYPES[kind]} if kind in _TEXT_TYPES else {}
            self.config = {**named, **(text if isinstance(text, dict) else {}), "tie_word_embeddings": tied}
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
    """Returns the version of this file and the SHA-256 of the files that are read and written."""
    return {"v": IMPORT_VERSION, "files": [sha256_of(path) for path in (*model_files(source), output)]}


def _converted(
    one: Planned,
    origin: Mapping[str, TensorName],
    factors: Mapping[str, Factor],
    files: Mapping[str, Tensor],
    where: str,
) -> Tensor:
    source = origin[one.name]
    tensor = source.split(files)[one.name] if source.theirs else torch.ones(one.shape)
    if tuple(tensor.shape) != one.shape:
        raise InvalidInput(
            f"{origin[one.name].theirs} gives {one.name} the shape {list(tensor.shape)}, its layout needs"
            f" {list(one.shape)}",
            where=where,
        )
    if not tensor.isfinite().all():
        raise InvalidInput(f"{origin[one.name].theirs} holds NaN or infinity", where=where)
    if (factor := factors.get(one.name, 1.0)) == 1.0:
        return tensor
    rows = torch.tensor(factor).view(-1, *[1] * (tensor.ndim - 1))
    if not (tensor := tensor * rows).isfinite().all():
        raise InvalidInput(
            f"{origin[one.name].theirs} becomes infinite: constants of its configuration multiply it by {rows.max():g}",
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
        others = sorted(name for name in self if name not in used and not name.endswith(_FROM_ROTARY))
        if others:
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

# Configurations. Defaults are those of transformers' configuration classes.


def _rope_type(rope: Mapping[str, Any]) -> Any:
    """Returns the type of RoPE's scaling, under the name of today; that with two lists of numbers had others."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "longrope" if kind == "su" or (kind == "yarn" and "long_factor" in rope) else kind


class _Options:
    """The values of a config.json, and what of them no layout can say."""

    def __init__(self, config: Mapping[str, Any], source: _Source, where: str) -> None:
        self._config, self._source, self.where = config, source, where
        self.missing: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or `default` where it is missing or null."""
        value = self._config.get(name)
        return default if value is None else value

    def given(self, name: str) -> bool:
        """Returns whether a value is not null; a missing one is the class's default."""
        return name not in self._config or self._config[name] is not None

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a whole number."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInput(f"{name} must be a whole number, not {value!r}", where=self.where)
        return value

    def taps(self, name: str) -> int:
        """Returns how many tokens the convolution in front of a recurrence reads; 4 where none is named."""
        taps = self.whole(name, 4)
        self.refuse(taps < 2, f"convolutions of {taps} taps ({name})")
        return max(taps, 2)

    def number(self, name: str, default: float) -> float:
        """Returns a positive number."""
        return self.positive(name, self.get(name, default))

    def numbers(self, name: str, count: int, inside: Mapping[str, Any] | None = None) -> list[float]:
        """Returns `count` positive numbers, of the object `inside` if that is given; ones where there are none."""
        values = self.get(name, [1.0] * count) if inside is None else inside.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise InvalidInput(f"{name} must be a list of {count} numbers", where=self.where)
        return [self.positive(name, value) for value in values]

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} must be true or false, not {value!r}", where=self.where)
        return value

    def tied(self, default: bool) -> bool:
        """Returns whether the head is the embedding: as configured, unless the files hold another head."""
        return self.flag("tie_word_embeddings", default) and not self._source.has_other_head()

    def refuse(self, when: bool, what: str) -> None:
        """Adds `what` to the list of what is missing."""
        if when and what not in self.missing:
            self.missing.append(what)

    def of_layers(self, name: str, valid: Mapping[str, str], depth: int) -> list[str]:
        """Returns the list `name` with one of `valid`'s values per layer."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != depth:
            raise InvalidInput(f"{name} must be a list of {depth} names", where=self.where)
        for value in values:
            self.refuse(not isinstance(value, str) or value not in valid, f"layers of type {value!r}")
        return [valid.get(str(value), "") for value in values]

    def activation(self, valid: tuple[str, ...] = ("silu", "swish"), key: str = "hidden_act") -> None:
        """Refuses an activation that is none of `valid`, by default SiLU."""
        name = self.get(key, valid[0])
        self.refuse(name not in valid, f"activation {name!r}")

    def object(self, name: str) -> dict[str, Any]:
        """Returns the values of an object that are not null; {} where there is none."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise InvalidInput(f"{name} must be an object", where=self.where)
        return {name: part for name, part in value.items() if part is not None}

    def rope(
        self,
        default: float = 10000.0,
        *,
        part_of: int | None = None,
        share: float = 1.0,
        rope: Mapping[str, Any] | None = None,
        long: bool = False,
    ) -> dict[str, Any]:
        """Returns RoPE's base and scaling, as arguments of blocks; refuses partial RoPE, and scaling of other forms.

        As in transformers, `rope_scaling` replaces `rope_parameters`, and the base in it wins over one beside it. Where
        the family turns a part of each head, `part_of` is the head size and `share` the default; where its layers
        differ, `rope` is what stands for `rope_parameters`. With `long`, the caller reads LongRoPE's numbers.
        """
        rope = (self.object("rope_scaling") or self.object("rope_parameters")) if rope is None else rope
        kind = _rope_type(rope)
        scaled = kind in ("linear", "llama3", "yarn") or (long and kind == "longrope")
        types = "'linear', 'llama3', 'yarn' and, in most types, 'longrope'"
        self.refuse(kind != "default" and not scaled, f"RoPE of type {kind!r}: blocks have {types}")
        self.refuse(any(isinstance(value, dict) for value in rope.values()), _SEVERAL_BASES)
        share = rope.get("partial_rotary_factor", self.get("partial_rotary_factor", share))
        share = min(self.positive("partial_rotary_factor", share), _MOST_SHARE)
        self.refuse(part_of is None and share != 1, f"RoPE on a part of each head ({share!r})")
        part = {"rope_dim": int(part_of * share)} if part_of and share != 1 else {}
        part = {"rope_dim": self._source.rope_dim} if self._source.rope_dim else part
        self.refuse(bool(part) and kind == "yarn", "RoPE of type 'yarn' on a part of each head")
        theta = rope.get("rope_theta", self.get("rope_theta", self.get("theta", default)))
        return {"rope_theta": self.positive("rope_theta", theta)} | part | (self._scaling(rope, kind) if scaled else {})

    def _scaling(self, rope: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Returns `rope_factor`, of "llama3" and "yarn" also `rope_tokens`."""
        length = "original_max_position_embeddings"
        if kind == "longrope":
            return {"rope_long": self._original(rope)}
        factor = self.positive("factor", self._factor(rope))
        self.refuse(factor < 1, f"RoPE that is sped up (factor {factor:g})")
        if kind == "linear" or factor <= 1:
            return {"rope_factor": max(factor, 1.0)}
        tokens = {"rope_factor": factor, "rope_tokens": self.whole(length, rope.get(length))}
        if kind == "yarn":
            turns = [rope.get("beta_fast") or 32, rope.get("beta_slow") or 1]
            self.refuse(turns != [32, 1], f"RoPE of type 'yarn' with other bounds {turns} than 32 and 1")
            self.refuse(rope.get("truncate", True) is not True, "RoPE of type 'yarn' between pairs (truncate)")
            return {**tokens, "rope_yarn": True}
        turns = [rope.get(f"{name}_freq_factor") for name in ("low", "high")]
        self.refuse(turns != [1, 4], f"RoPE of type 'llama3' with other factors of low and high frequencies {turns}")
        return tokens

    def _original(self, rope: Mapping[str, Any]) -> int:
        """Returns the length of a text before its positions are scaled."""
        length = "original_max_position_embeddings"
        usual = 4096 if self.get("model_type") == "phi3" else self.get("max_position_embeddings")
        return self.whole(length, rope.get(length, usual))

    def _factor(self, rope: Mapping[str, Any]) -> Any:
        """Returns the factor of scaling; that of YaRN may follow from the lengths."""
        length = rope.get("original_max_position_embeddings")
        if rope.get("factor") is not None or rope.get("rope_type", rope.get("type")) != "yarn" or not length:
            return rope.get("factor")
        lengths = (self.positive("max_position_embeddings", self.get("max_position_embeddings")), length)
        return lengths[0] / self.positive("original_max_position_embeddings", lengths[1])

    def long_divisors(self, rope: Mapping[str, Any], pairs: int) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Returns LongRoPE's divisors of angles, of short and of long texts, and a factor of what turns of queries."""
        short, long = (tuple(self.numbers(f"{name}_factor", pairs, rope)) for name in ("short", "long"))
        length = self.positive("original_max_position_embeddings", self._original(rope))
        factor = self.positive("factor", rope.get("factor") or self.number("max_position_embeddings", length) / length)
        usual = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length)) if length > 1 else 1.0
        return short, long, self.positive("attention_factor", rope.get("attention_factor") or usual) ** 2

    def scores(self, rope: Mapping[str, Any]) -> float:
        """Returns what YaRN multiplies products of queries and keys by; 1 for RoPE of other types."""
        if _rope_type(rope) != "yarn":
            return 1.0
        factor = self.positive("factor", self._factor(rope))
        parts = [self.positive(name, rope[name]) for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        scales = [0.1 * part * math.log(max(factor, 1.0)) + 1.0 for part in (parts if len(parts) == 2 else (1.0, 0.0))]
        return self.positive("attention_factor", rope.get("attention_factor", scales[0] / scales[1])) ** 2

    def positive(self, name: str, value: Any) -> float:
        """Returns `value` if it is a positive number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise InvalidInput(f"{name} must be a positive number, not {value!r}", where=self.where)
        return float(value)


def _size(options: _Options) -> tuple[int, int, int]:
    """Returns width, depth and vocabulary."""
    depth = options.whole("num_hidden_layers")
    if not 1 <= depth <= MAX_DEPTH:
        raise InvalidInput(f"num_hidden_layers must be in [1, {MAX_DEPTH}], not {depth}", where=options.where)
    return options.whole("hidden_size"), depth, options.whole("vocab_size")


@dataclass(frozen=True)
class _Constants:
    """Constants of a configuration that become part of the weights; see the module.

    Args:
        embedding: times the embedding.
        residual: times what blocks add.
        attention: times products of queries and keys; None: 1 / sqrt(head_dim).
        logits: what logits are divided by.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0

    @staticmethod
    def of_granite(options: _Options) -> _Constants:
        """Returns those of Granite."""
        names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
        return _Constants(*(options.number(name, 1.0) for name in names))

    @staticmethod
    def of_gemma(options: _Options) -> _Constants:
        """Returns those of Gemma, whose embedding is multiplied by the root of the width."""
        scalar = None
        if options.get("model_type") != "gemma":
            scalar = 1 / math.sqrt(options.number("query_pre_attn_scalar", 256))
        return _Constants(math.sqrt(max(options.whole("hidden_size"), 1)), attention=scalar)


@dataclass(frozen=True)
class _Experts:
    """What a family's mixtures of experts have of their own, all of them scored by a softmax.

    Args:
        default: their number if the configuration has none.
        top_k: experts per token if the configuration has none.
        width: key of an expert's width.
        usual: default of it.
        norm_topk: key of whether a token's weights add up to one, which they do not by default; none: they always do.
        shared: key of the width of shared experts.
        joint_width: default of it.
        gated: whether these have a gate, as in Qwen2-MoE; else their tensors are Granite's.
        router: name of the router's module.
    """

    default: int
    top_k: int
    width: str
    usual: int
    norm_topk: str = ""
    shared: str = ""
    joint_width: int = 0
    gated: bool = False
    router: str = "gate"

    def read(self, options: _Options) -> Block:
        """Returns the mixture of a configuration."""
        width = options.whole(self.width, self.usual)
        count = next((name for name in _COUNTS if options.get(name) is not None), _COUNTS[0])
        joint = options.whole(self.shared, self.joint_width) if self.shared else 0
        whole = width > 0 and joint % width == 0
        options.refuse(not whole, f"shared experts of width {joint}, no multiple of that of an expert, {width}")
        return Block.of(
            "moe",
            experts=options.whole(count, self.default),
            top_k=options.whole("num_experts_per_tok", self.top_k),
            width=width,
            shared=joint // width if whole else 0,
            shared_gate=self.gated,
            softmax=True,
            norm_topk=options.flag(self.norm_topk) if self.norm_topk else True,
        )

    def names(self, block: Block) -> Iterator[TensorName]:
        """Yields the tensors of a mixture, below a layer. Their routers have no bias."""
        yield weight_name("router", f"mlp.{self.router}")
        yield TensorName(("bias.weight",), "")
        yield TensorName(("gate.weight", "up.weight"), "mlp.experts.gate_up_proj")
        yield TensorName(("down.weight",), "mlp.experts.down_proj")
        if self.gated:
            yield weight_name("shared_gate", "mlp.shared_expert_gate")
            for part in ("gate", "up", "down"):
                yield weight_name(f"shared.{part}", f"mlp.shared_expert.{part}_proj")
        elif block.int("shared"):
            yield from (replace(name, ours=tuple(f"shared.{part}" for part in name.ours)) for name in _GRANITE_FFN)


_COUNTS = ("num_experts", "num_local_experts")
"""Keys of the number of experts; transformers writes and reads either."""
_BEFORE = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_BEHIND = {"mixer_out_norm": "post_attention_layernorm", "ffn_out_norm": "post_feedforward_layernorm"}
_GEMMA = {"mixer_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {**_BEFORE, "mixer_out_norm": "post_self_attn_layernorm", "ffn_out_norm": "post_mlp_layernorm"}


@dataclass(frozen=True)
class _Stock:
    """What a family of attention and dense feed-forwards has of its own; defaults are those of its configuration class.

    Args:
        tied: whether the head is the embedding.
        base: RoPE's.
        eps: of norms.
        head_dim: head size; none: width / heads.
        qk_norm: whether there is QK-norm.
        qk_norm_wide: whether it is over all heads together.
        qkv_bias: whether queries, keys and values have biases; the name of a switch that is on by default.
        ffn: block kind of the feed-forwards.
        activation: key of their activation.
        windows: what has windows: "" nothing, "all" layers, "switch" layers if use_sliding_window is set, "types" those
            that layer_types says.
        window: its size where the configuration has none; none: it has no window then.
        period: of "types" where there is no list: the last layer of each sees all tokens; below 0: the first.
        local: base of RoPE in layers with windows where that has settings of its own, with the key of the base.
        biases: switches of biases.
        pairs: whether RoPE turns neighbouring numbers.
        part: share of a head that RoPE turns if the configuration has none; None: whole heads.
        joined: what is one tensor: "qkv", and "gate_up".
        norms: our norms of a layer, and theirs.
        plus: what norms add to their weights.
        centred: whether norms are LayerNorms without weights.
        sinks: whether attention has sinks.
        constants: of a configuration.
        capped: whether logits are bounded if the configuration does not say so; none: they never are.
        experts: of the mixtures in place of dense feed-forwards; none: there are none.
    """

    tied: bool = False
    base: float = 10000.0
    eps: float = 1e-6
    head_dim: int | None = None
    qk_norm: bool = False
    qk_norm_wide: bool = False
    qkv_bias: bool | str = False
    ffn: str = "swiglu"
    activation: str = "hidden_act"
    windows: str = ""
    window: int | None = None
    period: int = 0
    local: tuple[str, float] | None = None
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias")
    pairs: bool = False
    part: float | None = None
    joined: tuple[str, ...] = ()
    norms: Mapping[str, str] = field(default_factory=lambda: _BEFORE)
    plus: float = 0.0
    centred: bool = False
    sinks: bool = False
    constants: Callable[[_Options], _Constants] = lambda options: _Constants()
    capped: bool | None = None
    experts: _Experts | None = None

    def read(self, options: _Options) -> TrainedModel:
        """Reads a configuration of the family."""
        d_model, depth, vocab = _size(options)
        options.activation(_activations(options, self.ffn), self.activation)
        for name in self.biases:
            options.refuse(options.flag(name), f"biases ({name})")
        options.refuse(options.get("clip_qkv") is not None, "clipped queries, keys and values (clip_qkv)")
        options.refuse(bool(options.get("use_bidirectional_attention")), "attention to later tokens")
        attention = _attention(options, d_model, qk_norm=self.qk_norm, head_dim=self.head_dim)
        attention["qk_norm_wide"] = self.qk_norm_wide
        attention["qkv_bias"] = options.flag(self.qkv_bias, True) if isinstance(self.qkv_bias, str) else self.qkv_bias
        attention["softcap"] = options.number("attn_logit_softcapping", 50.0) if self._capped(options, "attn") else 0.0
        windows = _windows(options, depth, self)
        ropes = {
            inside: self._rope(options, attention["head_dim"], inside) for inside in {w is not None for w in windows}
        }
        layers = []
        for window, base, ffn in zip(windows, _bases(options, windows), self._feeding(options, depth), strict=True):
            shape = attention | ropes[window is not None][0]
            shape |= {} if base is None else {"rope_theta": base}
            if self.sinks:
                mixer = Block.of("swa", window=_WIDEST if window is None else window, sink=True, **shape)
            else:
                mixer = Block.of("gqa", **shape) if window is None else Block.of("swa", window=window, **shape)
            layers.append(Layer((mixer,), ffn))
        softcap = options.number("final_logit_softcapping", 30.0) if self._capped(options, "final") else 0.0
        norms: Norms = "before" if self.norms.keys() == _BEFORE.keys() else "both"
        norms = "behind" if self.norms.keys() == _BEHIND.keys() else norms
        layout = Layout.of(d_model, vocab, layers, tied=options.tied(self.tied), norms=norms, softcap=softcap)
        eps = EPS if self.centred else options.number("rms_norm_eps", self.eps)
        scores = [ropes[window is not None][1] for window in windows]
        model = _trained(options, layout, tuple(self._names(layout)), eps, self.constants(options), scores)
        return self._with_divisors(options, model) if layers[0].mixers[0].get("rope_long") else model

    def _with_divisors(self, options: _Options, model: TrainedModel) -> TrainedModel:
        """Adds LongRoPE's numbers to the factors of a model; what they multiply of scores becomes part of queries."""
        rope = options.object("rope_scaling") or options.object("rope_parameters")
        factors = dict(model.factors)
        for i, layer in enumerate(model.layout.layers):
            place, block = f"layers.{i}.mixers.0", layer.mixers[0].resolve(model.layout.d_model)
            turned = turned_numbers(block)
            short, long, scores = options.long_divisors(rope, turned // 2)
            factors |= {f"{place}.rope_short.weight": short, f"{place}.rope_long.weight": long}
            if block.get("qk_norm") or block.get("qkv_bias"):
                options.refuse(scores != 1, "RoPE of type 'longrope' that scales queries behind a norm or a bias")
                continue
            q = f"{place}.q.weight"
            usual = float(torch.tensor(factors.get(q, 1.0)))
            head = (usual * scores,) * turned + (usual,) * (block.int("head_dim") - turned)
            factors[q] = head * block.int("heads")
        return replace(model, factors=factors)

    def _feeding(self, options: _Options, depth: int) -> list[Block]:
        """Returns the feed-forward of each layer."""
        if self.experts is None:
            return [Block.of(self.ffn, width=options.whole("intermediate_size"))] * depth
        mixture, dense = self.experts.read(options), options.get("mlp_only_layers", [])
        if not isinstance(dense, list):
            raise InvalidInput("mlp_only_layers must be a list of layers", where=options.where)
        step = max(options.whole("decoder_sparse_step", 1), 1)
        sparse = [index not in dense and (index + 1) % step == 0 for index in range(depth)]
        if all(sparse):
            return [mixture] * depth
        return [mixture if one else Block.of(self.ffn, width=options.whole("intermediate_size")) for one in sparse]

    def _capped(self, options: _Options, which: str) -> bool:
        """Returns whether logits of attention ("attn") or of tokens ("final") are bounded."""
        name = f"{which}_logit_softcapping"
        if self.capped is None:
            return False
        return options.get(name) is not None or (self.capped and options.given(name))

    def _rope(self, options: _Options, head_dim: int, inside: bool) -> tuple[dict[str, Any], float]:
        """Returns RoPE's arguments of layers with windows (`inside`) or without, and a factor of their scores."""
        part_of = None if self.part is None else head_dim
        if self.local is None:
            rope = options.object("rope_scaling") or options.object("rope_parameters")
            return options.rope(self.base, part_of=part_of, share=self.part or 1.0, long=True), options.scores(rope)
        by_type = options.object("rope_parameters")
        options.refuse(
            not all(isinstance(value, dict) for value in by_type.values()),
            "RoPE that is not given for each type of layer",
        )
        values = by_type.get("sliding_attention" if inside else "full_attention")
        rope = dict(values) if isinstance(values, dict) else {}
        rope |= {} if inside else options.object("rope_scaling")
        name, base = self.local if inside else ("rope_theta", self.base)
        rope.setdefault("rope_theta", options.get(name, base))
        rope = {key: value for key, value in rope.items() if value is not None}
        return options.rope(self.base, part_of=part_of, rope=rope), options.scores(rope)

    def _names(self, layout: Layout) -> Iterator[TensorName]:
        yield replace(weight_name("embed", "model.embed_tokens"), centred=1 if self.centred else None)
        for i, layer in enumerate(layout.layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            for norm, name in self.norms.items():
                yield self._norm(norm, name).under(ours, theirs) if not self.centred else _ones(f"{ours}.{norm}")
            for block, place in ((layer.mixers[0].resolve(layout.d_model), "mixers.0"), (layer.ffn, "ffn")):
                assert block is not None
                yield from (name.under(f"{ours}.{place}", theirs) for name in self._block(block))
        yield _ones("norm") if self.centred else self._norm("norm", "model.norm")
        if not layout.tied:
            yield weight_name("head", "lm_head")

    def _norm(self, ours: str, theirs: str) -> TensorName:
        return replace(weight_name(ours, theirs), plus=self.plus)

    def _block(self, block: Block) -> Iterator[TensorName]:
        if block.kind == "moe":
            assert self.experts is not None
            yield from self.experts.names(block)
            return
        joined = "".join(self.joined)
        for name in stock_names(block):
            part = name.ours[0].partition(".")[0]
            if part in joined and not part.endswith("_norm"):
                continue
            if self.pairs and part in ("q", "k"):
                name = replace(name, order=_pairs(block.int("head_dim"), block.int("rope_dim")))
            if part.endswith("_norm"):
                name = replace(name, plus=self.plus)
            yield replace(name, centred=0) if self.centred and part in ("o", "down") else name
        if self.sinks and block.kind == "swa":
            yield TensorName(("sinks.weight",), "self_attn.sinks")
        if block.spec.role == "mixer" and "qkv" in self.joined:
            rows = tuple(block.int(heads) * block.int("head_dim") for heads in ("heads", "kv_heads", "kv_heads"))
            yield TensorName(tuple(f"{name}.weight" for name in "qkv"), "self_attn.qkv_proj.weight", axis=0, sizes=rows)
        if block.spec.role == "ffn" and "gate_up" in self.joined:
            yield TensorName(("gate.weight", "up.weight"), "mlp.gate_up_proj.weight", axis=0)


_WIDEST = 1 << 20
"""Window of a layer that sees all tokens and has sinks, which blocks of windows have."""


def _ones(ours: str) -> TensorName:
    return TensorName((f"{ours}.weight",), "")


def _pairs(head_dim: int, turned: int) -> tuple[int, ...]:
    """Returns the order of rows where RoPE turns neighbours among the first `turned` (0: all) numbers of a head."""
    turned = turned or head_dim
    return (*range(0, turned, 2), *range(1, turned, 2), *range(turned, head_dim))


def _activations(options: _Options, ffn: str) -> tuple[str, ...]:
    """Returns the names of a kind's activation; transformers takes Gemma's "gelu" for the approximation by tanh."""
    return _ACTIVATIONS[ffn] + (("gelu",) if options.get("model_type") == "gemma" else ())


def _attention(options: _Options, d_model: int, *, qk_norm: bool, head_dim: int | None = None) -> dict[str, Any]:
    """Returns arguments of the attention blocks; `head_dim` is the default of the family."""
    heads = options.whole("num_attention_heads")
    usual = d_model // max(heads, 1)
    return {
        "heads": heads,
        "kv_heads": options.whole("num_key_value_heads", heads),
        "head_dim": options.whole("head_dim", head_dim if head_dim and options.given("head_dim") else usual),
        "qk_norm": qk_norm,
    }


def _windows(options: _Options, depth: int, stock: _Stock) -> list[int | None]:
    """Returns the window of each layer; None: it sees all tokens."""
    kind = options.get("model_type")
    valid = {name: name for name in ("full_attention", "sliding_attention")}
    default = stock.window if options.given("sliding_window") else None
    value = options.get("sliding_window", default)
    if stock.windows == "all":
        return [None if value is None else options.whole("sliding_window", value)] * depth
    switched = stock.windows == "switch" and options.flag("use_sliding_window")
    if not switched and (stock.windows != "types" or value is None):
        return [None] * depth
    qwen = kind in ("qwen2", "qwen3")
    window = options.whole("sliding_window", 4096 if qwen else default)
    if options.get("layer_types") is not None:
        within = [kind == "sliding_attention" for kind in options.of_layers("layer_types", valid, depth)]
    elif stock.windows == "types":
        period = max(options.whole("sliding_window_pattern", abs(stock.period)), 1)
        within = [(i + (stock.period > 0)) % period != 0 for i in range(depth)]
    elif qwen:
        within = [i >= options.whole("max_window_layers", 28) for i in range(depth)]
    elif kind == "qwen2_moe":
        within = [i % 2 == 0 and i < options.whole("max_window_layers", 28) for i in range(depth)]
    else:
        within = [base is None for base in _bases(options, [None] * depth)]
    return [window if inside else None for inside in within]


def _bases(options: _Options, windows: list[int | None]) -> list[float | None]:
    """Returns RoPE's base of each layer where the family's layers differ, 0: no positions; None: the model's."""
    kind, depth = options.get("model_type"), len(windows)
    if kind == "exaone4" and any(window is not None for window in windows):
        return [0.0 if window is None else None for window in windows]
    if kind in ("granite_swa", "granitemoe_swa") and options.get("layer_rope_theta") is not None:
        bases = options.get("layer_rope_theta")
        if not isinstance(bases, list) or len(bases) != depth:
            raise InvalidInput(f"layer_rope_theta must be a list of {depth} numbers", where=options.where)
        return [0.0 if base == 0 else options.positive("layer_rope_theta", base) for base in bases]
    if kind != "smollm3":
        return [None] * depth
    flags = options.get("no_rope_layers")
    if flags is None:
        interval = options.whole("no_rope_layer_interval", 4)
        return [None if (i + 1) % max(interval, 1) != 0 else 0.0 for i in range(depth)]
    if not isinstance(flags, list) or len(flags) < depth:
        raise InvalidInput(f"no_rope_layers must be a list of {depth} numbers", where=options.where)
    return [None if flag else 0.0 for flag in flags[:depth]]


def _granite_hybrid(options: _Options) -> TrainedModel:
    d_model, depth, vocab = _size(options)
    options.activation()
    options.refuse(options.flag("attention_bias"), "biases (attention_bias)")
    attention = _attention(options, d_model, qk_norm=False)
    positions = options.get("position_embedding_type")
    attention |= options.rope() if positions == "rope" else {"rope_theta": 0.0}
    valid = dict.fromkeys(("attention", "full_attention"), "gqa") | dict.fromkeys(
        ("mamba", "linear_attention"), "mamba2"
    )
    name = "layer_types" if options.get("layer_types") is not None else "layers_block_type"
    kinds = options.of_layers(name, valid, depth)
    mixers = {"gqa": Block.of("gqa", **attention)}
    eps = options.number("rms_norm_eps", 1e-6)
    if "mamba2" in kinds:
        mixers["mamba2"] = _granite_mamba(options, eps)
    if options.whole("num_local_experts", 8) > 0:
        ffn = _HYBRID_EXPERTS.read(options)
    else:
        ffn = Block.of("swiglu", width=options.whole("shared_intermediate_size", 1024))
    layers = [Layer((mixers[kind],), ffn) for kind in kinds if kind] or [Layer((mixers["gqa"],), ffn)]
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(False))
    return _trained(options, layout, tuple(_granite_names(layout)), eps, _Constants.of_granite(options))


def _granite_mamba(options: _Options, eps: float) -> Block:
    options.refuse(options.flag("mamba_proj_bias"), "biases (mamba_proj_bias)")
    options.refuse(not options.flag("mamba_conv_bias", True), "Mamba-2 without bias in its convolution")
    options.refuse(eps != EPS, f"Mamba-2 with norms of epsilon {eps:g}, other than {EPS:g}")
    _unlimited(options)
    return Block.of(
        "mamba2",
        state=options.whole("mamba_d_state", 256),
        heads=options.whole("mamba_n_heads", 128),
        expand=options.whole("mamba_expand", 2),
        conv=options.taps("mamba_d_conv"),
        groups=options.whole("mamba_n_groups", 1),
    )


def _unlimited(options: _Options) -> None:
    limit = options.get("time_step_limit", _NO_LIMIT)
    infinite = ({"__float__": "Infinity"}, "Infinity", math.inf)  # as releases of transformers write it
    options.refuse(limit not in [[0.0, value] for value in infinite], f"limited time steps ({limit})")


_NO_LIMIT = [0.0, math.inf]
_GRANITE_MAMBA = (
    weight_name("in_proj", "mamba.in_proj"),
    TensorName(("conv.weight",), "mamba.conv1d.weight", tap_axis=True),
    TensorName(("conv.bias",), "mamba.conv1d.bias"),
    *(TensorName((name,), f"mamba.{name}") for name in ("dt_bias", "A_log", "D")),
    weight_name("norm", "mamba.norm"),
    weight_name("out", "mamba.out_proj"),
)
_GRANITE_ATTENTION = tuple(weight_name(name, f"self_attn.{name}_proj") for name in "qkvo")
_GRANITE_FFN = (
    TensorName(("gate.weight", "up.weight"), "shared_mlp.input_linear.weight", axis=0),
    weight_name("down", "shared_mlp.output_linear"),
)


def _granite_names(layout: Layout) -> Iterator[TensorName]:
    yield weight_name("embed", "model.embed_tokens")
    for i, layer in enumerate(layout.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield weight_name("mixer_norm", "input_layernorm").under(ours, theirs)
        yield weight_name("ffn_norm", "post_attention_layernorm").under(ours, theirs)
        mixer = _GRANITE_MAMBA if layer.mixers[0].kind == "mamba2" else _GRANITE_ATTENTION
        yield from (name.under(f"{ours}.mixers.0", theirs) for name in mixer)
        assert layer.ffn is not None
        feeding = _HYBRID_EXPERTS.names(layer.ffn) if layer.ffn.kind == "moe" else _GRANITE_FFN
        yield from (name.under(f"{ours}.ffn", theirs) for name in feeding)
    yield weight_name("norm", "model.norm")
    if not layout.tied:
        yield weight_name("head", "lm_head")


_NEMOTRON = {
    "mamba2": tuple(replace(name, theirs=name.theirs.replace("mamba.", "mixer.")) for name in _GRANITE_MAMBA),
    "gqa": tuple(weight_name(name, f"mixer.{name}_proj") for name in "qkvo"),
    "relu2": tuple(weight_name(name, f"mixer.{name}_proj") for name in ("up", "down")),
}


def _nemotron_h(options: _Options) -> TrainedModel:
    """Reads layers of one block each."""
    d_model = options.whole("hidden_size")
    kinds = _nemotron_kinds(options)
    options.activation(_ACTIVATIONS["relu2"], "mlp_hidden_act")
    options.activation(key="mamba_hidden_act")
    for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        options.refuse(options.flag(name), f"biases ({name})")
    options.refuse(not options.flag("use_conv_bias", True), "Mamba-2 without bias in its convolution")
    eps = options.number("layer_norm_epsilon", EPS)
    options.refuse("mamba2" in kinds and eps != EPS, f"Mamba-2 with norms of epsilon {eps:g}, other than {EPS:g}")
    heads = options.whole("mamba_num_heads", 128)
    inner = heads * options.whole("mamba_head_dim", 64)
    attention = _attention(options, d_model, qk_norm=False, head_dim=128) | {"rope_theta": 0.0}
    halves = {"gqa": Layer((Block.of("gqa", **attention),)), "relu2": Layer(ffn=_nemotron_ffn(options))}
    if "mamba2" in kinds:
        mamba = Block.of(
            "mamba2",
            state=options.whole("ssm_state_size", 128),
            heads=heads,
            conv=options.taps("conv_kernel"),
            groups=options.whole("n_groups", 8),
            **_inner(inner, d_model),
        )
        halves["mamba2"] = Layer((mamba,))
    layers = [halves[kind] for kind in kinds if kind in halves] or [halves["gqa"]]
    layout = Layout.of(d_model, options.whole("vocab_size"), layers, tied=options.tied(False))
    return _trained(options, layout, tuple(_nemotron_names(layout)), eps)


def _inner(inner: int, d_model: int) -> dict[str, int]:
    """Returns the arguments of Mamba-2 that say how wide it is inside."""
    whole = d_model > 0 and inner % d_model == 0 and inner > 0
    return {"expand": inner // d_model} if whole else {"inner": inner}


def _falcon_h1(options: _Options) -> TrainedModel:
    """Reads layers of Mamba-2 and attention beside each other, each with multipliers of its own."""
    d_model, depth, vocab = _size(options)
    options.activation()
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        options.refuse(options.flag(name), f"biases ({name})")
    options.refuse(not options.flag("mamba_conv_bias", True), "Mamba-2 without bias in its convolution")
    _unlimited(options)
    eps, normed = options.number("rms_norm_eps", EPS), options.flag("mamba_rms_norm")
    options.refuse(
        normed and options.flag("mamba_norm_before_gate", True), "Mamba-2 with its norm in front of the gate"
    )
    options.refuse(normed and eps != EPS, f"Mamba-2 with norms of epsilon {eps:g}, other than {EPS:g}")
    mamba = Block.of(
        "mamba2",
        state=options.whole("mamba_d_state", 256),
        heads=options.whole("mamba_n_heads", 128),
        conv=options.taps("mamba_d_conv"),
        groups=options.whole("mamba_n_groups", 1),
        norm=normed,
        **_inner(options.whole("mamba_d_ssm", options.whole("mamba_expand", 2) * d_model), d_model),
    )
    attention = Block.of("gqa", **_attention(options, d_model, qk_norm=False), **options.rope())
    ffn = Block.of("swiglu", width=options.whole("intermediate_size", 14336))
    layout = Layout.of(d_model, vocab, [Layer((mamba, attention), ffn)] * depth, tied=options.tied(False))
    constants = _Constants(
        options.number("embedding_multiplier", 1.0), logits=1 / options.number("lm_head_multiplier", 1.0)
    )
    model = _trained(options, layout, tuple(_falcon_h1_names(layout)), eps, constants)
    factors = dict(model.factors)
    for i in range(depth):
        for name, factor in _falcon_h1_factors(options, mamba, d_model).items():
            name = f"layers.{i}.{name}"
            factors[name] = factor if isinstance(factor, tuple) else factor * model.factors.get(name, 1.0)
    return replace(model, factors=factors)


def _falcon_h1_factors(options: _Options, mamba: Block, d_model: int) -> dict[str, Any]:
    """Returns the multipliers of a layer, by the tensors that they become part of."""
    gate, down = options.numbers("mlp_multipliers", 2)
    inner, shared = inner_width(mamba, d_model), mamba.int("groups") * mamba.int("state")
    widths = (inner, inner, shared, shared, mamba.int("heads"))
    scale = options.number("ssm_in_multiplier", 1.0)
    parts = zip(options.numbers("ssm_multipliers", 5), widths, strict=True)
    read, keys = options.number("attention_in_multiplier", 1.0), options.number("key_multiplier", 1.0)
    return {
        "mixers.0.in_proj.weight": tuple(scale * part for part, width in parts for _ in range(width)),
        "mixers.0.out.weight": options.number("ssm_out_multiplier", 1.0),
        "mixers.1.q.weight": read,
        "mixers.1.k.weight": read * keys,
        "mixers.1.v.weight": read,
        "mixers.1.o.weight": options.number("attention_out_multiplier", 1.0),
        "ffn.gate.weight": gate,
        "ffn.down.weight": down,
    }


def _falcon_h1_names(layout: Layout) -> Iterator[TensorName]:
    yield weight_name("embed", "model.embed_tokens")
    for i, layer in enumerate(layout.layers):
        ours, theirs, (mamba, attention) = f"layers.{i}", f"model.layers.{i}", layer.mixers
        yield weight_name("mixer_norm", "input_layernorm").under(ours, theirs)
        yield weight_name("ffn_norm", "pre_ff_layernorm").under(ours, theirs)
        names = _GRANITE_MAMBA if mamba.get("norm") else (name for name in _GRANITE_MAMBA if "norm" not in name.theirs)
        yield from (name.under(f"{ours}.mixers.0", theirs) for name in names)
        yield from (name.under(f"{ours}.mixers.1", theirs) for name in stock_names(attention.resolve(layout.d_model)))
        for part in ("gate", "up", "down"):
            yield weight_name(f"{ours}.ffn.{part}", f"{theirs}.feed_forward.{part}_proj")
    yield weight_name("norm", "model.final_layernorm")
    if not layout.tied:
        yield weight_name("head", "lm_head")


def _mamba2(options: _Options) -> TrainedModel:
    """Reads layers of Mamba-2 alone."""
    d_model, depth, vocab = _size(options)
    options.activation()
    options.refuse(options.flag("use_bias"), "biases (use_bias)")
    options.refuse(not options.flag("use_conv_bias", True), "Mamba-2 without bias in its convolution")
    _unlimited(options)
    eps = options.number("layer_norm_epsilon", EPS)
    options.refuse(eps != EPS, f"Mamba-2 with norms of epsilon {eps:g}, other than {EPS:g}")
    mixer = Block.of(
        "mamba2",
        state=options.whole("state_size", 128),
        heads=options.whole("num_heads", 128),
        expand=options.whole("expand", 2),
        conv=options.taps("conv_kernel"),
        groups=options.whole("n_groups", 8),
    )
    layout = Layout.of(d_model, vocab, [Layer((mixer,))] * depth, tied=options.tied(False))
    return _trained(options, layout, tuple(_nemotron_names(layout)), eps)


def _nemotron_ffn(options: _Options) -> Block:
    return Block.of("relu2", width=options.whole("intermediate_size", 21504))


def _nemotron_kinds(options: _Options) -> list[str]:
    pattern, names = options.get("hybrid_override_pattern"), options.get("layers_block_type")
    if names is None and isinstance(pattern, str):
        names = [{"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}.get(letter, letter) for letter in pattern]
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_DEPTH:
        raise InvalidInput("layers_block_type must be a list of names, one a layer", where=options.where)
    valid = {
        "mamba": "mamba2",
        "linear_attention": "mamba2",
        "attention": "gqa",
        "full_attention": "gqa",
        "mlp": "relu2",
    }
    for name in names:
        options.refuse(name == "moe", "experts of squared ReLU without a gate (layers of type 'moe')")
        options.refuse(name not in (*valid, "moe"), f"layers of type {name!r}")
    return [valid.get(str(name), "") for name in names]


def _nemotron_names(layout: Layout) -> Iterator[TensorName]:
    yield weight_name("embed", "model.embed_tokens")
    for i, layer in enumerate(layout.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        block, place = (layer.mixers[0], "mixers.0") if layer.mixers else (layer.ffn, "ffn")
        assert block is not None
        norm = "mixer_norm" if layer.mixers else "ffn_norm"
        yield weight_name(norm, "norm").under(ours, theirs)
        yield from (name.under(f"{ours}.{place}", theirs) for name in _NEMOTRON[block.kind])
    yield weight_name("norm", "model.norm_f")
    if not layout.tied:
        yield weight_name("head", "lm_head")


def _lfm2(options: _Options) -> TrainedModel:
    d_model, depth, vocab = _size(options)
    options.refuse(options.flag("conv_bias"), "biases (conv_bias)")
    moe = options.get("model_type") == "lfm2_moe"
    attention = _attention(options, d_model, qk_norm=True) | options.rope(1e6)
    mixers = {"gqa": Block.of("gqa", **attention), "conv": Block.of("conv", kernel=options.whole("conv_L_cache", 3))}
    if options.get("layer_types") is None and isinstance(options.get("full_attn_idxs"), list):
        kinds = ["gqa" if i in options.get("full_attn_idxs") else "conv" for i in range(depth)]
    else:
        kinds = options.of_layers("layer_types", {"full_attention": "gqa", "conv": "conv"}, depth)
    options.refuse("conv" not in kinds, "an LFM2 without convolutions")
    dense = Block.of("swiglu", width=options.whole("intermediate_size", 7168) if moe else _lfm2_width(options))
    lead = options.whole("num_dense_layers", 2) if moe else depth
    experts = _lfm2_experts(options) if moe else dense
    layers = [Layer((mixers[kind],), dense if i < lead else experts) for i, kind in enumerate(kinds) if kind]
    layers = layers or [Layer((mixers["gqa"],), dense)]
    tied = options.tied(options.flag("tie_embedding", True))
    layout = Layout.of(d_model, vocab, layers, tied=tied)
    names = () if options.missing else tuple(tensor_names(layout))
    if moe and not options.flag("use_expert_bias", True):
        options.missing.append("experts without a bias (use_expert_bias)")
    return _trained(options, layout, names, options.number("norm_eps", EPS))


def _lfm3(options: _Options) -> TrainedModel:
    d_model, depth, vocab = _size(options)
    options.activation()
    for name in ("conv_bias", "attention_bias"):
        options.refuse(options.flag(name), f"biases ({name})")
    attention = _attention(options, d_model, qk_norm=True, head_dim=128)
    attention["gate"] = options.flag("use_attention_gate", True)
    mixers = {"conv": Block.of("conv", kernel=options.whole("conv_L_cache", 7))}
    orders: dict[str, tuple[int, ...]] = {}
    for kind in _LFM3_ROPE:
        ropes = options.object("rope_scaling") or options.object("rope_parameters") or _LFM3_ROPE
        rope = ropes.get(kind, ropes)
        if not isinstance(rope, dict):
            raise InvalidInput("rope_parameters must be an object of objects", where=options.where)
        shape, orders[kind] = _proportional(options, {"rope_theta": 1e6, **rope}, attention["head_dim"])
        window = options.whole("sliding_window", 256)
        mixers[kind] = (
            Block.of("gqa", **attention, **shape)
            if kind == "full_attention"
            else Block.of("swa", window=window, **attention, **shape)
        )
    if options.get("layer_types") is None:
        names = [
            "full_attention" if i % 4 == 2 else "conv" if i % 4 or i == 0 else "sliding_attention" for i in range(depth)
        ]
    else:
        names = options.of_layers("layer_types", {name: name for name in mixers}, depth)
    ffn = Block.of("swiglu", width=options.whole("intermediate_size", 7680))
    layers = [Layer((mixers[name],), ffn) for name in names if name] or [Layer((mixers["conv"],), ffn)]
    norms: Norms = "both" if options.flag("use_sandwich_norm", True) else "before"
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(True), norms=norms)
    theirs = () if options.missing else tuple(_lfm3_names(layout, names, orders))
    return _trained(options, layout, theirs, options.number("norm_eps", options.number("rms_norm_eps", EPS)))


_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def _proportional(options: _Options, rope: dict[str, Any], head_dim: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns RoPE's arguments of a layer, and the order of a head's rows.

    Of type "proportional" the first pairs of a head turn, as fast as where all do, and the others do not. With their
    rows in front that is RoPE on a part of the head, by a power of the base.
    """
    if rope.get("rope_type") != "proportional":
        return options.rope(1e6, rope=rope), ()
    options.refuse(rope.get("factor", 1.0) != 1.0, "RoPE of type 'proportional' with a factor")
    share = options.positive("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    base = options.positive("rope_theta", rope.get("rope_theta"))
    pairs = int(min(share, _MOST_SHARE) * head_dim // 2)
    options.refuse(not 0 < pairs <= head_dim // 2, f"RoPE of type 'proportional' on {share!r} of a head")
    if 2 * pairs == head_dim:
        return {"rope_theta": base}, ()
    half = head_dim // 2
    order = (*range(pairs), *range(half, half + pairs), *range(pairs, half), *range(half + pairs, head_dim))
    return {"rope_theta": base ** (2 * pairs / head_dim), "rope_dim": 2 * pairs}, order


def _lfm3_names(layout: Layout, kinds: list[str], orders: Mapping[str, tuple[int, ...]]) -> Iterator[TensorName]:
    yield weight_name("embed", "model.embed_tokens")
    norms = {"mixer_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    if layout.norms == "both":
        norms |= {"mixer_out_norm": "post_operator_norm", "ffn_out_norm": "post_ffn_norm"}
    for i, (layer, kind) in enumerate(zip(layout.layers, kinds, strict=True)):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield from (weight_name(*norm).under(ours, theirs) for norm in norms.items())
        mixer = layer.mixers[0]
        for name in CONV_NAMES if kind == "conv" else stock_names(mixer):
            turned = name.ours[0].partition(".")[0] in ("q", "k", "q_norm", "k_norm")
            order = orders[kind] if turned else ()
            yield replace(name, order=order).under(f"{ours}.mixers.0", theirs)
        for part, their_part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            yield weight_name(f"{ours}.ffn.{part}", f"{theirs}.feed_forward.{their_part}")
    yield weight_name("norm", "model.embedding_norm")
    if not layout.tied:
        yield weight_name("head", "lm_head")


def _qwen3_5(options: _Options) -> TrainedModel:
    """Reads attention with a gate for each of its numbers, and Gated DeltaNet."""
    d_model, depth, vocab = _size(options)
    options.activation()
    options.refuse(options.flag("attention_bias"), "biases (attention_bias)")
    eps = options.number("rms_norm_eps", 1e-6)
    attention = _attention(options, d_model, qk_norm=True, head_dim=256)
    attention |= options.rope(part_of=attention["head_dim"], share=0.25)
    keys, values = options.whole("linear_key_head_dim", 128), options.whole("linear_value_head_dim", 128)
    options.refuse(keys != values, f"Gated DeltaNet with keys of {keys} and values of {values} numbers")
    delta = Block.of(
        "gdn",
        heads=options.whole("linear_num_value_heads", 32),
        key_heads=options.whole("linear_num_key_heads", 16),
        head_dim=values,
        conv=options.taps("linear_conv_kernel_dim"),
        norm_eps=min(eps, 1e-2),
    )
    mixers = {"full_attention": Block.of("gqa", gate=True, gate_wide=True, **attention), "linear_attention": delta}
    if options.get("layer_types") is None:
        every = max(options.whole("full_attention_interval", 4), 1)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    else:
        kinds = options.of_layers("layer_types", {name: name for name in mixers}, depth)
    ffn = Block.of("swiglu", width=options.whole("intermediate_size", 12288))
    layers = [Layer((mixers[kind],), ffn) for kind in kinds if kind] or [Layer((delta,), ffn)]
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(False))
    return _trained(options, layout, () if options.missing else tuple(_qwen3_5_names(layout)), eps)


def _qwen3_5_names(layout: Layout) -> Iterator[TensorName]:
    yield weight_name("embed", "model.embed_tokens")
    for i, layer in enumerate(layout.layers):
        ours, theirs, mixer = f"layers.{i}", f"model.layers.{i}", layer.mixers[0].resolve(layout.d_model)
        assert layer.ffn is not None
        for norm in _BEFORE.items():
            yield replace(weight_name(*norm), plus=1.0).under(ours, theirs)
        names = _delta_names(mixer) if mixer.kind == "gdn" else _doubled_names(mixer)
        yield from (name.under(f"{ours}.mixers.0", theirs) for name in names)
        yield from (name.under(f"{ours}.ffn", theirs) for name in stock_names(layer.ffn))
    yield replace(weight_name("norm", "model.norm"), plus=1.0)
    if not layout.tied:
        yield weight_name("head", "lm_head")


def _doubled_names(block: Block) -> Iterator[TensorName]:
    """Yields attention whose queries have their gates behind them, head by head."""
    heads, size = block.int("heads"), block.int("head_dim")
    order = tuple(2 * size * head + part * size + i for part in (0, 1) for head in range(heads) for i in range(size))
    yield TensorName(("q.weight", "gate.weight"), "self_attn.q_proj.weight", axis=0, order=order)
    for name in stock_names(block):
        part = name.ours[0].partition(".")[0]
        if part not in ("q", "gate"):
            yield replace(name, plus=1.0 if part.endswith("_norm") else 0.0)


def _delta_names(block: Block) -> Iterator[TensorName]:
    """Yields Gated DeltaNet. Of r heads with one key they are neighbours there; here they are a whole round apart."""
    heads, groups, size = (block.int(name) for name in ("heads", "key_heads", "head_dim"))
    order = tuple(i % groups * (heads // groups) + i // groups for i in range(heads))
    values = tuple(size * head + i for head in order for i in range(size))
    keys = 2 * groups * size
    mixed = (*range(keys), *(keys + row for row in values))
    place = "linear_attn"
    yield replace(weight_name("qkv", f"{place}.in_proj_qkv"), order=mixed)
    yield TensorName(("conv.weight",), f"{place}.conv1d.weight", tap_axis=True, order=mixed)
    yield replace(weight_name("gate", f"{place}.in_proj_z"), order=values)
    yield replace(weight_name("beta", f"{place}.in_proj_b"), order=order)
    yield replace(weight_name("step_size", f"{place}.in_proj_a"), order=order)
    yield from (TensorName((name,), f"{place}.{name}", order=order) for name in ("dt_bias", "A_log"))
    yield weight_name("norm", f"{place}.norm")
    yield replace(weight_name("out", f"{place}.out_proj"), order=values, order_axis=1)


def _lfm2_width(options: _Options) -> int:
    """Returns the feed-forward's width as transformers' Lfm2MLP computes it."""
    width = options.whole("block_ff_dim", options.whole("intermediate_size", 12288))
    if not options.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(options.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = max(1, options.whole("block_multiple_of", 256))
    return -(-width // multiple) * multiple


def _lfm2_experts(options: _Options) -> Block:
    options.refuse(
        not options.flag("norm_topk_prob", True), "experts whose weights do not add up to one (norm_topk_prob)"
    )
    return Block.of(
        "moe",
        experts=options.whole("num_experts", 32),
        top_k=options.whole("num_experts_per_tok", 4),
        width=options.whole("moe_intermediate_size", 1792),
    )


def _own(options: _Options) -> TrainedModel:
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


def _trained(
    options: _Options,
    layout: Layout,
    names: tuple[TensorName, ...],
    eps: float,
    constants: _Constants = _Constants(),
    scaled: Sequence[float] = (),
) -> TrainedModel:
    """Returns the model with the factors that turn its constants into weights; see the module.

    scaled: what scores of each layer are multiplied by, besides `constants`; (): by nothing.
    """
    options.refuse(not 1e-15 <= eps <= 1e-2, f"norms of epsilon {eps:g}")
    norm = math.sqrt(EPS / eps)
    embedding, residual = norm * constants.embedding, norm * constants.residual
    # Without a norm in front, blocks read the stream as it is.
    read = 1 / norm if layout.norms == "behind" else 1.0
    routed = options.number("routed_scaling_factor", 1.0) if options.get("model_type") == "lfm2_moe" else 1.0
    factors: dict[str, float] = {"embed.weight": embedding}
    factors["norm.weight"] = 1 / ((embedding if layout.tied else 1.0) * constants.logits)
    for i, layer in enumerate(layout.layers):
        places = [(block, "mixer", f"layers.{i}.mixers.{j}") for j, block in enumerate(layer.mixers)]
        for block, part, prefix in [*places, *([(layer.ffn, "ffn", f"layers.{i}.ffn")] if layer.ffn else [])]:
            added = residual if layout.norms == "before" else norm  # times the gain of the norm behind
            added *= routed if block.kind == "moe" else 1.0
            factors[f"layers.{i}.{part}_out_norm.weight"] = residual
            factors |= {f"{prefix}.{name}": added for name in _INTO_RESIDUAL}
            if block.kind == "moe" and block.get("softmax"):
                factors |= {f"{prefix}.bias.weight": 0.0, f"{prefix}.shared.down.weight": added}
            factors |= {f"{prefix}.{name}.weight": read for name in ("v", "gate", "up")}
            if block.kind in ("gqa", "swa"):
                size = block.resolve(layout.d_model).int("head_dim")
                scores = 1.0 if constants.attention is None else constants.attention * math.sqrt(size)
                scores *= scaled[i] if scaled else 1.0
                normed = norm if block.get("qk_norm") else 1.0
                gain = "q_norm.weight" if block.get("qk_norm") else "q.weight"
                factors |= {f"{prefix}.{name}.weight": normed * read for name in ("q", "k")}
                factors |= {f"{prefix}.{name}.bias": normed for name in ("q", "k")}
                factors[f"{prefix}.{gain}"] = factors.get(f"{prefix}.{gain}", 1.0) * scores
                if not block.get("qk_norm"):
                    factors[f"{prefix}.q.bias"] = scores
    ours = {ours for name in names for ours in name.ours}
    used = {name: factor for name, factor in factors.items() if name in ours and factor != 1.0}
    return TrainedModel(layout, str(options.get("model_type")), names, used)


_ACTIVATIONS = {
    "swiglu": ("silu", "swish"),
    "relu2": ("relu2",),
    "geglu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
}
"""Block kind -> activations that it has, by their names in configurations; the first is the default."""
_SEVERAL_BASES = "several bases of RoPE"
_ANY_HEAD = 64
"""Size of a head where it does not matter."""


def _unsayable(options: _Options) -> list[str]:
    """Returns what no layout says of a model whose type is not read: what the type has, and what its values show."""
    kind = MODEL_TYPES.get(str(options.get("model_type")))
    for trait in kind.missing if kind else ():
        options.refuse(True, trait)
    activations = {activation for names in _ACTIVATIONS.values() for activation in names}
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        value = options.get(name)
        options.refuse(isinstance(value, str) and value not in activations, f"activation {value!r}")
    for name in ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "bias", "qkv_bias"):
        options.refuse(options.get(name) is True, f"biases ({name})")
    options.refuse(options.get("vision_config") is not None, "images")
    with contextlib.suppress(InvalidInput):  # values of no known form are no trait
        options.rope(part_of=_ANY_HEAD)
    return [trait for trait in options.missing if trait != _SEVERAL_BASES]  # each block has its own


_GEMMA_2 = _Stock(
    tied=True, head_dim=256, ffn="geglu", activation="hidden_activation", windows="types", window=4096, period=2,
    norms={**_GEMMA, **_BEHIND}, plus=1.0, constants=_Constants.of_gemma, capped=True,
)  # fmt: skip
_GRANITE_EXPERTS = _Experts(8, 2, "intermediate_size", 11008, router="router")
_GRANITE_SHARED = replace(_GRANITE_EXPERTS, shared="shared_intermediate_size")
_HYBRID_EXPERTS = replace(_GRANITE_SHARED, joint_width=1024)
_STOCK = {
    "arcee": _Stock(eps=1e-5, ffn="relu2"),
    "ernie4_5": _Stock(tied=True, base=5e5, eps=1e-5, head_dim=128, biases=("use_bias",), pairs=True),
    "exaone4": _Stock(eps=1e-5, qk_norm=True, windows="types", window=4096, period=4, norms=_BEHIND),
    "gemma": _Stock(tied=True, head_dim=256, ffn="geglu", plus=1.0, constants=_Constants.of_gemma),
    "gemma2": _GEMMA_2,
    "gemma3_text": replace(
        _GEMMA_2, base=1e6, qk_norm=True, period=6, local=("rope_local_base_freq", 1e4), capped=False
    ),
    "glm": _Stock(
        eps=1.5625e-7, head_dim=128, qkv_bias="attention_bias", biases=(), pairs=True, part=0.5, joined=("gate_up",)
    ),
    "glm4": _Stock(
        eps=1.5625e-7, head_dim=128, qkv_bias="attention_bias", biases=(), pairs=True, part=0.5, joined=("gate_up",),
        norms=_GLM4,
    ),
    "granite": _Stock(constants=_Constants.of_granite),
    "granitemoe": _Stock(constants=_Constants.of_granite, experts=_GRANITE_EXPERTS),
    "granitemoe_swa": _Stock(
        windows="types", window=128, period=-4, sinks=True, constants=_Constants.of_granite, experts=_GRANITE_SHARED
    ),
    "granitemoeshared": _Stock(constants=_Constants.of_granite, experts=_GRANITE_SHARED),
    "granite_swa": _Stock(
        tied=True, eps=1e-5, windows="types", window=128, period=-4, sinks=True, constants=_Constants.of_granite
    ),
    "helium": _Stock(base=1e5, eps=1e-8, head_dim=128, pairs=True),
    "llama": _Stock(),
    "mistral": _Stock(windows="all", window=4096),
    "mixtral": _Stock(
        base=1e6, eps=1e-5, windows="all", experts=_Experts(8, 2, "intermediate_size", 14336)
    ),
    "olmo": _Stock(centred=True),
    "olmo2": _Stock(eps=1e-5, qk_norm=True, qk_norm_wide=True, norms=_BEHIND),
    "olmo3": _Stock(
        base=5e5, eps=1e-5, qk_norm=True, qk_norm_wide=True, windows="types", window=4096, period=4, local=("", 5e5),
        norms=_BEHIND,
    ),
    "olmoe": _Stock(
        eps=1e-5, qk_norm=True, qk_norm_wide=True,
        experts=_Experts(64, 8, "intermediate_size", 2048, norm_topk="norm_topk_prob"),
    ),
    "phi3": _Stock(eps=1e-5, windows="all", part=1.0, joined=("qkv", "gate_up")),
    "qwen2": _Stock(qkv_bias=True, biases=(), windows="switch"),
    "qwen2_moe": _Stock(
        qkv_bias="qkv_bias", biases=(), windows="switch", window=4096,
        experts=_Experts(
            60, 4, "moe_intermediate_size", 1408, norm_topk="norm_topk_prob",
            shared="shared_expert_intermediate_size", joint_width=5632, gated=True,
        ),
    ),
    "qwen3_moe": _Stock(
        qk_norm=True, windows="switch", window=4096,
        experts=_Experts(128, 8, "moe_intermediate_size", 768, norm_topk="norm_topk_prob"),
    ),
    "qwen3": _Stock(head_dim=128, qk_norm=True, windows="switch"),
    "smollm3": _Stock(tied=True, base=2e6, windows="switch"),
    "vaultgemma": replace(_GEMMA_2, norms=_GEMMA),
}  # fmt: skip
FAMILIES: dict[str, Callable[[_Options], TrainedModel]] = {
    **{name: stock.read for name, stock in _STOCK.items()},
    "falcon_h1": _falcon_h1,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": _lfm3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "hilnas": _own,
}
"""transformers' `model_type` -> reader of its configuration; also that of folders that hilnas wrote."""
