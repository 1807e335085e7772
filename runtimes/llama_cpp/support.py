"""Which layouts stock llama.cpp carries, and as which architecture.

The rules restate what its loader and graph code require: src/models/lfm2.cpp, lfm2moe.cpp, qwen3.cpp and llama.cpp of
the pinned source. A layout with short convolutions and attention is `lfm2` (`lfm2moe` with experts); attention alone is
`qwen3`, or `llama` without QK-norm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from nas.core.block import Block
from nas.core.errors import Unsupported
from nas.core.layout import Layer, Layout
from nas.runtimes.base import Support

Quantisation = Literal["q4_0", "f16", "f32"]

_MIXERS, _FFNS = ("conv", "gqa"), ("swiglu", "moe")
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # src/llama-hparams.h


@dataclass(frozen=True, slots=True)
class Stock:
    """A layout in the terms of a stock architecture: what GGUF stores once per model.

    Args:
        arch: lfm2, lfm2moe, qwen3 or llama.
        heads: query heads.
        head_dim: head size.
        kv_heads: per layer; 0 marks a convolution.
        rope_theta: RoPE base.
        kernel: taps of the short convolutions; 0: none.
        ff: width of the dense feed-forwards; 0: none.
        experts: (number, per token, width) or None.
        dense_lead: leading layers with a dense feed-forward.
    """

    arch: str
    heads: int
    head_dim: int
    kv_heads: tuple[int, ...]
    rope_theta: float
    kernel: int
    ff: int
    experts: tuple[int, int, int] | None
    dense_lead: int


def supports(layout: Layout) -> Support:
    """Whether stock llama.cpp carries `layout`; else every rule that it breaks."""
    reasons = _reasons(layout)
    return Support("no", None, tuple(reasons)) if reasons else Support("stock", _arch(layout))


def stock(layout: Layout) -> Stock:
    """`layout` in stock terms.

    Raises:
        Unsupported: it has none; the message holds every reason.
    """
    if reasons := _reasons(layout):
        raise Unsupported(f"llama.cpp does not carry this layout: {'; '.join(reasons)}")
    attention, convs = _of_kind(layout, "gqa"), _of_kind(layout, "conv")
    dense, sparse = _of_kind(layout, "swiglu"), _of_kind(layout, "moe")
    return Stock(
        arch=_arch(layout),
        heads=attention[0].int("heads"),
        head_dim=attention[0].int("head_dim"),
        kv_heads=tuple(_kv_heads(layer) for layer in layout.layers),
        rope_theta=float(attention[0].get("rope_theta") or 0.0),
        kernel=convs[0].int("kernel") if convs else 0,
        ff=dense[0].int("width") if dense else 0,
        experts=(sparse[0].int("experts"), sparse[0].int("top_k"), sparse[0].int("width")) if sparse else None,
        dense_lead=len(dense),
    )


def _reasons(layout: Layout) -> list[str]:
    # Later rules read single blocks of known kinds, so they wait for the earlier ones.
    for rules in (_shape_rules, _block_rules):
        if reasons := list(dict.fromkeys(rules(layout))):
            return reasons
    return []


def _shape_rules(layout: Layout) -> Iterable[str]:
    if layout.depth > _MAX_LAYERS:
        yield f"{layout.depth} layers: at most {_MAX_LAYERS}"
    for index, layer in enumerate(layout.layers):
        if layer.share is not None:
            yield f"layer {index} shares weights with layer {layer.share}: every layer of a GGUF has its own"
        elif len(layer.mixers) > 1:
            yield f"layer {index} has parallel mixers"
        elif not layer.mixers:
            yield f"layer {index} has no mixer"
        elif layer.ffn is None:
            yield f"layer {index} has no feed-forward"
        for block in layer.blocks:
            if block.kind not in (*_MIXERS, *_FFNS):
                yield f"{block.kind} blocks are in no stock architecture beside the others"
            if block.kind == "gqa" and block.get("kv") is not None:
                yield f"layer {index} reuses the cache of layer {block.int('kv')}"


def _block_rules(layout: Layout) -> Iterable[str]:
    attention, convs = _of_kind(layout, "gqa"), _of_kind(layout, "conv")
    if not attention:
        yield "no attention layer: lfm2 needs at least one (llama_decode aborts without)"
    yield from _one("head count", attention, lambda block: block.int("heads"))
    yield from _one("head size", attention, lambda block: block.int("head_dim"))
    yield from _one("RoPE base", attention, lambda block: block.get("rope_theta"))
    yield from _one("choice of QK-norm", attention, lambda block: block.get("qk_norm"))
    if any(not block.get("rope_theta") for block in attention):
        yield "attention without positions: stock architectures always turn queries and keys"
    yield from (_lfm2_rules(layout, attention, convs) if convs else _attention_only_rules(layout, attention))
    yield from _ffn_rules(layout)


def _lfm2_rules(layout: Layout, attention: list[Block], convs: list[Block]) -> Iterable[str]:
    yield from _one("convolution kernel", convs, lambda block: block.int("kernel"))
    if any(not block.get("qk_norm") for block in attention):
        yield "attention without QK-norm: lfm2 always has it"
    for block in attention:
        heads, head_dim = block.int("heads"), block.int("head_dim")
        if heads * head_dim != layout.d_model:
            yield f"{heads} heads of {head_dim} numbers do not make d_model {layout.d_model}: lfm2 needs that"


def _attention_only_rules(layout: Layout, attention: list[Block]) -> Iterable[str]:
    yield from _one("key-value head count (without convolutions)", attention, lambda block: block.int("kv_heads"))
    if _of_kind(layout, "moe"):
        yield "experts without a convolution layer: lfm2moe needs at least one"


def _ffn_rules(layout: Layout) -> Iterable[str]:
    dense, sparse = _of_kind(layout, "swiglu"), _of_kind(layout, "moe")
    yield from _one("dense feed-forward width", dense, lambda block: block.int("width"))
    yield from _one("expert count", sparse, lambda block: block.int("experts"))
    yield from _one("experts per token", sparse, lambda block: block.int("top_k"))
    yield from _one("expert width", sparse, lambda block: block.int("width"))
    if any(block.int("experts") > _MAX_EXPERTS for block in sparse):
        yield f"more than {_MAX_EXPERTS} experts"
    kinds = [layer.ffn.kind for layer in layout.layers if layer.ffn]
    if sparse and "swiglu" in kinds[kinds.index("moe") :]:
        yield "a dense feed-forward behind experts: lfm2moe has dense layers in front only"


def _one(what: str, blocks: list[Block], value: Callable[[Block], Hashable]) -> Iterable[str]:
    values = list(dict.fromkeys(map(value, blocks)))
    if len(values) > 1:
        yield f"more than one {what} ({', '.join(map(str, values))}): stock llama.cpp has one per model"


def _arch(layout: Layout) -> str:
    if _of_kind(layout, "conv"):
        return "lfm2moe" if _of_kind(layout, "moe") else "lfm2"
    return "qwen3" if _of_kind(layout, "gqa")[0].get("qk_norm") else "llama"


def _of_kind(layout: Layout, kind: str) -> list[Block]:
    blocks = [block for layer in layout.layers for block in layer.blocks if block.kind == kind]
    return [block.resolve(layout.d_model) for block in blocks]


def _kv_heads(layer: Layer) -> int:
    assert layer.mixer is not None
    return layer.mixer.int("kv_heads") if layer.mixer.kind == "gqa" else 0
