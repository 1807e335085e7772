"""GGUF files as models of transformers: the config.json that such a folder would have, and its tensors.

Names of tensors are those of gguf-py's table for llama.cpp's converter, read backwards: no table of our own. What the
converter changes of the weights is undone here:

    llama, granite,           Rows of queries and keys, which it orders as llama.cpp's RoPE pairs them.
      granitemoe, smollm3,
      granitehybrid, arcee
    gemma, gemma2, gemma3     The gains 1 + w of norms.
    lfm2, lfm2moe             The middle axis of convolutions, the name of the bias of experts.
    qwen35                    The gains 1 + w of norms, that axis, -exp of the logarithm of decays, and the order of
                              heads of values.
    falcon-h1, granitehybrid  That axis, -exp of the logarithm of decays, and the shapes of Mamba-2's other vectors. The
                              multipliers of Falcon-H1 remain in the weights.
    granitehybrid             Gates and values of feed-forwards and shared experts are joined.
    experts                   Their gates and values are joined.
    rope_freqs.weight         Factors of Llama 3's scaled RoPE: the constants that give them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, ExpertGatingFuncType, get_tensor_name_map
from torch import Tensor

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import MAX_DEPTH
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FREQUENCIES = "rope_freqs.weight"
_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_JOINED = ".gate_up_proj"
_SHARED, _SHARED_DOWN = ".shared_mlp.input_linear.weight", ".shared_mlp.output_linear.weight"
"""Feed-forwards of Granite's hybrids, or their shared experts."""
_OF_HEADS = (".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")
"""Tensors of Gated DeltaNet with one row a head."""

_Keys = Callable[[str], Any]
"""Key without the architecture's prefix -> its value; None: it is not there."""


@dataclass(frozen=True)
class _Architecture:
    """How transformers has an architecture of llama.cpp.

    Args:
        model_type: its name.
        settings: (keys, config.json so far) -> what this architecture adds to it.
        paired: whether rows of queries and keys are ordered in pairs.
        gains: whether norms hold 1 + w, of which transformers has w.
    """

    model_type: str
    settings: Callable[[_Keys, Mapping[str, Any]], dict[str, Any]] = lambda keys, config: {}
    paired: bool = False
    gains: bool = False


def _layers(keys: _Keys, config: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Returns windows and the types of layers, by a list or a period: the last layer of each sees all tokens."""
    pattern, depth = keys("attention.sliding_window_pattern"), config["num_hidden_layers"]
    if not isinstance(pattern, list):
        every = pattern if isinstance(pattern, int) and pattern > 0 else period
        pattern = [(i + 1) % every != 0 for i in range(depth)]
    types = ["sliding_attention" if inside else "full_attention" for inside in pattern]
    return {"sliding_window": keys("attention.sliding_window"), "layer_types": types}


def _each_rope(config: Mapping[str, Any], base: float | None) -> dict[str, Any]:
    """Returns RoPE of layers with windows, which is not scaled, and of the others."""
    rope = config["rope_parameters"]
    windowed = {"rope_type": "default", "rope_theta": rope["rope_theta"] if base is None else base}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": windowed}}


def _score_size(config: Mapping[str, Any], depth: int) -> int:
    """Returns what scores of Gemma are divided by the root of: of the largest model, at `depth`, no head's size."""
    size: int = config["head_dim"]
    return (
        config.get("hidden_size", 0) // config["num_attention_heads"] if config["num_hidden_layers"] == depth else size
    )


def _gemma2(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    base, window = keys("rope.freq_base_swa"), keys("attention.sliding_window")
    if base not in (None, config["rope_parameters"]["rope_theta"]):
        raise Unsupported("RoPE of another base in layers with windows (rope.freq_base_swa)")
    bounds = [keys("attn_logit_softcapping"), keys("final_logit_softcapping")]
    return {
        **_layers(keys, config, 2),
        "sliding_window": 4096 if window is None else window,
        "query_pre_attn_scalar": _score_size(config, 46),
        "attn_logit_softcapping": 50.0 if bounds[0] is None else bounds[0],
        "final_logit_softcapping": 30.0 if bounds[1] is None else bounds[1],
    }


def _gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    base = keys("rope.freq_base_swa")
    return {
        **_layers(keys, config, 6),
        **_each_rope(config, 10000.0 if base is None else base),
        "query_pre_attn_scalar": _score_size(config, 62),
        "final_logit_softcapping": keys("final_logit_softcapping"),
    }


def _olmo2(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    keys("rope.freq_base_swa")  # which the graph does not read
    if keys("attention.sliding_window") is None:
        return {}
    return {"model_type": "olmo3", **_layers(keys, config, 4), **_each_rope(config, None)}


def _exaone4(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    if config["num_hidden_layers"] == 64:
        raise Unsupported("EXAONE 4 of 64 layers, with windows in some and no positions in the others")
    keys("attention.sliding_window")  # used with 64 layers alone
    keys("attention.sliding_window_pattern")
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def _granite(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    settings = {setting: keys(name) for name, setting in names.items() if keys(name) is not None}
    if not keys("expert_count"):  # hybrids without Mamba-2 and experts have their keys
        for name in (*_OF_MAMBA, "expert_used_count", "expert_shared_feed_forward_length"):
            keys(name)
    size = config.get("head_dim")
    return ({"attention_multiplier": size**-0.5} if isinstance(size, int) and size > 0 else {}) | settings


def _lfm2(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    counts = keys("attention.head_count_kv")
    if not isinstance(counts, list):
        counts = [counts] * config["num_hidden_layers"]
    return {
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "num_key_value_heads": max(counts),
        "conv_L_cache": keys("shortconv.l_cache"),
        "norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return _lfm2(keys, config) | {
        "num_experts": keys("expert_count"),
        "num_experts_per_tok": keys("expert_used_count"),
        "moe_intermediate_size": keys("expert_feed_forward_length"),
        "num_dense_layers": keys("leading_dense_block_count"),
        "norm_topk_prob": keys("expert_gating_func") in (None, ExpertGatingFuncType.SIGMOID),
    }


def _mixtures(keys: _Keys, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Returns the experts of a model; `width` is transformers' name of that of one."""
    wide, shared = keys("expert_feed_forward_length"), keys("expert_shared_feed_forward_length")
    settings = {"num_experts": keys("expert_count"), "num_experts_per_tok": keys("expert_used_count")}
    settings |= {} if wide is None else {width: wide}
    return settings | ({} if shared is None else {"shared_expert_intermediate_size": shared})


def _granite_moe(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    settings = _granite(keys, config) | _mixtures(keys, "intermediate_size")
    if settings.pop("shared_expert_intermediate_size", 0):
        raise Unsupported("shared experts of Granite (expert_shared_feed_forward_length)")
    return settings


def _granite_hybrid(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    counts, inner, width = keys("attention.head_count_kv"), keys("ssm.inner_size"), config.get("hidden_size")
    if not isinstance(counts, list) or not isinstance(inner, int) or not isinstance(width, int) or inner % width:
        raise Unsupported("Mamba-2 of no known width, or no list of heads (ssm.inner_size, attention.head_count_kv)")
    names = {"conv_kernel": "d_conv", "state_size": "d_state", "time_step_rank": "n_heads", "group_count": "n_groups"}
    return {
        **{f"mamba_{setting}": keys(f"ssm.{name}") for name, setting in names.items()},
        **_granite(keys, config),
        "mamba_expand": inner // width,
        "layer_types": ["full_attention" if count else "linear_attention" for count in counts],
        "num_key_value_heads": max(counts),
        "position_embedding_type": None if keys("rope.scaling.finetuned") is False else "rope",
        "num_local_experts": keys("expert_count") or 0,
        "num_experts_per_tok": keys("expert_used_count"),
        "shared_intermediate_size": keys("expert_shared_feed_forward_length") or config.get("intermediate_size"),
    }


def _falcon_h1(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    names = {"conv_kernel": "d_conv", "inner_size": "d_ssm", "state_size": "d_state", "time_step_rank": "n_heads"}
    names["group_count"] = "n_groups"
    return {f"mamba_{setting}": keys(f"ssm.{name}") for name, setting in names.items()} | {
        "mamba_norm_before_gate": False
    }


def _qwen3_5(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, inner, turned = keys("ssm.time_step_rank"), keys("ssm.inner_size"), keys("rope.dimension_count")
    if not isinstance(heads, int) or not isinstance(inner, int) or heads < 1:
        raise Unsupported("Gated DeltaNet without heads or a width (ssm.time_step_rank, ssm.inner_size)")
    keys("rope.dimension_sections")  # of images
    depth, every, recurrent = config["num_hidden_layers"], keys("full_attention_interval"), keys(_RECURRENT)
    if not isinstance(recurrent, list):
        every = every if isinstance(every, int) and every > 0 else 4
        recurrent = [(i + 1) % every != 0 for i in range(depth)]
    return {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": keys("ssm.group_count"),
        "linear_key_head_dim": keys("ssm.state_size"),
        "linear_conv_kernel_dim": keys("ssm.conv_kernel"),
        "layer_types": ["linear_attention" if layer else "full_attention" for layer in recurrent[:depth]],
        "partial_rotary_factor": turned / config["head_dim"] if isinstance(turned, int) and turned else 1.0,
    }


_RECURRENT = "attention.recurrent_layers"
_OF_MAMBA = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "time_step_rank", "group_count", "inner_size")
)

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "arcee": _Architecture("arcee", paired=True),
    "exaone4": _Architecture("exaone4", _exaone4),
    "falcon-h1": _Architecture("falcon_h1", _falcon_h1),
    "glm4": _Architecture("glm4", lambda keys, config: {"partial_rotary_factor": 1.0}),  # unless the file says less
    "gemma": _Architecture("gemma", gains=True),
    "gemma2": _Architecture("gemma2", _gemma2, gains=True),
    "gemma3": _Architecture("gemma3_text", _gemma3, gains=True),
    "olmo2": _Architecture("olmo2", _olmo2),
    "llama": _Architecture("llama", paired=True),
    "phi3": _Architecture("phi3", lambda keys, config: {"sliding_window": keys("attention.sliding_window") or None}),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "smollm3": _Architecture("smollm3", lambda keys, config: {"no_rope_layer_interval": 4}, paired=True),
    "granite": _Architecture("granite", _granite, paired=True),
    "granitehybrid": _Architecture("granitemoehybrid", _granite_hybrid, paired=True),
    "granitemoe": _Architecture("granitemoe", _granite_moe, paired=True),
    "olmoe": _Architecture("olmoe", lambda keys, config: _mixtures(keys, "intermediate_size")),
    "qwen2moe": _Architecture("qwen2_moe", lambda keys, config: _mixtures(keys)),
    "qwen35": _Architecture("qwen3_5_text", _qwen3_5, gains=True),
    "qwen3moe": _Architecture("qwen3_moe", lambda keys, config: _mixtures(keys) | {"norm_topk_prob": True}),
    "lfm2": _Architecture("lfm2", _lfm2),
    "lfm2moe": _Architecture("lfm2_moe", _lfm2_moe),
}
"""llama.cpp's name -> transformers'. What a layout cannot say of them, `nas.train.adapt.configuration` refuses."""

_SETTINGS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_IGNORED = {"vocab_size", "attention.causal", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
"""Keys without the architecture's prefix that change no forward pass of what is read, or only that of another kind."""


class TheirTensors(Mapping[str, Tensor]):
    """Tensors of a model under transformers' names of today, each read on access."""

    @abstractmethod
    def check(self, names: set[str], *, tied: bool) -> None:
        """Checks that there are the tensors `names` and no others that a forward pass would use.

        Raises:
            InvalidInput: a tensor is missing.
            Unsupported: there are others.
        """


class GgufModel(TheirTensors):
    """The tensors of a GGUF file under transformers' names, each read and dequantised on access.

    Args:
        file: of the model.

    Raises:
        Unsupported: its architecture is not read.
        InvalidInput: it has no tensors of a model, or keys of the wrong kind.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file, self.where, arch = file, str(file.files[0]), file.header.arch
        if arch not in _ARCHITECTURES:
            architectures = ", ".join(sorted(_ARCHITECTURES))
            raise Unsupported(f"architecture {arch!r} is not read from GGUF; {architectures} are", where=self.where)
        self._arch, self.left_out = _ARCHITECTURES[arch], ""
        try:
            self.config = self._config()
            """What config.json would say."""
        except (TypeError, ValueError, ZeroDivisionError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"has keys of the wrong kind: {error}", where=self.where) from error
        self.rope_dim = self._rope_dim()
        number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
        self._names = get_tensor_name_map(number, self.config["num_hidden_layers"])

    def __getitem__(self, name: str) -> Tensor:
        if len(parts := self._parts(name)) > 1:
            return torch.cat([self[part] for part in parts], 1 if name.endswith(_JOINED) else 0)
        values = torch.from_numpy(self._file.values(self._stored(name)))
        if self._arch.paired and name.endswith((".q_proj.weight", ".k_proj.weight")):
            heads = self.config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            if values.shape[0] % (2 * heads):
                raise InvalidInput(f"{name} has {values.shape[0]} rows for {heads} heads", where=self.where)
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if ".linear_attn." in name:
            values = self._neighbours(name, values)
        elif self._arch.gains and name.endswith("norm.weight"):
            values = values - 1.0
        if name.endswith(".A_log"):
            values = torch.log(-values)
        if name.endswith((".A_log", ".D", ".mamba.norm.weight")):
            values = values.flatten()
        return values[:, None] if name.endswith((".conv.conv.weight", ".conv1d.weight")) else values

    def _neighbours(self, name: str, values: Tensor) -> Tensor:
        """Reorders heads of values of Gated DeltaNet: those with one key are neighbours in transformers."""
        heads, groups = (self.config[f"linear_num_{part}_heads"] for part in ("value", "key"))
        if not isinstance(groups, int) or groups < 1 or heads % groups:
            raise InvalidInput(f"{groups!r} heads of keys do not divide {heads} heads of values", where=self.where)
        if name.endswith(".norm.weight"):
            return values
        axis = 1 if name.endswith(".out_proj.weight") else 0
        count = heads * (1 if name.endswith(_OF_HEADS) else self.config["linear_value_head_dim"])
        keys = values.shape[axis] - count
        if keys < 0:
            raise InvalidInput(f"{name} has {values.shape[axis]} rows for {heads} heads", where=self.where)
        order = torch.arange(count).reshape(heads // groups, groups, -1).swapaxes(0, 1).flatten()
        return values.index_select(axis, torch.cat([torch.arange(keys), keys + order]))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and all(self._stored(part) in self._file.tensors for part in self._parts(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)

    def tensors(self) -> GgufModel:
        """Returns itself: a file is open as soon as its header was read."""
        return self

    def has_other_head(self) -> bool:
        """Returns whether there is a head beside the embedding."""
        return self._stored(HEAD) in self._file.tensors

    def check(self, names: set[str], *, tied: bool) -> None:
        if lacking := sorted(name for name in names if name not in self):
            raise InvalidInput(f"lacks {few([self._stored(name) for name in lacking])}", where=self.where)
        used = {self._stored(part) for name in names for part in self._parts(name)} | {_FREQUENCIES, *_FACTORS}
        further = (
            tuple(f"blk.{i}." for i in range(self.config["num_hidden_layers"], MAX_DEPTH)) if self.left_out else ()
        )
        if others := sorted(name for name in self._file.tensors.keys() - used if not name.startswith(further)):
            raise Unsupported(f"has tensors that no block of the layout holds: {few(others)}", where=self.where)

    def _parts(self, name: str) -> list[str]:
        prefix = name.removesuffix(_JOINED)
        if name.endswith(_SHARED):
            shared = ".mlp.shared_expert" if self.config["num_local_experts"] else ".mlp"
            prefix = name.removesuffix(_SHARED) + shared
        return [name] if prefix == name else [f"{prefix}.{part}.weight" for part in ("gate_proj", "up_proj")]

    def _stored(self, name: str) -> str:
        """Returns the name in the file."""
        if name.endswith(_SHARED_DOWN) and not self.config["num_local_experts"]:
            name = name.replace(_SHARED_DOWN, ".mlp.down_proj.weight")
        if name.endswith(".expert_bias"):
            name += ".bias"
        elif name.endswith(".experts.down_proj"):
            name += ".weight"
        elif name.endswith(".dt_bias"):
            name = f"{name.removesuffix('.dt_bias')}.dt_proj.bias"
        return self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name

    def _config(self) -> dict[str, Any]:
        fields, tensors = self._file.fields, self._file.tensors
        arch = self._file.header.arch

        read: set[str] = set()

        def keys(name: str) -> Any:
            read.add(name)
            return fields.get(f"{arch}.{name}")

        config = {setting: keys(name) for name, setting in _SETTINGS.items() if keys(name) is not None}
        depth, embedding = config.get("num_hidden_layers"), tensors.get("token_embd.weight")
        if not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
            raise InvalidInput(f"{arch}.block_count must be in [1, {MAX_DEPTH}], not {depth!r}", where=self.where)
        if (further := keys("nextn_predict_layers")) and isinstance(further, int) and 0 < further < depth:
            self.left_out = "layers that predict further tokens"
            config["num_hidden_layers"] = depth - further
        if embedding is None:
            raise InvalidInput("lacks token_embd.weight: it holds no whole model", where=self.where)
        config |= {
            "model_type": self._arch.model_type,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "rope_parameters": self._rope(keys),
        }
        if self._arch.model_type == "llama" and keys("expert_count"):
            config |= {"model_type": "mixtral"} | _mixtures(keys, "intermediate_size")
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        if not isinstance(config.get("num_attention_heads"), int) or config["num_attention_heads"] < 1:
            raise InvalidInput("gives no num_attention_heads, a positive number", where=self.where)
        config.setdefault("head_dim", config.get("hidden_size", 0) // config["num_attention_heads"])
        try:
            config |= self._arch.settings(keys, config)
        except Unsupported as error:
            raise Unsupported(error.message, where=self.where) from None
        counts = config.get("num_key_value_heads")
        if isinstance(counts, list) and len(set(map(str, counts))) == 1:
            config["num_key_value_heads"] = counts[0]
        elif isinstance(counts, list):
            raise Unsupported("counts of heads that differ by layer (attention.head_count_kv)", where=self.where)
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        for name in ("num_attention_heads", "num_key_value_heads", "hidden_size"):
            if not isinstance(config.get(name), int) or isinstance(config[name], bool) or config[name] < 1:
                raise InvalidInput(f"gives no {name}, a positive number: {config.get(name)!r}", where=self.where)
        keys("rope.dimension_count")
        if keys("attention.value_length") not in (None, config["head_dim"]):
            raise Unsupported("values of another size than keys (attention.value_length)", where=self.where)
        keys_read = {f"{arch}.{name}" for name in read | _IGNORED}
        if unknown := sorted(name for name in fields.keys() - keys_read if name.startswith(f"{arch}.")):
            raise Unsupported(f"has keys whose meaning is not known: {few(unknown)}", where=self.where)
        return config

    def _rope_dim(self) -> int:
        """Returns the numbers of a head that RoPE turns; 0: all."""
        turned = self._file.fields.get(f"{self._file.header.arch}.rope.dimension_count")
        if turned in (None, self.config["head_dim"]):
            return 0
        if self._arch.paired or not isinstance(turned, int):
            raise Unsupported(f"RoPE on a part of each head (rope.dimension_count {turned!r})", where=self.where)
        return turned

    def _rope(self, keys: _Keys) -> dict[str, Any]:
        base = keys("rope.freq_base")
        rope = {"rope_type": "default", "rope_theta": 10000.0 if base is None else base}
        kind = keys("rope.scaling.type")
        if keys("rope.scaling.finetuned") is False and self._arch.model_type in ("granite", "granitemoe"):
            raise Unsupported("attention without positions (rope.scaling.finetuned)", where=self.where)
        if _FACTORS[0] in self._file.tensors and _FACTORS[1] in self._file.tensors:
            factor = keys("rope.scaling.attn_factor")
            return rope | {
                "rope_type": "longrope",
                "original_max_position_embeddings": keys("rope.scaling.original_context_length"),
                "attention_factor": 1.0 if factor is None else factor,
                "short_factor": self._file.values(_FACTORS[0]).tolist(),
                "long_factor": self._file.values(_FACTORS[1]).tolist(),
            }
        if kind not in (None, "none"):
            if _FREQUENCIES in self._file.tensors:
                raise Unsupported(f"RoPE scaled by type {kind!r} and by {_FREQUENCIES}, too", where=self.where)
            length = keys("rope.scaling.original_context_length")
            scaling = {"rope_type": kind, "factor": keys("rope.scaling.factor")}
            return rope | scaling | ({"original_max_position_embeddings": length} if kind == "yarn" else {})
        if _FREQUENCIES not in self._file.tensors:
            return rope
        return rope | _llama3(self._file.values(_FREQUENCIES), float(rope["rope_theta"]), self.where)


def _llama3(factors: np.ndarray[Any, np.dtype[np.float32]], base: float, where: str) -> dict[str, Any]:
    """Returns the constants of Llama 3's scaled RoPE (transformers' `rope_type` llama3) that give these factors.

    Raises:
        Unsupported: those that all its releases have do not give them.
    """
    factor, low, high, context = float(factors.max()), 1.0, 4.0, 8192
    waves = 2 * math.pi * base ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((context / waves - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise Unsupported("RoPE scaled by factors of no known form (rope_freqs.weight)", where=where)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def few(names: list[str]) -> str:
    """Returns the first names of a list, and how many more there are."""
    text = ", ".join(names[:5])
    return text if len(names) <= 5 else f"{text} and {len(names) - 5} more"
