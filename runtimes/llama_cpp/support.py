"""Which layouts llama.cpp carries, and as which architecture.

What the stock build cannot hold may run on our patched one, whose architecture `hilnas` reads every size per layer:
`nas.runtimes.llama_cpp.patches`. The rules of the stock architectures are in `stock_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.runtimes.base import Support
from nas.runtimes.llama_cpp.layers import feed_forwards, mixers, of_kind, one_per_model
from nas.runtimes.llama_cpp.stock_rules import stock_architecture, stock_reasons

Quantisation = Literal["q4_0", "f16", "f32"]

PATCHED = "hilnas"
"""Our architecture. A stock build does not know the name, so it refuses such a file when it opens it."""

_KINDS = ("conv", "gqa", "swa", "mamba2", "swiglu", "moe")
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # src/llama-hparams.h


def supports(layout: Layout) -> Support:
    """Stock where a stock architecture holds `layout`, else patched or no, with every reason."""
    # Later rules read single blocks of known kinds, so they wait for the earlier ones.
    for rules in (_shape_rules, _block_rules):
        if reasons := _each_once(rules(layout)):
            return Support("no", None, reasons)
    if reasons := _each_once(stock_reasons(layout)):
        return Support("patched", PATCHED, reasons)
    return Support("stock", stock_architecture(layout))


def architecture(layout: Layout) -> str:
    """What GGUF calls the model of `layout`.

    Raises:
        Unsupported: neither build carries it; the message holds every reason.
    """
    support = supports(layout)
    if support.arch is None:
        raise Unsupported(f"llama.cpp does not carry this layout: {'; '.join(support.reasons)}")
    return support.arch


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
            if block.kind not in _KINDS:
                yield f"{block.kind} blocks: neither the stock build nor the patched one has them"
            if block.kind == "gqa" and block.get("kv") is not None:
                yield f"layer {index} reuses the cache of layer {block.int('kv')}"


def _block_rules(layout: Layout) -> Iterable[str]:
    """What the patched build stores once; the stock architectures store no less so."""
    own, sparse = mixers(layout), of_kind(feed_forwards(layout), "moe")
    for kind, what in (("gqa", "attention"), ("swa", "sliding windows")):
        turned = [block for block in of_kind(own, kind) if block.get("rope_theta")]
        yield from one_per_model(f"RoPE base of {what}", turned, lambda block: block.get("rope_theta"), "llama.cpp")
    yield from one_per_model("window", of_kind(own, "swa"), lambda block: block.int("window"), "llama.cpp")
    yield from one_per_model("expert count", sparse, lambda block: block.int("experts"), "llama.cpp")
    if any(block.int("experts") > _MAX_EXPERTS for block in sparse):
        yield f"more than {_MAX_EXPERTS} experts"


def _each_once(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))
