"""The config.json of a stock transformers class for a layout that one of them can hold.

Layers of attention alone and dense feed-forwards are a Qwen3ForCausalLM, or a LlamaForCausalLM without QK-norm, as
llama.cpp has them too; everything else must fit Lfm2ForCausalLM or Lfm2MoeForCausalLM.
"""

from __future__ import annotations

from typing import Any

from nas.core.block import Block
from nas.core.errors import Unsupported
from nas.core.layout import Layout

_ATTENTION = ("gqa", "swa")


def transformers_config(layout: Layout) -> dict[str, Any]:
    """Arguments of the class's configuration; `architectures` names the class.

    Raises:
        Unsupported: the layout varies what those classes fix for the whole model; the message names it.
    """
    config = _attention_only(layout) if is_attention_only(layout) else _lfm2(layout)
    return {
        "vocab_size": layout.vocab,
        "hidden_size": layout.d_model,
        "num_hidden_layers": layout.depth,
        "tie_word_embeddings": layout.tied,
        **config,
    }


def is_attention_only(layout: Layout) -> bool:
    """Whether every layer is one attention block and a dense feed-forward, with weights of its own."""
    return all(
        [mixer.kind in _ATTENTION for mixer in layer.mixers] == [True]
        and layer.ffn is not None
        and layer.ffn.kind == "swiglu"
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
        **_attention_config(attention, 0),
    }
    if not attention.get("qk_norm"):
        if windows:
            raise Unsupported("transformers' Llama has no sliding windows, and its Qwen3 none without QK-norm")
        return {**stock, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if len(windows) > 1:
        raise Unsupported(f"transformers' Qwen3 has one window for all layers, not {sorted(windows)}")
    return {
        **stock,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "layer_types": [_LAYER_TYPES[block.kind] for block in blocks],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
    }


_SHAPE = ("heads", "kv_heads", "head_dim", "rope_theta", "qk_norm")
_LAYER_TYPES = {"gqa": "full_attention", "swa": "sliding_attention"}


def _attention_shape(blocks: list[Block]) -> Block:
    """What all layers have in common besides windows."""
    if any(dict(block.given).get("sink") for block in blocks):
        raise Unsupported("transformers' Qwen3 has no attention sinks")
    shapes = {Block.of("gqa", **{name: block.get(name) for name in _SHAPE}) for block in blocks}
    shape = _same(shapes, "attention", "Qwen3 and Llama")
    assert shape is not None
    _check_attention(shape, blocks)
    return shape


def _check_attention(shape: Block, blocks: list[Block]) -> None:
    if any("kv" in dict(block.given) for block in blocks):
        raise Unsupported("transformers' stock attention has a cache of its own in every layer")
    if not shape.get("rope_theta"):
        raise Unsupported("transformers' stock attention always has positions")


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
        _check_attention(attention, [attention])
    return {
        "layer_types": ["conv" if block.kind == "conv" else "full_attention" for block in mixers],
        "norm_eps": 1e-5,
        "conv_bias": False,
        **_conv_config(_same(convs, "convolution")),
        **(_attention_config(attention, layout.d_model) if attention else {}),
        **_ffn_config(layout),
    }


def _conv_config(conv: Block | None) -> dict[str, Any]:
    return {"conv_L_cache": conv.int("kernel")} if conv else {}


def _attention_config(attention: Block, d_model: int) -> dict[str, Any]:
    """The head size is left out where it makes up `d_model`."""
    heads, head_dim = attention.int("heads"), attention.int("head_dim")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": attention.int("kv_heads"),
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.get("rope_theta")},
        **({} if heads * head_dim == d_model else {"head_dim": head_dim}),
    }


def _ffn_config(layout: Layout) -> dict[str, Any]:
    ffns = [layer.ffn for layer in layout.layers if layer.ffn]
    dense = [ffn.kind != "moe" for ffn in ffns]
    lead = dense.index(False) if False in dense else len(dense)
    if len(ffns) < layout.depth or any(dense[lead:]):
        raise Unsupported("transformers' LFM2 has a feed-forward in each layer: dense ones first, then mixtures")
    width = _same({ffn for ffn in ffns[:lead]}, "dense feed-forward")
    moe = _same({ffn for ffn in ffns[lead:]}, "mixture")
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
        raise Unsupported(f"transformers' {who} {_have(who)} one {what} for all layers, not {_listed(blocks)}")
    return next(iter(blocks), None)


def _listed(blocks: set[Block]) -> str:
    return ", ".join(sorted(block.format() for block in blocks))


def _have(who: str) -> str:
    return "have" if " and " in who else "has"
