"""Our state dict <-> that of a stock transformers class. No transformers here: names only.

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

Where one of their tensors holds several of ours, they lie one after another in the order written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.nn.transformers_config import is_attention_only


@dataclass(frozen=True, slots=True)
class _Name:
    """One tensor of theirs and what it is made of.

    Args:
        ours: our tensors, joined along axis 1 where there are several.
        theirs: transformers' name.
        tap_axis: whether theirs has a middle axis of length 1, as Conv1d's weights do.
    """

    ours: tuple[str, ...]
    theirs: str
    tap_axis: bool = False

    def under(self, ours: str, theirs: str) -> _Name:
        return _Name(tuple(f"{ours}.{name}" for name in self.ours), f"{theirs}.{self.theirs}", self.tap_axis)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [_take(tensors, name) for name in self.ours]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return whole[:, None] if self.tap_axis else whole

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = _take(tensors, self.theirs)
        whole = whole[:, 0] if self.tap_axis else whole
        parts = (whole,) if len(self.ours) == 1 else whole.chunk(len(self.ours), 1)
        return dict(zip(self.ours, parts, strict=True))


def _weight(ours: str, theirs: str) -> _Name:
    return _Name((f"{ours}.weight",), f"{theirs}.weight")


_BLOCKS: dict[str, tuple[_Name, ...]] = {
    "conv": (
        _weight("in_proj", "conv.in_proj"),
        _Name(("conv.weight",), "conv.conv.weight", tap_axis=True),
        _weight("out", "conv.out_proj"),
    ),
    "gqa": (
        *(_weight(name, f"self_attn.{name}_proj") for name in "qkv"),
        _weight("o", "self_attn.out_proj"),
        *(_weight(f"{name}_norm", f"self_attn.{name}_layernorm") for name in "qk"),
    ),
    "swiglu": (
        _weight("gate", "feed_forward.w1"),
        _weight("up", "feed_forward.w3"),
        _weight("down", "feed_forward.w2"),
    ),
    "moe": (
        _weight("router", "feed_forward.gate"),
        _Name(("bias.weight",), "feed_forward.expert_bias"),
        _Name(("gate.weight", "up.weight"), "feed_forward.experts.gate_up_proj"),
        _Name(("down.weight",), "feed_forward.experts.down_proj"),
    ),
}


_NORMS = (("mixer_norm", "operator_norm"), ("ffn_norm", "ffn_norm"))

_ATTENTION_NORMS = (("mixer_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
_ATTENTION = tuple(_weight(name, f"self_attn.{name}_proj") for name in "qkvo")
_QK_NORM = tuple(_weight(f"{name}_norm", f"self_attn.{name}_norm") for name in "qk")
_DENSE = tuple(_weight(name, f"mlp.{name}_proj") for name in ("gate", "up", "down"))


def to_transformers(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict of `layout` under transformers' names.

    Raises:
        Unsupported: the layout has a layer that transformers' stock classes cannot hold.
        InvalidInput: a tensor is missing.
    """
    return dict(each_of_transformers(layout, tensors))


def each_of_transformers(layout: Layout, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, so that `tensors` may read each from a file when it is asked for."""
    return ((name.theirs, name.join(tensors)) for name in _names(layout))


def from_transformers(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' state dict of `layout` under our names; the alias `lm_head.weight` of a tied head is dropped.

    Raises:
        Unsupported: the layout has a layer that transformers' stock classes cannot hold.
        InvalidInput: a tensor is missing.
    """
    return {ours: tensor for name in _names(layout) for ours, tensor in name.split(tensors).items()}


def _names(layout: Layout) -> Iterator[_Name]:
    attention_only = is_attention_only(layout)
    yield _weight("embed", "model.embed_tokens")
    for i, layer in enumerate(layout.layers):
        if len(layer.mixers) != 1 or layer.ffn is None:
            raise Unsupported(f"layer {i}: transformers' LFM2 layers have one mixer, one feed-forward and own weights")
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for norm in _ATTENTION_NORMS if attention_only else _NORMS:
            yield _weight(*norm).under(ours, theirs)
        for block, place in ((layer.mixers[0], "mixers.0"), (layer.ffn, "ffn")):
            named = _attention_only_names(block, i) if attention_only else _block_names(block, i)
            yield from (name.under(f"{ours}.{place}", theirs) for name in named)
    yield _weight("norm", "model.norm" if attention_only else "model.embedding_norm")
    if not layout.tied:
        yield _weight("head", "lm_head")


def _block_names(block: Block, index: int) -> tuple[_Name, ...]:
    if block.kind not in _BLOCKS or {"kv", "qk_norm"} & dict(block.given).keys():
        raise Unsupported(f"layer {index}: transformers' LFM2 classes have no {block.format()}")
    return _BLOCKS[block.kind]


def _attention_only_names(block: Block, index: int) -> tuple[_Name, ...]:
    if block.kind == "swiglu":
        return _DENSE
    if {"kv", "sink"} & dict(block.given).keys():
        raise Unsupported(f"layer {index}: transformers' stock classes have no {block.format()}")
    return _ATTENTION + (_QK_NORM if block.get("qk_norm") else ())


def _take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise InvalidInput(f"state dict lacks {name}")
    return tensors[name]
