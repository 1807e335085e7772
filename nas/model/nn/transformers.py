"""A layout as one of transformers' stock classes: its config.json, and our state dict under its names and back.

Layers of attention alone and dense feed-forwards are a Qwen3ForCausalLM, a LlamaForCausalLM without QK-norm, or a
Qwen2ForCausalLM with biases on queries, keys and values, as llama.cpp has them too; everything else must fit
Lfm2ForCausalLM or Lfm2MoeForCausalLM. Nothing here imports transformers.

Lfm2ForCausalLM and Lfm2MoeForCausalLM:

    embed.weight                       model.embed_tokens.weight
    norm.weight                        model.embedding_norm.weight
    head.weight                        lm_head.weight (untied; a tied one is an alias there and has no name here)
    layers.i.mixer_norm.weight         model.layers.i.operator_norm.weight
    layers.i.ffn_norm.weight           model.layers.i.ffn_norm.weight
    layers.i.mixers.0.{in_proj,out}    model.layers.i.conv.{in_proj,out_proj}
    layers.i.mixers.0.conv [D, K]      model.layers.i.conv.conv [D, 1, K]
    layers.i.mixers.0.{q,k,v,o}        model.layers.i.self_attn.{q,k,v}_proj, out_proj
    layers.i.mixers.0.{q,k}_norm       model.layers.i.self_attn.{q,k}_layernorm
    layers.i.ffn.{gate,up,down}        model.layers.i.feed_forward.{w1,w3,w2}
    layers.i.ffn.router, ffn.bias      model.layers.i.feed_forward.gate, feed_forward.expert_bias
    layers.i.ffn.{gate,up} [E, F, D]   model.layers.i.feed_forward.experts.gate_up_proj [E, 2F, D]
    layers.i.ffn.down [E, D, F]        model.layers.i.feed_forward.experts.down_proj

Qwen3ForCausalLM and LlamaForCausalLM, for layouts of attention alone:

    norm.weight                        model.norm.weight
    layers.i.{mixer,ffn}_norm          model.layers.i.{input_layernorm,post_attention_layernorm}
    layers.i.mixers.0.{q,k,v,o}        model.layers.i.self_attn.{q,k,v,o}_proj
    layers.i.mixers.0.{q,k}_norm       model.layers.i.self_attn.{q,k}_norm (Qwen3)
    layers.i.ffn.{gate,up,down}        model.layers.i.mlp.{gate,up,down}_proj

Where one of their tensors holds several of ours, they are stored one after another in the order written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout

_ROPE = ("rope_theta", "rope_factor", "rope_tokens", "rope_yarn", "rope_dim")
_ALTERED = ("qk_norm_wide", "softcap", "gate", "gate_wide", "rope_long")
"""Arguments of attention that the classes written to are without."""
_SHAPE = ("heads", "kv_heads", "head_dim", *_ROPE, "qk_norm", "qkv_bias", "canon", *_ALTERED)
_LAYER_TYPES = {"gqa": "full_attention", "swa": "sliding_attention"}


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor of transformers' checkpoint, and those of our model that it holds.

    Args:
        keys: of our tensors, joined along `axis` where there are several.
        upstream: transformers' name; "": it has no such tensor.
        tap_axis: whether upstream's has a middle axis of length 1, as Conv1d's weights do.
        axis: along which several tensors are joined.
        sizes: of each of our tensors along `axis`; (): they are equal.
        order: row r of each of our heads is row order[r] upstream; (): rows are in the same order.
        order_axis: of upstream's tensor along which the rows are: 1 where they are columns.
        plus: what is added to upstream's, of norms that multiply by 1 + w.
        centred: axis of upstream's along which its mean is subtracted; None: it is not.
        transposed: heads of our first tensor, each of which is transposed; 0: they are not.
    """

    keys: tuple[str, ...]
    upstream: str
    tap_axis: bool = False
    axis: int = 1
    sizes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    order_axis: int = 0
    plus: float = 0.0
    centred: int | None = None
    transposed: int = 0

    def under(self, prefix: str, upstream: str) -> TensorName:
        """Returns the name behind prefixes: of our keys, and of transformers' name."""
        keys = tuple(f"{prefix}.{key}" for key in self.keys)
        return replace(self, keys=keys, upstream=f"{upstream}.{self.upstream}" if self.upstream else "")

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns upstream's tensor from our `tensors`, where it is the same numbers in the same order."""
        altered = self.order or self.plus or self.centred is not None or self.transposed
        assert not altered, "such names are for reading"
        parts = [_take(tensors, name) for name in self.keys]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)
        return whole[:, None] if self.tap_axis else whole

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns our tensors from upstream's `tensors`.

        Raises:
            InvalidInput: it is missing, or of a shape that cannot be split.
        """
        whole = _take(tensors, self.upstream)
        axes = (self.axis * (len(self.keys) > 1), self.order_axis, self.centred or 0, int(self.transposed > 0))
        if whole.dim() - self.tap_axis <= max(axes) or (self.tap_axis and whole.shape[1] != 1):
            raise InvalidInput(f"{self.upstream} has the shape {list(whole.shape)}, not that of {', '.join(self.keys)}")
        whole = (whole[:, 0] if self.tap_axis else whole) + self.plus
        if self.order:
            axis, rows = self.order_axis, whole.shape[self.order_axis]
            if rows % len(self.order):
                raise InvalidInput(f"{self.upstream} has {rows} rows, not whole heads of {len(self.order)}")
            heads = torch.unflatten(whole, axis, (-1, len(self.order)))
            whole = heads.index_select(axis + 1, torch.tensor(self.order)).flatten(axis, axis + 1)
        if self.centred is not None:
            whole = whole - whole.mean(self.centred, keepdim=True)
        sizes = self.sizes or (whole.shape[self.axis] // len(self.keys),) * len(self.keys) if len(self.keys) > 1 else ()
        if sizes and sum(sizes) != whole.shape[self.axis]:
            raise InvalidInput(f"{self.upstream} of shape {list(whole.shape)} does not split into {len(self.keys)}")
        parts = torch.split(whole, list(sizes), self.axis) if sizes else (whole,)
        if self.transposed:
            if parts[0].shape[0] % self.transposed:
                raise InvalidInput(f"{self.upstream} has {len(parts[0])} rows, not {self.transposed} whole heads")
            parts = (torch.unflatten(parts[0], 0, (self.transposed, -1)).transpose(1, 2).flatten(0, 1), *parts[1:])
        return dict(zip(self.keys, parts, strict=True))


def weight_name(prefix: str, upstream: str) -> TensorName:
    """Returns the name of a module's `weight`."""
    return TensorName((f"{prefix}.weight",), f"{upstream}.weight")


CONV_NAMES = (
    weight_name("in_proj", "conv.in_proj"),
    TensorName(("conv.weight",), "conv.conv.weight", tap_axis=True),
    weight_name("out", "conv.out_proj"),
)
"""A short convolution in LFM2 and LFM3."""
_BLOCKS: dict[str, tuple[TensorName, ...]] = {
    "conv": CONV_NAMES,
    "gqa": (
        *(weight_name(name, f"self_attn.{name}_proj") for name in "qkv"),
        weight_name("o", "self_attn.out_proj"),
        *(weight_name(f"{name}_norm", f"self_attn.{name}_layernorm") for name in "qk"),
    ),
    "swiglu": (
        weight_name("gate", "feed_forward.w1"),
        weight_name("up", "feed_forward.w3"),
        weight_name("down", "feed_forward.w2"),
    ),
    "moe": (
        weight_name("router", "feed_forward.gate"),
        TensorName(("bias.weight",), "feed_forward.expert_bias"),
        TensorName(("gate.weight", "up.weight"), "feed_forward.experts.gate_up_proj"),
        TensorName(("down.weight",), "feed_forward.experts.down_proj"),
    ),
}
_NORMS = (("mixer_norm", "operator_norm"), ("ffn_norm", "ffn_norm"))
"""Norms of the LFM2 classes; the names below are of Qwen3 and Llama."""
_STOCK_NORMS = (("mixer_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
_STOCK_DENSE = ("swiglu", "relu2")


def transformers_config(layout: Layout) -> dict[str, Any]:
    """Returns the arguments of the class's configuration; `architectures` names the class.

    Raises:
        Unsupported: the layout varies what those classes fix for the whole model; the message names it.
    """
    if layout.norms != "before" or layout.softcap:
        raise Unsupported("the stock classes that are written have neither norms behind blocks nor bounded logits")
    config = _attention_only(layout) if _is_attention_only(layout) else _lfm2(layout)
    return {
        "vocab_size": layout.vocab,
        "hidden_size": layout.d_model,
        "num_hidden_layers": layout.depth,
        "tie_word_embeddings": layout.tied,
        **config,
    }


def to_transformers(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns our state dict of `layout` under transformers' names.

    Raises:
        Unsupported: the layout has a layer that transformers' stock classes cannot hold.
        InvalidInput: a tensor is missing.
    """
    return dict(each_of_transformers(layout, tensors))


def each_of_transformers(layout: Layout, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the items of `to_transformers` one by one, so that `tensors` may read each from a file when needed."""
    return ((name.upstream, name.join(tensors)) for name in tensor_names(layout))


def _is_attention_only(layout: Layout) -> bool:
    """Returns whether every layer is one attention block and a dense feed-forward, with weights of its own."""
    return all(
        [mixer.kind in _LAYER_TYPES for mixer in layer.mixers] == [True]
        and layer.ffn is not None
        and layer.ffn.kind in _STOCK_DENSE
        for layer in layout.layers
    )


def _attention_only(layout: Layout) -> dict[str, Any]:
    blocks = [layer.mixers[0].resolve(layout.d_model) for layer in layout.layers]
    windows = {block.int("window") for block in blocks if block.kind == "swa"}
    attention = _attention_shape(blocks)
    width = _same({layer.ffn for layer in layout.layers if layer.ffn}, "dense feed-forward", "Qwen3 and Llama")
    assert width is not None
    stock = {
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "intermediate_size": width.int("width"),
        **_attention_config(attention, layout.d_model if attention.get("qkv_bias") else 0),
    }
    if width.kind == "relu2":
        if windows or attention.get("qk_norm") or attention.get("qkv_bias"):
            raise Unsupported(
                "transformers' Arcee, its class with squared ReLU, has neither windows, QK-norm nor biases"
            )
        arcee = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
        return {**stock, **arcee, "mlp_bias": False}
    if attention.get("qkv_bias") and attention.get("qk_norm"):
        raise Unsupported("transformers' Qwen2, its class with biases on queries, keys and values, has no QK-norm")
    if not attention.get("qk_norm") and not attention.get("qkv_bias"):
        if windows:
            raise Unsupported("transformers' Llama has no sliding windows, and its Qwen3 none without QK-norm")
        return {**stock, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if len(windows) > 1:
        raise Unsupported(f"transformers' Qwen2 and Qwen3 have one window for all layers, not {sorted(windows)}")
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if attention.get("qkv_bias"):
        if stock.pop("head_dim", None) is not None:
            raise Unsupported("transformers' Qwen2 has heads that make up the width")
        qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {
        **stock,
        **qwen,
        "layer_types": [_LAYER_TYPES[block.kind] for block in blocks],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
    }


def _attention_shape(blocks: list[Block]) -> Block:
    """Returns the attention that all layers share, apart from windows."""
    if any(dict(block.args).get("sink") for block in blocks):
        raise Unsupported("transformers' Qwen3 has no attention sinks")
    shapes = {Block.of("gqa", **{name: block.get(name) for name in _SHAPE}) for block in blocks}
    shape = _same(shapes, "attention", "Qwen3 and Llama")
    assert shape is not None
    _check_attention(shape, blocks)
    return shape


def _check_attention(shape: Block, blocks: list[Block]) -> None:
    if any("kv" in dict(block.args) for block in blocks):
        raise Unsupported("transformers' stock attention has a cache of its own in every layer")
    if shape.get("canon"):
        raise Unsupported("transformers' stock attention has no convolution in front (canon)")
    if shape.get("rope_dim"):
        raise Unsupported("transformers' stock attention turns whole heads (rope_dim)")
    if not shape.get("rope_theta"):
        raise Unsupported("transformers' stock attention always has positions")
    if altered := [name for name in _ALTERED if shape.get(name)]:
        raise Unsupported(f"the stock classes that are written have no {', '.join(altered)} in attention")


def _lfm2(layout: Layout) -> dict[str, Any]:
    mixers = [_only(layer.mixers, i) for i, layer in enumerate(layout.layers)]
    convs = {block for block in mixers if block.kind == "conv"}
    attentions = {block.resolve(layout.d_model) for block in mixers if block.kind == "gqa"}
    if others := {block.kind for block in mixers} - {"conv", "gqa"}:
        raise Unsupported(f"transformers' LFM2 has no {', '.join(sorted(others))} layers")
    attention = _same(attentions, "attention")
    if attention:
        if not attention.get("qk_norm"):
            raise Unsupported("transformers' LFM2 attention has QK-norm")
        if attention.get("qkv_bias"):
            raise Unsupported("transformers' LFM2 attention has no biases")
        _check_attention(attention, [attention])
    return {
        "layer_types": ["conv" if block.kind == "conv" else "full_attention" for block in mixers],
        "norm_eps": 1e-5,
        "conv_bias": False,
        **({"conv_L_cache": conv.int("kernel")} if (conv := _same(convs, "convolution")) else {}),
        **(_attention_config(attention, layout.d_model) if attention else {}),
        **_ffn_config(layout),
    }


def _attention_config(attention: Block, d_model: int) -> dict[str, Any]:
    """Returns heads, head size and RoPE; the head size is left out where heads times it make up `d_model`.

    RoPE's base has two keys: transformers 5 reads `rope_parameters`, transformers 4 only `rope_theta`. So has scaling:
    `rope_scaling` wins in transformers 5, so it says the base, too.
    """
    heads, head_dim, theta = attention.int("heads"), attention.int("head_dim"), attention.get("rope_theta")
    scaling = _rope_scaling(attention)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": attention.int("kv_heads"),
        "rope_theta": theta,
        "rope_parameters": {**scaling, "rope_theta": theta},
        **({} if heads * head_dim == d_model else {"head_dim": head_dim}),
        **({"rope_scaling": {**scaling, "rope_theta": theta}} if scaling["rope_type"] != "default" else {}),
    }


def _rope_scaling(attention: Block) -> dict[str, Any]:
    """Returns `rope_parameters` without the base; the constants of "llama3" are those of every release."""
    factor, tokens = float(attention.get("rope_factor") or 1), attention.int("rope_tokens")
    if factor == 1:
        return {"rope_type": "default"}
    if not tokens:
        return {"rope_type": "linear", "factor": factor}
    if attention.get("rope_yarn"):  # the factor of attention is part of the weights
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": tokens}
        return {**yarn, "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": tokens,
    }


def _ffn_config(layout: Layout) -> dict[str, Any]:
    ffns = [layer.ffn for layer in layout.layers if layer.ffn]
    if others := {ffn.kind for ffn in ffns} - {"swiglu", "moe"}:
        raise Unsupported(f"transformers' LFM2 has no {', '.join(sorted(others))} feed-forwards")
    dense = [ffn.kind != "moe" for ffn in ffns]
    lead = dense.index(False) if False in dense else len(dense)
    if len(ffns) < layout.depth or any(dense[lead:]):
        raise Unsupported("transformers' LFM2 has a feed-forward in each layer: dense ones first, then mixtures")
    width = _same({ffn for ffn in ffns[:lead]}, "dense feed-forward")
    moe = _same({ffn for ffn in ffns[lead:]}, "mixture")
    if moe and moe.int("shared"):
        raise Unsupported("transformers' LFM2 mixtures have no shared experts")
    if moe and (moe.get("softmax") or not moe.get("norm_topk")):
        raise Unsupported("transformers' LFM2 mixtures are scored by sigmoids whose sum is one (softmax, norm_topk)")
    common = {"intermediate_size": width.int("width")} if width else {}
    if moe is None:
        return {**common, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    return {
        **common,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_dense_layers": lead,
        "num_experts": moe.int("experts"),
        "num_experts_per_tok": moe.int("top_k"),
        "moe_intermediate_size": moe.int("width"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _only(mixers: tuple[Block, ...], index: int) -> Block:
    if len(mixers) != 1:
        raise Unsupported(f"layer {index}: transformers' LFM2 layers have exactly one mixer and weights of their own")
    return mixers[0]


def _same(blocks: set[Block], what: str, who: str = "LFM2") -> Block | None:
    if len(blocks) > 1:
        have, shapes = "have" if " and " in who else "has", ", ".join(sorted(block.format() for block in blocks))
        raise Unsupported(f"transformers' {who} {have} one {what} for all layers, not {shapes}")
    return next(iter(blocks), None)


def tensor_names(layout: Layout) -> Iterator[TensorName]:
    """Yields the names of all tensors of the class that `transformers_config` names.

    Raises:
        Unsupported: the layout has a layer that transformers' stock classes cannot hold.
    """
    attention_only = _is_attention_only(layout)
    yield weight_name("embed", "model.embed_tokens")
    for i, layer in enumerate(layout.layers):
        if len(layer.mixers) != 1 or layer.ffn is None:
            raise Unsupported(f"layer {i}: transformers' LFM2 layers have one mixer, one feed-forward and own weights")
        prefix, upstream = f"layers.{i}", f"model.layers.{i}"
        for norm in _STOCK_NORMS if attention_only else _NORMS:
            yield weight_name(*norm).under(prefix, upstream)
        for block, place in ((layer.mixers[0], "mixers.0"), (layer.ffn, "ffn")):
            if attention_only and {"kv", "sink", "canon"} & dict(block.args).keys():
                raise Unsupported(f"layer {i}: transformers' stock classes have no {block.format()}")
            named = stock_names(block) if attention_only else _block_names(block, i)
            yield from (name.under(f"{prefix}.{place}", upstream) for name in named)
    yield weight_name("norm", "model.norm" if attention_only else "model.embedding_norm")
    if not layout.tied:
        yield weight_name("head", "lm_head")


def _block_names(block: Block, index: int) -> tuple[TensorName, ...]:
    if (
        block.kind not in _BLOCKS
        or {"kv", "qk_norm", "qkv_bias", "canon", "shared", "softmax", "norm_topk"} & dict(block.args).keys()
    ):
        raise Unsupported(f"layer {index}: transformers' LFM2 classes have no {block.format()}")
    return _BLOCKS[block.kind]


def stock_names(block: Block) -> tuple[TensorName, ...]:
    """Returns names that most of transformers' classes have, below a layer, for attention or a dense feed-forward."""
    if block.spec.role == "ffn":
        parts = ("up", "down") if block.kind == "relu2" else ("gate", "up", "down")
        return tuple(weight_name(name, f"mlp.{name}_proj") for name in parts)
    biases = "qkv" if block.get("qkv_bias") else ""
    norms = "qk" if block.get("qk_norm") else ""
    gates = ("gate",) if block.get("gate") else ()
    divisors = ("rope_short", "rope_long") if block.get("rope_long") else ()
    return (
        *(weight_name(name, f"self_attn.{name}_proj") for name in "qkvo"),
        *(TensorName((f"{name}.bias",), f"self_attn.{name}_proj.bias") for name in biases),
        *(weight_name(f"{name}_norm", f"self_attn.{name}_norm") for name in norms),
        *(weight_name(name, f"self_attn.{name}_proj") for name in gates),
        *(TensorName((f"{name}.weight",), "") for name in divisors),
    )


def _take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise InvalidInput(f"state dict lacks {name}")
    return tensors[name]
