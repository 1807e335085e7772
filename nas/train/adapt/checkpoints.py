"""Reads trained models as a layout and weights under our names: folders of Hugging Face's transformers, GGUF files.

Only config.json and safetensors files of a folder are read: no pickle, no download, no code of the folder. A GGUF file
is read as the folder that it was made of, see `nas.train.adapt.gguf_model`. Families whose forward
pass is that of `nas.model.nn.model` up to constants are read; constants become part of the weights:

    rms_norm_eps e        Our epsilon is E = 1e-5. With c = sqrt(E / e), RMSNorm(c x; E) = RMSNorm(x; e). So the
                          embedding and every projection into the residual stream are multiplied by c, and the
                          projections in front of QK-norm, too.
    embedding_multiplier  on the embedding; residual_multiplier and routed_scaling_factor on those projections
    attention_multiplier  times sqrt(head_dim) on the queries, since we divide scores by sqrt(head_dim)
    logits_scaling        on the last norm's gain, as is what a tied embedding must not add to the logits

Everything else that a layout cannot say (other biases than those of Qwen2, RoPE scaled as YaRN, norms behind blocks
...) is refused, all of it at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import MAX_DEPTH, Layer, Layout
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile, is_gguf
from nas.model.nn.model import Model
from nas.model.nn.transformers import TensorName, tensor_names, weight_name
from nas.train.adapt.gguf_model import EMBEDDING, HEAD, GgufModel, TheirTensors, few
from nas.train.release.huggingface import Planned, write_safetensors
from nas.train.release.shards import ADAPTER, ADAPTER_PROBLEM, Shards, read_json, shard_files

IMPORT_VERSION = 3
"""Increase it with every change after which the same files give other weights."""
EPS = 1e-5
"""Epsilon of every norm of `nas.model.nn.model`."""
_CONFIG_BYTES = 1 << 20
"""Largest config.json."""
_INTO_RESIDUAL = ("o.weight", "out.weight", "down.weight")
"""Projections into the residual stream."""
_FROM_ROTARY = "rotary_emb.inv_freq"
"""A buffer that old releases of transformers saved; it follows from the configuration."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that is adapted.

    Args:
        layout: of it.
        family: transformers' name of the architecture, or "hilnas".
        names: tensors of the files, and what ours they hold; none: they have our names.
        factors: our tensor -> what it is multiplied by; those left out are as in the file.
    """

    layout: Layout
    family: str
    names: tuple[TensorName, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)


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
    if not isinstance(kind, str) or kind not in _FAMILIES:
        traits = _unsayable(options)
        missing = f"; missing: {'; '.join(traits)}" if traits else ""
        families = ", ".join(sorted(_FAMILIES))
        raise Unsupported(
            f"no layout says models of type {kind!r}{missing}; families that are read: {families}", where=where
        )
    if config.get("quantization_config") is not None:
        options.missing.append("weights that are quantised (quantization_config)")
    try:
        model = _FAMILIES[kind](options)
    except InvalidInput as error:
        if error.where == where:
            raise
        options.missing.append(error.message)
        model = None
    if options.missing or model is None:
        raise Unsupported(f"no layout says this {kind} model; missing: {'; '.join(options.missing)}", where=where)
    return model


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
    tensors.check({name.theirs for name in names}, tied=model.layout.tied)
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
        self.config = read_json(folder / "config.json", _CONFIG_BYTES)

    def tensors(self) -> _Tensors:
        return _Tensors(self._folder)

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
    factors: Mapping[str, float],
    files: Mapping[str, Tensor],
    where: str,
) -> Tensor:
    tensor = origin[one.name].split(files)[one.name]
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
    if not (tensor := tensor * factor).isfinite().all():
        raise InvalidInput(
            f"{origin[one.name].theirs} becomes infinite: constants of its configuration multiply it by {factor:g}",
            where=where,
        )
    return tensor


def _shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Model(layout, seed=None).state_dict().items()}


def _renamed(name: str) -> str:
    """Returns the name under which a tensor of Nemotron-H is looked up; other names stay."""
    for old, new in (("backbone.", "model."), ("model.embeddings.", "model.embed_tokens.")):
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


class _Tensors(TheirTensors):
    """The tensors of a folder under transformers' names of today, each read on access."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._shards = folder, Shards(folder)
        names = self._shards.names
        # The model without its head was saved: the names lack the name of that part.
        prefix = "model." if EMBEDDING.removeprefix("model.") in names else ""
        self._stored = {name if name == HEAD else _renamed(prefix + name): name for name in names}
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
        kinds = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(joined, ())
        parts: list[str] = []
        while kinds:
            expert = [f"{prefix}.{len(parts) // len(kinds)}.{kind}.weight" for kind in kinds]
            if not all(part in self._stored for part in expert):
                break
            parts += expert
        return parts

    def _experts(self, name: str) -> Tensor:
        parts = [self[part] for part in self._parts(name)]
        if name.endswith(".down_proj"):
            return torch.stack(parts)
        return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])


# Configurations. Defaults are those of transformers' configuration classes.


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

    def number(self, name: str, default: float) -> float:
        """Returns a positive number."""
        return self._positive(name, self.get(name, default))

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

    def rope(self, default: float = 10000.0, *, part_of: int | None = None) -> dict[str, Any]:
        """Returns RoPE's base and scaling, as arguments of blocks; refuses partial RoPE, and scaling of other forms.

        As in transformers, `rope_scaling` replaces `rope_parameters`, and the base in it wins over one beside it. Where
        the family turns a part of each head, `part_of` is the head size.
        """
        rope = self.get("rope_scaling") or self.get("rope_parameters", {})
        if not isinstance(rope, dict):
            raise InvalidInput("rope_parameters and rope_scaling must be objects", where=self.where)
        rope = {name: value for name, value in rope.items() if value is not None}
        kind = rope.get("rope_type", rope.get("type", "default"))
        scaled = kind in ("linear", "llama3")
        self.refuse(kind != "default" and not scaled, f"RoPE of type {kind!r}: blocks have 'linear' and 'llama3'")
        self.refuse(any(isinstance(value, dict) for value in rope.values()), _SEVERAL_BASES)
        share = rope.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        share = self._positive("partial_rotary_factor", share)
        self.refuse(part_of is None and share != 1, f"RoPE on a part of each head ({share!r})")
        part = {"rope_dim": int(part_of * share)} if part_of and share != 1 else {}
        theta = rope.get("rope_theta", self.get("rope_theta", self.get("theta", default)))
        return (
            {"rope_theta": self._positive("rope_theta", theta)} | part | (self._scaling(rope, kind) if scaled else {})
        )

    def _scaling(self, rope: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Returns `rope_factor`, and of "llama3" `rope_tokens`."""
        factor = self._positive("factor", rope.get("factor"))
        self.refuse(factor < 1, f"RoPE that is sped up (factor {factor:g})")
        if kind == "linear" or factor <= 1:
            return {"rope_factor": max(factor, 1.0)}
        turns = [rope.get(f"{name}_freq_factor") for name in ("low", "high")]
        self.refuse(turns != [1, 4], f"RoPE of type 'llama3' with other factors of low and high frequencies {turns}")
        length = "original_max_position_embeddings"
        return {"rope_factor": factor, "rope_tokens": self.whole(length, rope.get(length))}

    def _positive(self, name: str, value: Any) -> float:
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
class _Stock:
    """What a family of attention and dense feed-forwards has of its own; defaults are those of its configuration class.

    Args:
        tied: whether the head is the embedding.
        base: RoPE's.
        eps: of norms.
        head_dim: head size; none: width / heads.
        qk_norm: whether there is QK-norm.
        qkv_bias: whether queries, keys and values have biases.
        ffn: block kind of the feed-forwards.
        windows: what has windows: "" nothing, "all" layers, "switch" layers if use_sliding_window is set.
        window: its size where the configuration has none; none: it has no window then.
        biases: switches of biases.
        pairs: whether RoPE turns neighbouring numbers.
        part: whether RoPE may turn a part of each head.
        joined: whether queries, keys and values are one tensor, and gate and up another.
    """

    tied: bool = False
    base: float = 10000.0
    eps: float = 1e-6
    head_dim: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    ffn: str = "swiglu"
    windows: str = ""
    window: int | None = None
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias")
    pairs: bool = False
    part: bool = False
    joined: bool = False

    def read(self, options: _Options) -> TrainedModel:
        """Reads a configuration of the family."""
        d_model, depth, vocab = _size(options)
        options.activation(_ACTIVATIONS[self.ffn])
        for name in self.biases:
            options.refuse(options.flag(name), f"biases ({name})")
        attention = _attention(options, d_model, qk_norm=self.qk_norm, head_dim=self.head_dim)
        attention["qkv_bias"] = self.qkv_bias
        rope = options.rope(self.base, part_of=attention["head_dim"] if self.part else None)
        ffn = Block.of(self.ffn, width=options.whole("intermediate_size"))
        layers = []
        for window, positions in zip(_windows(options, depth, self), _positions(options, depth), strict=True):
            shape = attention | (rope if positions else {"rope_theta": 0.0})
            mixer = Block.of("gqa", **shape) if window is None else Block.of("swa", window=window, **shape)
            layers.append(Layer((mixer,), ffn))
        layout = Layout.of(d_model, vocab, layers, tied=options.tied(self.tied))
        return _trained(options, layout, tuple(self._names(layout)), options.number("rms_norm_eps", self.eps))

    def _names(self, layout: Layout) -> Iterator[TensorName]:
        for name in tensor_names(layout):
            part = name.ours[0].rsplit(".", 2)[-2]
            if self.pairs and part in ("q", "k"):
                yield replace(name, pairs=layout.layers[0].mixers[0].resolve(layout.d_model).int("head_dim"))
            elif not self.joined or part not in ("q", "k", "v", "gate", "up"):
                yield name
        for i, layer in enumerate(layout.layers if self.joined else ()):
            shape = layer.mixers[0].resolve(layout.d_model)
            rows = tuple(shape.int(heads) * shape.int("head_dim") for heads in ("heads", "kv_heads", "kv_heads"))
            qkv = tuple(f"layers.{i}.mixers.0.{name}.weight" for name in "qkv")
            yield TensorName(qkv, f"model.layers.{i}.self_attn.qkv_proj.weight", axis=0, sizes=rows)
            gate = tuple(f"layers.{i}.ffn.{name}.weight" for name in ("gate", "up"))
            yield TensorName(gate, f"model.layers.{i}.mlp.gate_up_proj.weight", axis=0)


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
    if stock.windows == "all":
        value = options.get("sliding_window", stock.window if options.given("sliding_window") else None)
        return [None if value is None else options.whole("sliding_window", value)] * depth
    if not stock.windows or not options.flag("use_sliding_window"):
        return [None] * depth
    qwen = kind in ("qwen2", "qwen3")
    window = options.whole("sliding_window", 4096 if qwen else None)
    if options.get("layer_types") is not None:
        within = [kind == "sliding_attention" for kind in options.of_layers("layer_types", valid, depth)]
    elif qwen:
        within = [i >= options.whole("max_window_layers", 28) for i in range(depth)]
    else:
        within = [not on for on in _positions(options, depth)]
    return [window if inside else None for inside in within]


def _positions(options: _Options, depth: int) -> list[bool]:
    """Returns whether each layer's attention has RoPE."""
    if options.get("model_type") != "smollm3":
        return [True] * depth
    flags = options.get("no_rope_layers")
    if flags is None:
        interval = options.whole("no_rope_layer_interval", 4)
        return [(i + 1) % max(interval, 1) != 0 for i in range(depth)]
    if not isinstance(flags, list) or len(flags) < depth:
        raise InvalidInput(f"no_rope_layers must be a list of {depth} numbers", where=options.where)
    return [bool(flag) for flag in flags[:depth]]


def _granite_hybrid(options: _Options) -> TrainedModel:
    d_model, depth, vocab = _size(options)
    options.activation()
    options.refuse(options.flag("attention_bias"), "biases (attention_bias)")
    options.refuse(
        options.whole("num_local_experts", 8) > 0, "experts beside a shared feed-forward (num_local_experts)"
    )
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
    ffn = Block.of("swiglu", width=options.whole("shared_intermediate_size", 1024))
    layers = [Layer((mixers[kind],), ffn) for kind in kinds if kind] or [Layer((mixers["gqa"],), ffn)]
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(False))
    return _trained(options, layout, tuple(_granite_names(layout)), eps)


def _granite_mamba(options: _Options, eps: float) -> Block:
    options.refuse(options.flag("mamba_proj_bias"), "biases (mamba_proj_bias)")
    options.refuse(not options.flag("mamba_conv_bias", True), "Mamba-2 without bias in its convolution")
    options.refuse(eps != EPS, f"Mamba-2 with norms of epsilon {eps:g}, other than {EPS:g}")
    limit = options.get("time_step_limit", _NO_LIMIT)
    infinite = ({"__float__": "Infinity"}, "Infinity", math.inf)  # as releases of transformers write it
    options.refuse(limit not in [[0.0, value] for value in infinite], f"limited time steps ({limit})")
    return Block.of(
        "mamba2",
        state=options.whole("mamba_d_state", 256),
        heads=options.whole("mamba_n_heads", 128),
        expand=options.whole("mamba_expand", 2),
        conv=options.whole("mamba_d_conv", 4),
        groups=options.whole("mamba_n_groups", 1),
    )


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
        yield from (name.under(f"{ours}.ffn", theirs) for name in _GRANITE_FFN)
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
    whole = d_model > 0 and inner % d_model == 0
    options.refuse(
        "mamba2" in kinds and not whole, f"Mamba-2 of inner width {inner}, no multiple of the width {d_model}"
    )
    attention = _attention(options, d_model, qk_norm=False, head_dim=128) | {"rope_theta": 0.0}
    halves = {"gqa": Layer((Block.of("gqa", **attention),)), "relu2": Layer(ffn=_nemotron_ffn(options))}
    if "mamba2" in kinds and whole:
        mamba = Block.of(
            "mamba2",
            state=options.whole("ssm_state_size", 128),
            heads=heads,
            expand=inner // d_model,
            conv=options.whole("conv_kernel", 4),
            groups=options.whole("n_groups", 8),
        )
        halves["mamba2"] = Layer((mamba,))
    layers = [halves[kind] for kind in kinds if kind in halves] or [halves["gqa"]]
    layout = Layout.of(d_model, options.whole("vocab_size"), layers, tied=options.tied(False))
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


def _trained(options: _Options, layout: Layout, names: tuple[TensorName, ...], eps: float) -> TrainedModel:
    """Returns the model with the factors that turn its constants into weights; see the module."""
    granite = str(options.get("model_type")).startswith("granite")

    def constant(name: str) -> float:
        return options.number(name, 1.0) if granite else 1.0

    options.refuse(not 1e-15 <= eps <= 1e-2, f"norms of epsilon {eps:g}")
    norm = math.sqrt(EPS / eps)
    embedding = norm * constant("embedding_multiplier")
    residual = norm * constant("residual_multiplier")
    routed = options.number("routed_scaling_factor", 1.0) if options.get("model_type") == "lfm2_moe" else 1.0
    factors = {"embed.weight": embedding}
    factors["norm.weight"] = 1 / ((embedding if layout.tied else 1.0) * constant("logits_scaling"))
    for i, layer in enumerate(layout.layers):
        blocks = [(block, f"layers.{i}.mixers.{j}") for j, block in enumerate(layer.mixers)]
        for block, prefix in blocks + ([(layer.ffn, f"layers.{i}.ffn")] if layer.ffn else []):
            added = residual * (routed if block.kind == "moe" else 1.0)
            factors |= {f"{prefix}.{name}": added for name in _INTO_RESIDUAL}
            if block.kind in ("gqa", "swa"):
                size = block.resolve(layout.d_model).int("head_dim")
                usual = 1 / math.sqrt(size)
                scores = constant("attention_multiplier") / usual if granite else 1.0
                normed = norm if block.get("qk_norm") else 1.0
                factors |= {f"{prefix}.q.weight": normed * scores, f"{prefix}.k.weight": normed}
    ours = {ours for name in names for ours in name.ours}
    used = {name: factor for name, factor in factors.items() if name in ours and factor != 1.0}
    return TrainedModel(layout, str(options.get("model_type")), names, used)


_NORMED_BEHIND = "norms behind blocks"
_LAYER_NORM = "LayerNorm, which subtracts the mean, in place of RMSNorm"
_UNGATED = "feed-forwards without a gate"
_SOFTMAX = "experts that are chosen by a softmax, without a bias"
_GATED_OUT = "gates on attention's output"
_ONE_TENSOR = "projections that are stored as one tensor (qkv_proj, gate_up_proj)"
_QKV_BIAS = "biases on queries, keys and values"
_BESIDE = "mixer and feed-forward beside each other in a layer"
_TRAITS: Mapping[str, tuple[str, ...]] = {
    "cohere": (_LAYER_NORM, _BESIDE, "RoPE on neighbouring numbers"),
    "deepseek_v3": ("groups of experts",),
    "exaone4": (_NORMED_BEHIND,),
    "falcon": (_LAYER_NORM, _UNGATED, _BESIDE),
    "gemma": ("a gate of GELU",),
    "gemma2": (_NORMED_BEHIND,),
    "gemma3": (_NORMED_BEHIND, "images"),
    "gemma3_text": (_NORMED_BEHIND,),
    "glm4": (_NORMED_BEHIND, _ONE_TENSOR, "RoPE on neighbouring numbers"),
    "lfm3": (_NORMED_BEHIND, _GATED_OUT),
    "olmo3": (_NORMED_BEHIND, "QK-norm over all heads together"),
    "qwen3_5_text": (_GATED_OUT, "the Gated DeltaNet of Qwen3.5"),
    "gpt2": ("learned positions", _LAYER_NORM, _UNGATED, "biases on every projection"),
    "gpt_neox": (_LAYER_NORM, _UNGATED, _BESIDE, "biases on every projection"),
    "mixtral": (_SOFTMAX,),
    "nemotron": (_LAYER_NORM,),
    "olmo2": (_NORMED_BEHIND, "QK-norm over all heads together"),
    "phi": (_LAYER_NORM, _UNGATED, _BESIDE, "biases on every projection"),
    "qwen2_moe": (_QKV_BIAS, _SOFTMAX),
    "qwen3_moe": (_SOFTMAX,),
    "stablelm": (_LAYER_NORM,),
    "starcoder2": (_LAYER_NORM, _UNGATED),
}
"""What every model of a type has that no layout says; the configuration says the rest."""
_ACTIVATIONS = {"swiglu": ("silu", "swish"), "relu2": ("relu2",)}
"""Block kind -> activations that it has, by their names in configurations; the first is the default."""
_SEVERAL_BASES = "several bases of RoPE"


def _unsayable(options: _Options) -> list[str]:
    """Returns what no layout says of a model whose type is not read: what the type has, and what its values show."""
    for trait in _TRAITS.get(str(options.get("model_type")), ()):
        options.refuse(True, trait)
    activations = {activation for names in _ACTIVATIONS.values() for activation in names}
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        value = options.get(name)
        options.refuse(isinstance(value, str) and value not in activations, f"activation {value!r}")
    for name in ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "bias", "qkv_bias"):
        options.refuse(options.get(name) is True, f"biases ({name})")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        options.refuse(options.get(name) is not None, f"bounded logits ({name})")
    options.refuse(options.get("vision_config") is not None, "images")
    with contextlib.suppress(InvalidInput):  # values of no known form are no trait
        options.rope()
    return [trait for trait in options.missing if trait != _SEVERAL_BASES]  # each block has its own


_STOCK = {
    "arcee": _Stock(eps=1e-5, ffn="relu2"),
    "ernie4_5": _Stock(tied=True, base=5e5, eps=1e-5, head_dim=128, biases=("use_bias",), pairs=True),
    "granite": _Stock(),
    "helium": _Stock(base=1e5, eps=1e-8, head_dim=128, pairs=True),
    "llama": _Stock(),
    "mistral": _Stock(windows="all", window=4096),
    "phi3": _Stock(eps=1e-5, windows="all", part=True, joined=True),
    "qwen2": _Stock(qkv_bias=True, biases=(), windows="switch"),
    "qwen3": _Stock(head_dim=128, qk_norm=True, windows="switch"),
    "smollm3": _Stock(tied=True, base=2e6, windows="switch"),
}
_FAMILIES: dict[str, Callable[[_Options], TrainedModel]] = {
    **{name: stock.read for name, stock in _STOCK.items()},
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "hilnas": _own,
}
"""transformers' `model_type` -> reader of its configuration."""
