"""Rules of the layouts that llama.cpp carries, and their architectures.

A stock architecture restates what its loader and graph code require: src/models/lfm2.cpp, lfm2moe.cpp, qwen3.cpp,
qwen2.cpp and llama.cpp of the pinned source. A layout with short convolutions and attention is `lfm2` (`lfm2moe` with
experts); attention alone is `qwen3`, or `llama` without QK-norm, or `qwen2` with biases on queries, keys and values.
What none of them holds may run on our patched build, whose architecture `hilnas` reads every size per layer:
`nas.measure.runtimes.llama_cpp.patches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from nas.core.block import Block
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import Support
from nas.measure.runtimes.llama_cpp.kinds import (
    ATTENTION,
    CACHED,
    KINDS,
    feed_forwards,
    mixers,
    of_kind,
    one_per_model,
    one_rope_base,
)

QUANTISATIONS = ("q4_0", "q8_0", "f16", "f32")
ROLES = ("embedding", "mixers", "ffn")
"""Of tensors, which may have another quantisation than the others: `q8_0+ffn:q4_0`."""

PATCHED = "hilnas"
"""Our architecture. A stock build does not know the name, so it refuses such a file when it opens it."""

_MAX_LAYERS = 512  # src/llama-hparams.h


@lru_cache
def by_role(quantisation: str) -> Mapping[str, str]:
    """Returns role -> one of `QUANTISATIONS`; that of all others is at "".

    Raises:
        UnknownName: it names another one, or another role.
    """
    others, *parts = quantisation.split("+")
    types = {"": others}
    for part in parts:
        role, _, name = part.partition(":")
        if role not in ROLES:
            raise UnknownName("role of tensors", role, ROLES)
        if role in types:
            raise InvalidInput(f"{quantisation}: {role} is named twice")
        types[role] = name
    for name in types.values():
        if name not in QUANTISATIONS:
            raise UnknownName("quantisation of llama.cpp", name, QUANTISATIONS)
    return types


def supports(layout: Layout) -> Support:
    """Returns stock where a stock architecture holds `layout`, else patched or no, with every reason."""
    # Later rules read single blocks of known kinds, so they wait for the earlier ones.
    for rules in (_shape_rules, _block_rules):
        if reasons := _each_once(rules(layout)):
            return Support("no", None, reasons)
    if reasons := _each_once(_stock_reasons(layout)):
        if _biased(layout):
            return Support("no", None, ("biases on queries, keys and values: the patched build has none", *reasons))
        if _scaled(layout):
            return Support("no", None, ("scaled RoPE (rope_factor): the patched build has none", *reasons))
        if _partial(layout):
            return Support("no", None, ("RoPE on a part of a head (rope_dim): the patched build has none", *reasons))
        return Support("patched", PATCHED, reasons)
    return Support("stock", _stock_architecture(layout))


def architecture(layout: Layout) -> str:
    """Returns GGUF's name of the architecture of `layout`; raises `Unsupported` with every reason."""
    support = supports(layout)
    if support.arch is None:
        raise Unsupported(f"llama.cpp does not carry this layout: {'; '.join(support.reasons)}")
    return support.arch


def _shape_rules(layout: Layout) -> Iterable[str]:
    if layout.depth > _MAX_LAYERS:
        yield f"{layout.depth} layers: at most {_MAX_LAYERS}"
    for index, layer in enumerate(layout.layers):
        cached, canon = (
            of_kind(layer.mixers, *CACHED),
            any(block.int("canon") for block in of_kind(layer.mixers, *ATTENTION)),
        )
        if len(cached) > 1:
            yield f"layer {index} has two kinds of attention in parallel: llama.cpp has one cache per layer"
        if len(layer.mixers) - len(cached) > 1:
            yield f"layer {index} has two recurrent mixers in parallel: llama.cpp has one state per layer"
        if canon and len(layer.mixers) > 1:
            yield f"layer {index} has a convolution in front of one of two parallel mixers (canon)"
        for block in layer.blocks:
            if block.kind not in KINDS:
                yield f"{block.kind} blocks: neither the stock build nor the patched one has them"
            elif refused := KINDS[block.kind].refuses(block):
                yield f"layer {index} {refused}"


def _block_rules(layout: Layout) -> Iterable[str]:
    """Yields what the patched build cannot hold; the stock architectures hold no more."""
    blocks = [*mixers(layout), *feed_forwards(layout)]
    yield from one_rope_base("attention", of_kind(blocks, "gqa", "mla"))
    for name in KINDS:
        if of_name := of_kind(blocks, name):
            yield from KINDS[name].rules(of_name)


def _stock_architecture(layout: Layout) -> str:
    """Returns the architecture of a layout for which there are no `_stock_reasons`."""
    if of_kind(mixers(layout), "conv"):
        return "lfm2moe" if of_kind(feed_forwards(layout), "moe") else "lfm2"
    if _biased(layout):
        return "qwen2"
    return "qwen3" if mixers(layout)[0].get("qk_norm") else "llama"


def _biased(layout: Layout) -> bool:
    return any(block.get("qkv_bias") for block in of_kind(mixers(layout), *ATTENTION))


def _scaled(layout: Layout) -> bool:
    return any(block.get("rope_factor") != 1 for block in of_kind(mixers(layout), *ATTENTION))


def _partial(layout: Layout) -> bool:
    return any(block.int("rope_dim") for block in of_kind(mixers(layout), *ATTENTION))


def _stock_reasons(layout: Layout) -> Iterable[str]:
    """Yields every rule of the stock architectures that a layout breaks which the patched build holds."""
    for index, layer in enumerate(layout.layers):
        if layer.share is not None:
            yield f"layer {index} shares weights with layer {layer.share}: layers of stock architectures do not"
        elif len(layer.mixers) > 1:
            yield f"layer {index} has parallel mixers"
        elif not layer.mixers:
            yield f"layer {index} has no mixer"
        elif layer.ffn is None:
            yield f"layer {index} has no feed-forward"
        for block in of_kind(layer.mixers, "gqa"):
            if block.get("kv") is not None:
                yield f"layer {index} reuses the cache of layer {block.int('kv')}"
    attention, convs = of_kind(mixers(layout), *ATTENTION), of_kind(mixers(layout), "conv")
    for block in (*mixers(layout), *feed_forwards(layout)):
        if reason := KINDS[block.kind].not_stock:
            yield reason
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
    yield from one_per_model("choice of biases", attention, lambda block: block.get("qkv_bias"))
    yield from one_per_model("scaling of RoPE (rope_factor)", attention, lambda block: block.get("rope_factor"))
    yield from one_per_model("scaling of RoPE (rope_tokens)", attention, lambda block: block.get("rope_tokens"))
    yield from one_per_model("part of a head that RoPE turns", attention, lambda block: block.int("rope_dim"))
    if any(block.kind == "swa" and block.get("sink") for block in attention):
        yield "attention sinks: lfm2 has none"
    if any(block.int("canon") for block in attention):
        yield "a convolution in front of attention (canon): stock architectures have none"


def _lfm2_rules(layout: Layout, attention: list[Block], convs: list[Block]) -> Iterable[str]:
    yield from one_per_model("convolution kernel", convs, lambda block: block.int("kernel"))
    if any(not block.get("qk_norm") for block in attention):
        yield "attention without QK-norm: lfm2 always has it"
    if _biased(layout):
        yield "biases next to convolutions: lfm2 has none"
    if any(block.int("rope_tokens") for block in attention):
        yield "RoPE as in Llama 3.1 (rope_tokens) next to convolutions: lfm2 has no factors of frequencies"
    for block in attention:
        heads, head_dim = block.int("heads"), block.int("head_dim")
        if heads * head_dim != layout.d_model:
            yield f"{heads} heads of {head_dim} numbers do not make d_model {layout.d_model}: lfm2 needs that"
    if of_kind(attention, "swa") and of_kind(attention, "gqa"):
        yield "full and sliding-window attention in one model: lfm2 has one kind"
    if of_kind(attention, "swa") and of_kind(feed_forwards(layout), "moe"):
        yield "sliding windows together with experts: lfm2moe has none"


def _attention_only_rules(layout: Layout, attention: list[Block]) -> Iterable[str]:
    yield from one_per_model(
        "key-value head count (without convolutions)", attention, lambda block: block.int("kv_heads")
    )
    if any(block.int("rope_tokens") and (block.get("qk_norm") or block.get("qkv_bias")) for block in attention):
        yield "RoPE as in Llama 3.1 (rope_tokens) next to QK-norm or biases: only llama has factors of frequencies"
    if _partial(layout):
        yield "RoPE on a part of a head (rope_dim) without convolutions: qwen3, qwen2 and llama turn whole heads"
    for block in attention if _biased(layout) else ():
        if block.get("qk_norm"):
            yield "biases next to QK-norm: qwen2 has no QK-norm, qwen3 no biases"
        if block.int("heads") * block.int("head_dim") != layout.d_model:
            yield f"heads that do not make d_model {layout.d_model}: qwen2 needs that"
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
    if any(block.int("shared") for block in sparse):
        yield "shared experts: lfm2moe has none"
    if sparse and of_kind(ffns[ffns.index(sparse[0]) :], "swiglu"):
        yield "a dense feed-forward after experts: lfm2moe has dense layers first only"


def _each_once(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))
