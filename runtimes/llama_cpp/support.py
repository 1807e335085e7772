"""Rules of the layouts that llama.cpp carries, and their architectures.

A stock architecture restates what its loader and graph code require: src/models/lfm2.cpp, lfm2moe.cpp, falcon-h1.cpp,
qwen35.cpp, and those of `_FORMS` in the pinned source. A layout with short convolutions and attention is `lfm2`
(`lfm2moe` with experts), one with attention beside Mamba-2 in every layer `falcon-h1`, one of Gated DeltaNet and
attention with wide gates `qwen35`; attention alone is what `_FORMS` names for its feed-forwards, norms and biases.
What none of them holds may run on our patched build, whose architecture `hilnas` reads every size per layer:
`nas.measure.runtimes.llama_cpp.patches`.
"""

from __future__ import annotations

from collections.abc import Iterable

from nas.core.block import Block
from nas.core.errors import UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.quantisation import Quantisation
from nas.measure.runtimes.base import Support
from nas.measure.runtimes.llama_cpp.kinds import (
    ATTENTION,
    CACHED,
    KINDS,
    feed_forwards,
    mixers,
    mixers_by_layer,
    of_kind,
    one_per_model,
    one_rope_base,
    score_bound,
)

QUANTISATIONS = ("q4_0", "q8_0", "f16", "f32")
"""Those whose random weights a device makes itself."""
FURTHER = ("q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "iq4_nl", "iq4_xs", "q3_k")
"""Others that are written; files of random weights are sent to the device."""
PATCHED = "hilnas"
"""Our architecture. A stock build does not know the name, so it refuses such a file when it opens it."""

PROJECTED = ("lfm2", "lfm2moe")
"""Architectures after which llama.cpp applies a projection, and computes no logits besides: src/models/lfm2.cpp."""

_MAX_LAYERS = 512  # src/llama-hparams.h


def stored_types(quantisation: str) -> Quantisation:
    """Returns which of `QUANTISATIONS` and `FURTHER` each part of a file has.

    Raises:
        UnknownName: it names another one, or another role.
        InvalidInput: it cannot be read.
    """
    types = Quantisation.parse(quantisation)
    for name in sorted(types.names):
        if name not in QUANTISATIONS + FURTHER:
            raise UnknownName("quantisation of llama.cpp", name, QUANTISATIONS + FURTHER)
    return types


def supports(layout: Layout) -> Support:
    """Returns stock where a stock architecture holds `layout`, else patched or no, with every reason."""
    # Later rules read single blocks of known kinds, so they wait for the earlier ones.
    for rules in (_shape_rules, _block_rules):
        if reasons := _each_once(rules(layout)):
            return Support("no", None, reasons)
    if layout.vectors and (reasons := _each_once(_vector_reasons(layout))):
        return Support("no", None, reasons)
    if reasons := _each_once(_stock_reasons(layout)):
        return Support("patched", PATCHED, reasons)
    return Support("stock", _stock_architecture(layout))


def _vector_reasons(layout: Layout) -> Iterable[str]:
    """Yields why llama.cpp gives no projected vectors to the tokens of a layout, and no logits besides."""
    if reasons := tuple(_stock_reasons(layout)):
        yield from (f"vectors of tokens: {reason}" for reason in reasons)
    elif (arch := _stock_architecture(layout)) not in PROJECTED:
        yield f"vectors of tokens behind {arch}: llama.cpp projects those of {' and '.join(PROJECTED)} alone"


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
    long = [block for block in of_kind(blocks, *ATTENTION) if block.int("rope_long")]
    yield from one_per_model("length of a long text (rope_long)", long, "rope_long", "llama.cpp")
    yield from one_per_model("bound of scores", of_kind(blocks, *CACHED), score_bound, "llama.cpp")
    for name in KINDS:
        if of_name := of_kind(blocks, name):
            yield from KINDS[name].rules(of_name)


def _stock_architecture(layout: Layout) -> str | None:
    """Returns the only architecture that may hold a layout, as it does unless there are `_stock_reasons`."""
    if all(sorted(block.kind for block in blocks) == ["gqa", "mamba2"] for blocks in mixers_by_layer(layout)):
        return FALCON_H1
    if of_kind(mixers(layout), "gdn") and all(block.get("gate_wide") for block in of_kind(mixers(layout), *ATTENTION)):
        return QWEN35
    if of_kind(mixers(layout), "conv"):
        return "lfm2moe" if of_kind(feed_forwards(layout), "moe") else "lfm2"
    attention, dense = of_kind(mixers(layout), *ATTENTION), of_kind(feed_forwards(layout), *_DENSE)
    if not attention or not dense:
        return None
    qk_norms = [block for block in attention if block.get("qk_norm")]
    if {block.kind for block in mixers(layout)} == {"gqa", "mamba2"} and not qk_norms:
        return GRANITE_HYBRID
    arch = _FORMS.get((dense[0].kind, layout.norms, _qk_norm(attention[0]), _biased(attention)))
    if arch != "llama":
        return arch
    if any(block.int("rope_dim") or block.int("rope_long") for block in attention):
        return PHI3
    return _SMOLLM3 if any(not block.get("rope_theta") for block in attention) else arch


PHI3 = "phi3"
"""That of Llama's form with RoPE on a part of a head, or with two sets of divisors of its angles."""
_SMOLLM3, _SMOLLM3_PERIOD = "smollm3", 4
"""That of Llama's form with every fourth layer without positions."""
FALCON_H1, GRANITE_HYBRID, QWEN35 = "falcon-h1", "granitehybrid", "qwen35"
_RECURRENT = {FALCON_H1: "mamba2", GRANITE_HYBRID: "mamba2", QWEN35: "gdn"}
"""Those with another mixer than attention and short convolutions."""
ROPE_SECTIONS = (11, 11, 10, 0)
"""Of qwen35: pairs that turn by time, height and width, which are equal in text."""
EPSILONS = {QWEN35: 1e-6}
"""Of all norms of a file, where it is another one than that of `nas.model.nn.primitives.RMSNorm`."""
_DENSE = ("swiglu", "relu2", "geglu")
_FORMS = {
    ("swiglu", "before", "no", False): "llama",
    ("swiglu", "before", "no", True): "qwen2",
    ("swiglu", "before", "one", False): "qwen3",
    ("relu2", "before", "no", False): "arcee",
    ("geglu", "before", "no", False): "gemma",
    ("geglu", "both", "no", False): "gemma2",
    ("geglu", "both", "one", False): "gemma3",
    ("swiglu", "behind", "one", False): "exaone4",
    ("swiglu", "behind", "wide", False): "olmo2",
}
"""Feed-forwards, norms, QK-norm and biases of a model of attention alone -> its architecture."""
WINDOWED = ("gemma2", "gemma3", "olmo2")
"""Those with windows in some layers."""
SCALED = ("gemma", "gemma2", "gemma3")
"""Those whose graph multiplies the embedding by the root of the width."""
PAIRED = ("llama", "arcee", _SMOLLM3, GRANITE_HYBRID)
"""Those whose RoPE turns neighbouring numbers."""
FACTORED = ("llama", "arcee", "exaone4")
"""Those that read factors of RoPE's frequencies from the file."""
_WHOLE = ("qwen2", "exaone4", "olmo2", PHI3)
"""Those whose heads make up the width."""
_OTHER_SCALE = {"gemma2": 46, "gemma3": 62}
"""Depth at which the loader takes a model for the one of 27B, whose scores are scaled otherwise."""


def _qk_norm(block: Block) -> str:
    return "wide" if block.get("qk_norm_wide") else "one" if block.get("qk_norm") else "no"


def _biased(attention: list[Block]) -> bool:
    return any(block.get("qkv_bias") for block in attention)


def _stock_reasons(layout: Layout) -> Iterable[str]:
    """Yields every rule of the stock architectures that a layout breaks which the patched build holds."""
    arch = _stock_architecture(layout)
    for index, layer in enumerate(layout.layers):
        if layer.share is not None:
            yield f"layer {index} shares weights with layer {layer.share}: layers of stock architectures do not"
        elif len(layer.mixers) > 1 and arch != FALCON_H1:
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
        if block.kind != _RECURRENT.get(arch or "") and (reason := KINDS[block.kind].not_stock):
            yield reason
    if not attention:
        yield "no attention layer: lfm2 needs at least one (llama_decode aborts without)"
    if arch != QWEN35 and any(block.get("gate") for block in attention):
        yield "gates on heads: stock architectures have none"
    yield from _attention_rules(attention, None if convs or not attention else arch)
    if arch in _RECURRENT:
        yield from _recurrent_rules(layout, arch, attention)
    else:
        yield from (_lfm2_rules(layout, attention, convs) if convs else _attention_only_rules(layout, attention))
    yield from _ffn_rules(layout)


def _attention_rules(attention: list[Block], arch: str | None) -> Iterable[str]:
    yield from one_per_model("head count", attention, "heads")
    yield from one_per_model("head size", attention, "head_dim")
    yield from one_per_model("choice of QK-norm", attention, _qk_norm)
    turned = [bool(block.get("rope_theta")) for block in attention]
    if arch == _SMOLLM3:
        if turned != [place % _SMOLLM3_PERIOD < _SMOLLM3_PERIOD - 1 for place in range(len(turned))]:
            yield "attention without positions: smollm3 has it in every fourth layer"
        attention = [block for block in attention if block.get("rope_theta")]
    elif not all(turned) and (arch != GRANITE_HYBRID or any(turned)):
        yield "attention without positions: stock architectures always turn queries and keys"
    yield from one_per_model("choice of biases", attention, "qkv_bias")
    full, windows = of_kind(attention, "gqa"), of_kind(attention, "swa")
    for blocks in (full, windows) if arch in WINDOWED else (attention,):
        if arch != "olmo2":
            yield from one_per_model("RoPE base", blocks, "rope_theta")
        yield from one_per_model("scaling of RoPE (rope_factor)", blocks, "rope_factor")
        yield from one_per_model("scaling of RoPE (rope_tokens)", blocks, "rope_tokens")
        yield from one_per_model("scaling of RoPE (rope_yarn)", blocks, "rope_yarn")
    yield from one_per_model("part of a head that RoPE turns", attention, "rope_dim")
    yield from one_per_model("length of a long text (rope_long)", attention, "rope_long")
    if arch != PHI3 and any(block.int("rope_long") for block in attention):
        yield "divisors of RoPE's angles that come with the weights (rope_long): phi3 alone has them"
    if any(block.kind == "swa" and block.get("sink") for block in attention):
        yield "attention sinks: lfm2 has none"
    if any(block.int("canon") for block in attention):
        yield "a convolution in front of attention (canon): stock architectures have none"


def _lfm2_rules(layout: Layout, attention: list[Block], convs: list[Block]) -> Iterable[str]:
    yield from one_per_model("convolution kernel", convs, "kernel")
    if any(not block.get("qk_norm") for block in attention):
        yield "attention without QK-norm: lfm2 always has it"
    for what in ("qkv_bias", "qk_norm_wide", "softcap"):
        if any(block.get(what) for block in attention):
            yield f"{'biases' if what == 'qkv_bias' else what} next to convolutions: lfm2 has none"
    if layout.norms != "before" or layout.softcap:
        yield "norms behind blocks, or bounded logits, next to convolutions: lfm2 has neither"
    if others := sorted({block.kind for block in feed_forwards(layout)} - {"swiglu", "moe"}):
        yield f"{', '.join(others)} feed-forwards next to convolutions: lfm2 has none"
    if any(block.int("rope_tokens") for block in attention):
        yield "pairs scaled one by one (rope_tokens) next to convolutions: lfm2 has no factors of frequencies"
    for block in attention:
        heads, head_dim = block.int("heads"), block.int("head_dim")
        if heads * head_dim != layout.d_model:
            yield f"{heads} heads of {head_dim} numbers do not make d_model {layout.d_model}: lfm2 needs that"
    if of_kind(attention, "swa") and of_kind(attention, "gqa"):
        yield "full and sliding-window attention in one model: lfm2 has one kind"
    if of_kind(attention, "swa") and of_kind(feed_forwards(layout), "moe"):
        yield "sliding windows together with experts: lfm2moe has none"


def _recurrent_rules(layout: Layout, arch: str, attention: list[Block]) -> Iterable[str]:
    recurrent = of_kind(mixers(layout), _RECURRENT[arch])
    yield from one_per_model(f"shape of {recurrent[0].kind}", recurrent, lambda block: block.args)
    yield from one_per_model("key-value head count", attention, "kv_heads")
    refused = ["qkv_bias", "qk_norm_wide", "softcap", "rope_tokens"]
    refused += [] if arch == QWEN35 else ["qk_norm", "rope_dim"]
    for what in refused:
        if any(block.get(what) for block in attention):
            yield f"{what} of attention: {arch} has none"
    if of_kind(mixers(layout), "conv"):
        yield f"short convolutions: {arch} has none"
    if of_kind(attention, "swa"):
        yield f"sliding windows: {arch} has none"
    if layout.norms != "before" or layout.softcap:
        yield f"norms behind blocks, or bounded logits: {arch} has neither"
    if others := sorted({block.kind for block in feed_forwards(layout)} - {"swiglu"}):
        yield f"{', '.join(others)} feed-forwards: {arch} has none"
    if arch == GRANITE_HYBRID and not all(block.get("norm") for block in recurrent):
        yield f"Mamba-2 without a norm: {arch} always has it"
    if arch == QWEN35 and not all(block.get("qk_norm") for block in attention):
        yield f"attention without QK-norm: {arch} always has it"
    if arch == QWEN35 and any(block.int("head_dim") < sum(ROPE_SECTIONS) for block in attention):
        yield f"heads of fewer than {sum(ROPE_SECTIONS)} numbers: {arch} asserts that they hold RoPE's sections"
    if arch == QWEN35 and any(block.get("norm_eps") != EPSILONS[arch] for block in recurrent):
        yield f"Gated DeltaNet with a norm of another epsilon than that of its queries and keys, 1e-6: {arch} has one"


def _attention_only_rules(layout: Layout, attention: list[Block]) -> Iterable[str]:
    yield from one_per_model("key-value head count (without convolutions)", attention, "kv_heads")
    if any(block.int("rope_dim") for block in attention) and _stock_architecture(layout) != PHI3:
        yield "RoPE on a part of a head (rope_dim) without convolutions, with QK-norm or biases: phi3 has neither"
    if of_kind(feed_forwards(layout), "moe"):
        yield "experts without a convolution layer: lfm2moe needs at least one"
    dense = of_kind(feed_forwards(layout), *_DENSE)
    yield from one_per_model("kind of feed-forward", dense, lambda block: block.kind)
    if not attention or not dense:
        return
    arch = _stock_architecture(layout)
    if arch is None:
        normed, biases = _qk_norm(attention[0]), "with" if _biased(attention) else "without"
        yield (
            f"{dense[0].kind} feed-forwards, norms {layout.norms} blocks, {normed} QK-norm, {biases} biases:"
            f" together in none of {', '.join(_FORMS.values())}"
        )
        return
    yield from _form_rules(layout, arch, attention)
    yield from _window_rules(arch, of_kind(attention, "gqa"), of_kind(attention, "swa"))


def _form_rules(layout: Layout, arch: str, attention: list[Block]) -> Iterable[str]:
    if any(block.int("rope_tokens") for block in attention) and arch not in FACTORED:
        yield f"pairs scaled one by one (rope_tokens): {arch} has no factors of frequencies, {', '.join(FACTORED)} have"
    head_dim, heads = attention[0].int("head_dim"), attention[0].int("heads")
    if arch in _WHOLE and heads * head_dim != layout.d_model:
        yield f"heads that do not make d_model {layout.d_model}: {arch} needs that"
    if layout.tied and arch == "olmo2":
        yield "tied embeddings: olmo2 has a head of its own"
    if not layout.tied and arch in ("gemma", "gemma2"):
        yield f"a head of its own: {arch} has tied embeddings"
    if layout.depth == _OTHER_SCALE.get(arch) and layout.d_model // heads != head_dim:
        yield f"{layout.depth} layers: {arch} scales scores by another size than the head's there"
    if layout.depth == 64 and arch == "exaone4":
        yield "64 layers: exaone4 has windows there"
    bounds = {float(block.get("softcap") or 0) for block in attention}
    if arch == "gemma2" and (len(bounds) > 1 or 0 in bounds or not layout.softcap):
        yield "scores or logits without a bound (softcap): gemma2 bounds both, each by one number"
    if arch != "gemma2" and any(bounds):
        yield f"bounded scores (softcap): {arch} has none"
    if arch not in ("gemma2", "gemma3") and layout.softcap:
        yield f"bounded logits (softcap): {arch} has none"


def _window_rules(arch: str, full: list[Block], windows: list[Block]) -> Iterable[str]:
    if arch == "gemma2" and not windows:
        yield "no sliding windows: gemma2 always has them"
    if not windows:
        return
    if arch not in WINDOWED:
        yield f"sliding windows without a convolution layer: {arch} has none"
        return
    if not full:
        yield f"sliding windows in every layer: {arch} is exported with them in some layers"
    if arch == "olmo2":
        yield from one_per_model("RoPE base", [*full, *windows], "rope_theta")
    scaled = {block.get("rope_factor") for block in windows}
    if scaled != ({block.get("rope_factor") for block in full} if arch == "gemma2" else {1.0}):
        yield f"scaling of RoPE in layers with windows: {arch} has {'that of all' if arch == 'gemma2' else 'none'}"


def _ffn_rules(layout: Layout) -> Iterable[str]:
    ffns = feed_forwards(layout)
    dense, sparse = of_kind(ffns, *_DENSE), of_kind(ffns, "moe")
    yield from one_per_model("dense feed-forward width", dense, "width")
    yield from one_per_model("experts per token", sparse, "top_k")
    yield from one_per_model("expert width", sparse, "width")
    if any(block.int("shared") for block in sparse):
        yield "shared experts: lfm2moe has none"
    if any(block.get("softmax") for block in sparse):
        yield "experts scored by a softmax: those of lfm2moe are by sigmoids"
    if sparse and of_kind(ffns[ffns.index(sparse[0]) :], *_DENSE):
        yield "a dense feed-forward after experts: lfm2moe has dense layers first only"


def _each_once(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))
