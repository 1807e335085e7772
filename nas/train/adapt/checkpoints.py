"""Reads trained models: a folder of Hugging Face's transformers as a layout and weights under our names.

Only config.json and safetensors files are read: no pickle, no download, no code of the folder. Families whose forward
pass is that of `nas.model.nn.model` up to constants are read; constants become part of the weights:

    rms_norm_eps e        Our epsilon is E = 1e-5. With c = sqrt(E / e), RMSNorm(c x; E) = RMSNorm(x; e). So the
                          embedding and every projection into the residual stream are multiplied by c, and the
                          projections in front of QK-norm, too.
    embedding_multiplier  on the embedding; residual_multiplier and routed_scaling_factor on those projections
    attention_multiplier  times sqrt(head_dim) on the queries, since we divide scores by sqrt(head_dim)
    logits_scaling        on the last norm's gain, as is what a tied embedding must not add to the logits

Everything else that a layout cannot say (biases, scaled RoPE, norms behind blocks ...) is refused, all of it at once.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import MAX_DEPTH, Layer, Layout
from nas.model.nn.model import Model
from nas.model.nn.transformers import TensorName, tensor_names, weight_name
from nas.train.release.huggingface import Planned, write_safetensors

IMPORT_VERSION = 1
"""Increase it with every change after which the same files give other weights."""
EPS = 1e-5
"""Epsilon of every norm of `nas.model.nn.model`."""
_CONFIG_BYTES = 1 << 20
"""Largest config.json."""
_INDEX_BYTES = 1 << 26
"""Largest index of shards."""
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TYPES = {"F64", "F32", "F16", "BF16"}
"""Types of tensors that are read."""
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


def read_model(folder: Path) -> TrainedModel:
    """Reads the configuration in a folder of transformers.

    Raises:
        Unsupported: layouts cannot say this model; the message lists everything that is missing.
        InvalidInput: there is no readable config.json.
    """
    config = _read_json(folder / "config.json", _CONFIG_BYTES)
    kind = config.get("model_type")
    where = str(folder / "config.json")
    options = _Options(config, where)
    if kind not in _FAMILIES:
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


def import_model(folder: Path, output: Path) -> TrainedModel:
    """Writes the weights of a folder of transformers as a checkpoint of `nas.model.nn.model`, in float32.

    Weights are read, converted and written one tensor at a time.

    Raises:
        Unsupported: layouts cannot say this model.
        InvalidInput: the files are damaged or do not fit the configuration.
        InfrastructureFailed: the disk is full.
    """
    model = read_model(folder)
    with _Shards(folder) as files:
        names = model.names or tuple(TensorName((name,), name) for name in _shapes(model.layout))
        origin = {ours: name for name in names for ours in name.ours}
        shapes = _shapes(model.layout)
        assert origin.keys() == shapes.keys(), "the family names every tensor of the layout"
        files.check({name.theirs for name in names}, tied=model.layout.tied)
        planned = [Planned(name, shape, torch.float32) for name, shape in sorted(shapes.items())]
        values = (_converted(tensor, origin, model.factors, files) for tensor in planned)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(output, planned, values, {"layout": model.layout.format()})
    return model


def model_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that `import_model` reads.

    Raises:
        InvalidInput: it has no weights, or an index names files elsewhere.
    """
    return [folder / "config.json", *_shards(folder)]


def is_imported(folder: Path, output: Path) -> bool:
    """Returns whether `output` is what `import_once` wrote from the files that the folder holds now."""
    try:
        record = json.loads(_record(output).read_bytes())
        return bool(record == _import_record(folder, output))
    except (OSError, ValueError):
        return False


def import_once(folder: Path, output: Path) -> None:
    """Imports a model (see `import_model`), and records beside `output` from what."""
    import_model(folder, output)
    write_durably(_record(output), json.dumps(_import_record(folder, output)).encode())


def _record(output: Path) -> Path:
    return output.with_suffix(".json")


def _import_record(folder: Path, output: Path) -> dict[str, Any]:
    """Returns the version of this file and the SHA-256 of the files that are read and written."""
    return {"v": IMPORT_VERSION, "files": [sha256_of(path) for path in (*model_files(folder), output)]}


def _converted(one: Planned, origin: Mapping[str, TensorName], factors: Mapping[str, float], files: _Shards) -> Tensor:
    tensor = origin[one.name].split(files)[one.name].to(torch.float32)
    if tuple(tensor.shape) != one.shape:
        raise InvalidInput(
            f"{origin[one.name].theirs} gives {one.name} the shape {list(tensor.shape)}, its layout needs"
            f" {list(one.shape)}",
            where=str(files.folder),
        )
    if not tensor.isfinite().all():
        raise InvalidInput(f"{origin[one.name].theirs} holds NaN or infinity", where=str(files.folder))
    factor = factors.get(one.name, 1.0)
    return tensor if factor == 1.0 else tensor * factor


def _shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Model(layout, seed=None).state_dict().items()}


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > limit:
            raise InvalidInput(f"larger than {limit:,} bytes", where=str(path))
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidInput("no such file: name a folder of transformers, with config.json", where=str(path)) from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"no JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise InvalidInput("no JSON object", where=str(path))
    return value


class _Shards(Mapping[str, Tensor]):
    """The tensors of model.safetensors or of the shards that its index names, each read on access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        """Tensor -> the open file that holds it."""

    def __enter__(self) -> _Shards:
        with contextlib.ExitStack() as stack:
            for path in _shards(self.folder):
                try:
                    file: Any = stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise InvalidInput(f"not a safetensors file: {error}", where=str(path)) from error
                self._files |= dict.fromkeys(file.keys(), file)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files and name.endswith((".gate_up_proj", ".down_proj")):
            return self._experts(name)
        file = self._files[name]
        if (kind := file.get_slice(name).get_dtype()) not in _TYPES:
            raise Unsupported(f"{name} has type {kind}; {', '.join(sorted(_TYPES))} are read", where=str(self.folder))
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files or bool(isinstance(name, str) and self._parts(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def check(self, names: set[str], *, tied: bool) -> None:
        """Checks that the files hold the tensors `names` and nothing else that a forward pass would use.

        Raises:
            InvalidInput: a tensor is missing, or there are others.
        """
        if lacking := sorted(name for name in names if name not in self):
            raise InvalidInput(f"lacks {_few(lacking)}", where=str(self.folder))
        used = names | {part for name in names for part in self._parts(name)} | ({"lm_head.weight"} if tied else set())
        others = sorted(name for name in self if name not in used and not name.endswith(_FROM_ROTARY))
        if others:
            raise Unsupported(f"has tensors that no block of the layout holds: {_few(others)}", where=str(self.folder))

    def _parts(self, name: str) -> list[str]:
        """Returns the tensors of single experts of which transformers 5 makes `name`; none if they are not there."""
        prefix, _, joined = name.rpartition(".")
        kinds = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(joined, ())
        parts: list[str] = []
        while kinds:
            expert = [f"{prefix}.{len(parts) // len(kinds)}.{kind}.weight" for kind in kinds]
            if not all(part in self._files for part in expert):
                break
            parts += expert
        return parts

    def _experts(self, name: str) -> Tensor:
        parts = [self[part] for part in self._parts(name)]
        if name.endswith(".down_proj"):
            return torch.stack(parts)
        return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])


def _shards(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder.

    Raises:
        InvalidInput: there are none, or the index names others.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; pickled weights are never read, save them as safetensors" if pickled else ""
        raise InvalidInput(f"there is no {_WEIGHTS} and no {_INDEX}{hint}", where=str(folder))
    mapping = _read_json(folder / _INDEX, _INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise InvalidInput("names no weights", where=str(folder / _INDEX))
    paths = []
    for name in sorted(set(map(str, mapping.values()))):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInput(f"{name!r} is no safetensors file of this folder", where=str(folder / _INDEX))
        paths.append(folder / name)
    return paths


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


# Configurations. Defaults are those of transformers' configuration classes.


class _Options:
    """The values of a config.json, and what of them no layout can say."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where
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
            self.refuse(value not in valid, f"layers of type {value!r}")
        return [valid.get(value, "") for value in values]

    def activation(self) -> None:
        """Refuses another activation than SiLU."""
        name = self.get("hidden_act", "silu")
        self.refuse(name not in _SILU, f"activation {name!r}")

    def rope_theta(self, default: float = 10000.0) -> float:
        """Returns RoPE's base; refuses scaled and partial RoPE."""
        parameters = self.get("rope_parameters", {})
        scaling = self.get("rope_scaling", {})
        if not isinstance(parameters, dict) or not isinstance(scaling, dict):
            raise InvalidInput("rope_parameters and rope_scaling must be objects", where=self.where)
        for rope in (parameters, scaling):
            kind = rope.get("rope_type", rope.get("type", "default"))
            self.refuse(
                kind != "default", f"RoPE of type {kind!r}, which changes single frequencies: blocks have a base"
            )
            self.refuse(any(isinstance(value, dict) for value in rope.values()), _SEVERAL_BASES)
        part = parameters.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        self.refuse(part != 1.0, f"RoPE on a part of each head ({part})")
        theta = parameters.get("rope_theta", self.get("rope_theta", self.get("theta", default)))
        return self._positive("rope_theta", theta)

    def _positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InvalidInput(f"{name} must be a positive number, not {value!r}", where=self.where)
        return float(value)


def _size(options: _Options) -> tuple[int, int, int]:
    """Returns width, depth and vocabulary."""
    depth = options.whole("num_hidden_layers")
    if not 1 <= depth <= MAX_DEPTH:
        raise InvalidInput(f"num_hidden_layers must be in [1, {MAX_DEPTH}], not {depth}", where=options.where)
    return options.whole("hidden_size"), depth, options.whole("vocab_size")


def _attention(options: _Options, d_model: int, *, qk_norm: bool) -> dict[str, Any]:
    """Returns arguments of the attention blocks."""
    heads = options.whole("num_attention_heads")
    size = 128 if options.get("model_type") == "qwen3" else d_model // max(heads, 1)
    return {
        "heads": heads,
        "kv_heads": options.whole("num_key_value_heads", heads),
        "head_dim": options.whole("head_dim", size),
        "qk_norm": qk_norm,
    }


def _stock(options: _Options, *, qk_norm: bool = False) -> TrainedModel:
    """Reads what Llama, Mistral, Qwen3, SmolLM3 and Granite have in common; see each family for its own."""
    d_model, depth, vocab = _size(options)
    options.activation()
    for name in ("attention_bias", "mlp_bias"):
        options.refuse(options.flag(name), f"biases ({name})")
    attention = _attention(options, d_model, qk_norm=qk_norm)
    theta = options.rope_theta(_BASES.get(options.get("model_type"), 10000.0))
    ffn = Block.of("swiglu", width=options.whole("intermediate_size"))
    layers = []
    for window, positions in zip(_windows(options, depth), _positions(options, depth), strict=True):
        shape = attention | {"rope_theta": theta if positions else 0.0}
        mixer = Block.of("gqa", **shape) if window is None else Block.of("swa", window=window, **shape)
        layers.append(Layer((mixer,), ffn))
    layout = Layout.of(
        d_model, vocab, layers, tied=options.flag("tie_word_embeddings", _TIED[options.get("model_type")])
    )
    return _trained(options, layout, tuple(tensor_names(layout)), options.number("rms_norm_eps", 1e-6))


def _windows(options: _Options, depth: int) -> list[int | None]:
    """Returns the window of each layer; None: it sees all tokens."""
    kind = options.get("model_type")
    if kind == "mistral":
        window = options.whole("sliding_window", 4096) if options.given("sliding_window") else None
        return [window] * depth
    if kind not in ("qwen3", "smollm3") or not options.flag("use_sliding_window"):
        return [None] * depth
    window = options.whole("sliding_window", 4096 if kind == "qwen3" else None)
    if options.get("layer_types") is not None:
        valid = {name: name for name in ("full_attention", "sliding_attention")}
        within = [kind == "sliding_attention" for kind in options.of_layers("layer_types", valid, depth)]
    elif kind == "qwen3":
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
    attention["rope_theta"] = options.rope_theta() if positions == "rope" else 0.0
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
    layers = [Layer((mixers[kind],), ffn) for kind in kinds if kind]
    layout = Layout.of(d_model, vocab, layers or [Layer((), ffn)], tied=options.flag("tie_word_embeddings"))
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


def _lfm2(options: _Options) -> TrainedModel:
    d_model, depth, vocab = _size(options)
    options.refuse(options.flag("conv_bias"), "biases (conv_bias)")
    moe = options.get("model_type") == "lfm2_moe"
    attention = _attention(options, d_model, qk_norm=True) | {"rope_theta": options.rope_theta(1e6)}
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
    tied = options.flag("tie_embedding", options.flag("tie_word_embeddings", True))
    layout = Layout.of(d_model, vocab, layers or [Layer((), dense)], tied=tied)
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
    mixers = [{name: value for name, value in block.items() if name != "reads"} for block in layer.get("mixers") or []]
    return ({"mixers": mixers} if mixers else {}) | ({"ffn": layer["ffn"]} if layer.get("ffn") else {})


def _trained(options: _Options, layout: Layout, names: tuple[TensorName, ...], eps: float) -> TrainedModel:
    """Returns the model with the factors that turn its constants into weights; see the module."""
    granite = str(options.get("model_type")).startswith("granite")

    def constant(name: str) -> float:
        return options.number(name, 1.0) if granite else 1.0

    norm = math.sqrt(EPS / eps)
    embedding = norm * constant("embedding_multiplier")
    residual = norm * constant("residual_multiplier")
    routed = options.number("routed_scaling_factor", 1.0) if options.get("model_type") == "lfm2_moe" else 1.0
    factors = {"embed.weight": embedding}
    factors["norm.weight"] = 1 / ((embedding if layout.tied else 1.0) * constant("logits_scaling"))
    for i, layer in enumerate(layout.layers):
        for block, prefix in ((layer.mixers[0], f"layers.{i}.mixers.0"), (layer.ffn, f"layers.{i}.ffn")):
            assert block is not None
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
_ONE_TENSOR = "projections that are stored as one tensor (qkv_proj, gate_up_proj)"
_QKV_BIAS = "biases on queries, keys and values"
_BESIDE = "mixer and feed-forward beside each other in a layer"
_TRAITS: Mapping[str, tuple[str, ...]] = {
    "cohere": (_LAYER_NORM, _BESIDE, "RoPE on neighbouring numbers"),
    "deepseek_v3": (_SOFTMAX, "groups of experts", "latent queries"),
    "exaone4": (_NORMED_BEHIND,),
    "falcon": (_LAYER_NORM, _UNGATED, _BESIDE),
    "gemma": ("a gate of GELU",),
    "gemma2": (_NORMED_BEHIND,),
    "gemma3": (_NORMED_BEHIND, "images"),
    "gemma3_text": (_NORMED_BEHIND,),
    "glm4": (_NORMED_BEHIND, _ONE_TENSOR, "RoPE on neighbouring numbers"),
    "gpt2": ("learned positions", _LAYER_NORM, _UNGATED, "biases on every projection"),
    "gpt_neox": (_LAYER_NORM, _UNGATED, _BESIDE, "biases on every projection"),
    "mixtral": (_SOFTMAX,),
    "nemotron": (_LAYER_NORM,),
    "olmo2": (_NORMED_BEHIND, "QK-norm over all heads together"),
    "phi": (_LAYER_NORM, _UNGATED, _BESIDE, "biases on every projection"),
    "phi3": (_ONE_TENSOR,),
    "qwen2": (_QKV_BIAS,),
    "qwen2_moe": (_QKV_BIAS, _SOFTMAX),
    "qwen3_moe": (_SOFTMAX,),
    "stablelm": (_LAYER_NORM,),
    "starcoder2": (_LAYER_NORM, _UNGATED),
}
"""What every model of a type has that no layout says; the configuration says the rest."""
_SILU = ("silu", "swish")
_SEVERAL_BASES = "several bases of RoPE"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _unsayable(options: _Options) -> list[str]:
    """Returns what no layout says of a model whose type is not read: what the type has, and what its values show."""
    for trait in _TRAITS.get(str(options.get("model_type")), ()):
        options.refuse(True, trait)
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        value = options.get(name)
        options.refuse(isinstance(value, str) and value not in _SILU, f"activation {value!r}")
    for name in ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "bias", "qkv_bias"):
        options.refuse(options.get(name) is True, f"biases ({name})")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        options.refuse(options.get(name) is not None, f"bounded logits ({name})")
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        options.refuse(options.get(name) is not None, _LAYER_NORM)
    options.refuse(any(options.get(name) for name in _EXPERTS), _SOFTMAX)
    options.refuse(options.get("vision_config") is not None, "images")
    with contextlib.suppress(InvalidInput):  # values of no known form are no trait
        options.rope_theta()
    return [trait for trait in options.missing if trait != _SEVERAL_BASES]  # each block has its own


_BASES = {"smollm3": 2e6}
_TIED = {"llama": False, "mistral": False, "qwen3": False, "smollm3": True, "granite": False}
_FAMILIES: dict[str, Callable[[_Options], TrainedModel]] = {
    "llama": _stock,
    "mistral": _stock,
    "qwen3": lambda options: _stock(options, qk_norm=True),
    "smollm3": _stock,
    "granite": _stock,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "hilnas": _own,
}
"""transformers' `model_type` -> reader of its configuration."""
