"""Which layouts a stock architecture of llama.cpp holds: everything else needs the patched build.

The rules restate what its loader and graph code require: src/models/lfm2.cpp, lfm2moe.cpp, qwen3.cpp and llama.cpp of
the pinned source. A layout with short convolutions and attention is `lfm2` (`lfm2moe` with experts); attention alone is
`qwen3`, or `llama` without QK-norm.
"""

from __future__ import annotations

from collections.abc import Iterable

from nas.core.block import Block
from nas.core.layout import Layout
from nas.runtimes.llama_cpp.layers import ATTENTION, feed_forwards, mixers, of_kind, one_per_model


def stock_architecture(layout: Layout) -> str:
    """The architecture of a layout for which there are no `stock_reasons`."""
    if of_kind(mixers(layout), "conv"):
        return "lfm2moe" if of_kind(feed_forwards(layout), "moe") else "lfm2"
    return "qwen3" if mixers(layout)[0].get("qk_norm") else "llama"


def stock_reasons(layout: Layout) -> Iterable[str]:
    """Every rule of the stock architectures that a layout breaks which the patched build holds."""
    attention, convs = of_kind(mixers(layout), *ATTENTION), of_kind(mixers(layout), "conv")
    if of_kind(mixers(layout), "mamba2"):
        yield "Mamba-2 layers are in no stock architecture beside the others"
    if not attention:
        yield "no attention layer: lfm2 needs at least one (llama_decode aborts without)"
    yield from _attention_rules(attention)
    yield from (_lfm2_rules(layout, attention, convs) if convs else _attention_only_rules(layout, attention))
    yield from _ffn_rules(layout)


def _attention_rules(attention: list[Block]) -> Iterable[str]:
    yield from one_per_model("head count", attention, lambda block: block.int("heads"))
    yield from one_per_model("head size", attention, lambda block: block.int("head_dim"))
    yield from one_per_model("RoPE base", attention, lambda block: block.get("rope_theta"))
    yield from one_per_model("choice of QK-norm", attention, lambda block: block.get("qk_norm"))
    if any(not block.get("rope_theta") for block in attention):
        yield "attention without positions: stock architectures always turn queries and keys"
    if any(block.kind == "swa" and block.get("sink") for block in attention):
        yield "attention sinks: lfm2 has none"


def _lfm2_rules(layout: Layout, attention: list[Block], convs: list[Block]) -> Iterable[str]:
    yield from one_per_model("convolution kernel", convs, lambda block: block.int("kernel"))
    if any(not block.get("qk_norm") for block in attention):
        yield "attention without QK-norm: lfm2 always has it"
    for block in attention:
        heads, head_dim = block.int("heads"), block.int("head_dim")
        if heads * head_dim != layout.d_model:
            yield f"{heads} heads of {head_dim} numbers do not make d_model {layout.d_model}: lfm2 needs that"
    if of_kind(attention, "swa") and of_kind(attention, "gqa"):
        yield "full and sliding-window attention in one model: lfm2 has one kind"
    if of_kind(attention, "swa") and of_kind(feed_forwards(layout), "moe"):
        yield "sliding windows beside experts: lfm2moe has none"


def _attention_only_rules(layout: Layout, attention: list[Block]) -> Iterable[str]:
    yield from one_per_model(
        "key-value head count (without convolutions)", attention, lambda block: block.int("kv_heads")
    )
    if of_kind(attention, "swa"):
        yield "sliding windows without a convolution layer: qwen3 and llama have none"
    if of_kind(feed_forwards(layout), "moe"):
        yield "experts without a convolution layer: lfm2moe needs at least one"


def _ffn_rules(layout: Layout) -> Iterable[str]:
    ffns = feed_forwards(layout)
    dense, sparse = of_kind(ffns, "swiglu"), of_kind(ffns, "moe")
    yield from one_per_model("dense feed-forward width", dense, lambda block: block.int("width"))
    yield from one_per_model("experts per token", sparse, lambda block: block.int("top_k"))
    yield from one_per_model("expert width", sparse, lambda block: block.int("width"))
    if sparse and of_kind(ffns[ffns.index(sparse[0]) :], "swiglu"):
        yield "a dense feed-forward behind experts: lfm2moe has dense layers in front only"
