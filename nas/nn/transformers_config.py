"""The config.json of transformers' Lfm2ForCausalLM or Lfm2MoeForCausalLM for a layout that one of them can hold."""

from __future__ import annotations

from typing import Any

from nas.core.block import Block
from nas.core.errors import Unsupported
from nas.core.layout import Layout


def transformers_config(layout: Layout) -> dict[str, Any]:
    """Arguments of `Lfm2Config`, or of `Lfm2MoeConfig` where the layout has experts; `architectures` names the class.

    Raises:
        Unsupported: the layout varies what those classes fix for the whole model; the message names it.
    """
    mixers = [_only(layer.mixers, i) for i, layer in enumerate(layout.layers)]
    convs = {block for block in mixers if block.kind == "conv"}
    attentions = {block.resolve(layout.d_model) for block in mixers if block.kind == "gqa"}
    if others := {block.kind for block in mixers} - {"conv", "gqa"}:
        raise Unsupported(f"transformers' LFM2 has no {', '.join(sorted(others))} layers")
    attention = _same(attentions, "attention")
    if attention and (attention.get("kv") is not None or not attention.get("qk_norm")):
        raise Unsupported("transformers' LFM2 attention has QK-norm and a cache of its own")
    return {
        "vocab_size": layout.vocab,
        "hidden_size": layout.d_model,
        "num_hidden_layers": layout.depth,
        "layer_types": ["conv" if block.kind == "conv" else "full_attention" for block in mixers],
        "tie_word_embeddings": layout.tied,
        "norm_eps": 1e-5,
        "conv_bias": False,
        **_conv_config(_same(convs, "convolution")),
        **_attention_config(attention, layout.d_model),
        **_ffn_config(layout),
    }


def _conv_config(conv: Block | None) -> dict[str, Any]:
    return {"conv_L_cache": conv.int("kernel")} if conv else {}


def _attention_config(attention: Block | None, d_model: int) -> dict[str, Any]:
    if attention is None:
        return {}
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


def _same(blocks: set[Block], what: str) -> Block | None:
    if len(blocks) > 1:
        raise Unsupported(f"transformers' LFM2 has one {what} for all layers, not {_listed(blocks)}")
    return next(iter(blocks), None)


def _listed(blocks: set[Block]) -> str:
    return ", ".join(sorted(block.format() for block in blocks))
