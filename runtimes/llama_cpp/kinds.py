"""Kinds of blocks in llama.cpp: one `GgufKind` per kind, in the registry `KINDS`.

A record says which tensors of a GGUF file hold a block and where their values come from, which numbers per layer our
patched architecture reads, and what the builds cannot hold. Other distributions add records through entry points of the
group `nas.llama_cpp.kinds`, with a patch for the graph code if ours does not compute the block.

The stock architectures are in `support`: they are fixed combinations of conv, gqa, swa, moe and dense blocks. Rounding
in the equivalence gate follows the storage type of each tensor and needs nothing per kind (`oracle`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nas.core.block import Block
from nas.core.layout import Layout
from nas.core.registry import Registry
from nas.model.blocks.linear_attention import convolved
from nas.model.blocks.mamba2 import inner_width
from nas.model.nn.rope import turned_numbers

if TYPE_CHECKING:
    from gguf import GGUFWriter

Role = Literal["matrix", "norm", "conv", "router", "bias", "decay"]
"""The use of a tensor. Only a matrix is quantised, the rest stays float32. Random weights of a norm are ones, of a bias
zeros, of a decay -1 to -16 (stored as -exp of what the state dict holds), the others are drawn."""

ATTENTION = ("gqa", "swa")
"""Kinds with keys and values per head."""
CACHED = (*ATTENTION, "mla")
"""Kinds with a cache that grows; all other mixers have a recurrent state."""
_MAX_EXPERTS = 1024  # src/llama-hparams.h


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a block.

    Args:
        name: in the file, after "blk.N.".
        shape: slowest dimension first.
        source: the tensor of `nas.model.nn.model`'s state dict, below the block.
        role: what it is.
        flat: whether its first two dimensions are one in the state dict.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    role: Role = "matrix"
    flat: bool = False


@dataclass(frozen=True)
class GgufKind:
    """Describes one kind of block to llama.cpp. Blocks are resolved wherever they are passed.

    Args:
        parts: (block, d_model) -> its tensors, in file order.
        sizes: key of our architecture -> (block, d_model) -> the layer's number; 0 in layers without such a block.
        headers: write what a model with such blocks says once: (writer, the mixers or feed-forwards of each layer).
        rules: (all such blocks of a layout) -> why our architecture does not hold them, as sentences.
        refuses: (block) -> why no build holds this one, after "layer N "; None: it does.
        not_stock: why no stock architecture holds such a block; None: one may, see `support`.
        patch: a diff for the pinned source that adds the block to our architecture; it follows ours.
        version: changes whenever the record of another distribution gives other bytes.
    """

    parts: Callable[[Block, int], Iterable[Part]]
    sizes: tuple[tuple[str, Callable[[Block, int], int]], ...] = ()
    headers: tuple[Callable[[GGUFWriter, Sequence[Sequence[Block]]], None], ...] = ()
    rules: Callable[[Sequence[Block]], Iterable[str]] = lambda blocks: ()
    refuses: Callable[[Block], str | None] = lambda block: None
    not_stock: str | None = None
    patch: Path | None = None
    version: str = ""


def mixers_by_layer(layout: Layout) -> list[list[Block]]:
    """Returns the mixers that run at each depth, resolved."""
    return [[block.resolve(layout.d_model) for block in layout.layer_at(depth).mixers] for depth in range(layout.depth)]


def feed_forwards_by_layer(layout: Layout) -> list[list[Block]]:
    """Returns the feed-forward that runs at each depth, resolved; none or one."""
    ffns = [layout.layer_at(depth).ffn for depth in range(layout.depth)]
    return [[block.resolve(layout.d_model)] if block else [] for block in ffns]


def mixers(layout: Layout) -> list[Block]:
    """Returns all mixers that run, first to last, resolved."""
    return list(itertools.chain.from_iterable(mixers_by_layer(layout)))


def feed_forwards(layout: Layout) -> list[Block]:
    """Returns all feed-forwards that run, first to last, resolved."""
    return list(itertools.chain.from_iterable(feed_forwards_by_layer(layout)))


def of_kind(blocks: Iterable[Block], *kinds: str) -> list[Block]:
    """Returns the blocks of some kinds."""
    return [block for block in blocks if block.kind in kinds]


def one_per_model(
    what: str, blocks: Iterable[Block], value: str | Callable[[Block], Hashable], build: str = "stock llama.cpp"
) -> Iterable[str]:
    """Yields the reason, if any, that blocks differ in what a build stores once: an argument, or what follows."""
    values = list(dict.fromkeys(block.get(value) if isinstance(value, str) else value(block) for block in blocks))
    if len(values) > 1:
        yield f"more than one {what} ({', '.join(map(str, values))}): {build} has one per model"


def argument(name: str) -> Callable[[Block, int], int]:
    """Returns a function for a size that is an argument of the block."""
    return lambda block, d_model: block.int(name)


def _rope_theta(block: Block) -> float:
    return float(block.get("rope_theta") or 0) if block.kind in CACHED else 0.0


def score_bound(block: Block) -> float:
    """Returns the bound of a mixer's scores; 0: there is none."""
    return float(block.get("softcap") or 0) if block.kind in ATTENTION else 0.0


def _cached_size(block: Block) -> int:
    """Returns the numbers of a cached key of one head; 0: the block has no cache."""
    if block.kind == "mla":
        return block.int("latent") + block.int("rope_dim")
    return block.int("head_dim") if block.kind in ATTENTION else 0


def _rope_base(attention: Sequence[Block]) -> float:
    """Returns the RoPE base of layers that share one, or any where none has positions."""
    return max(map(_rope_theta, attention), default=0.0) or 1e4


def one_rope_base(what: str, blocks: Sequence[Block]) -> Iterable[str]:
    """Yields the reason, if any, that blocks with positions differ in the base that a model stores once."""
    turned = [block for block in blocks if block.get("rope_theta")]
    return one_per_model(f"RoPE base of {what}", turned, "rope_theta", "llama.cpp")


def _attention_parts(block: Block, width: int) -> Iterator[Part]:
    heads, head_dim = block.int("heads"), block.int("head_dim")
    q, kv = heads * head_dim, block.int("kv_heads") * head_dim
    own_cache = dict(block.args).get("kv") is None
    yield Part("attn_q.weight", (q, width), "q.weight")
    if own_cache:
        yield Part("attn_k.weight", (kv, width), "k.weight")
        yield Part("attn_v.weight", (kv, width), "v.weight")
    if block.get("qkv_bias"):
        yield Part("attn_q.bias", (q,), "q.bias", "bias")
        if own_cache:
            yield Part("attn_k.bias", (kv,), "k.bias", "bias")
            yield Part("attn_v.bias", (kv,), "v.bias", "bias")
    yield Part("attn_output.weight", (width, q), "o.weight")
    if gates := _gates(block):
        yield Part("attn_output_gate.weight", (heads * gates, width), "gate.weight")
    if block.get("qk_norm"):
        wide = bool(block.get("qk_norm_wide"))
        yield Part("attn_q_norm.weight", (q if wide else head_dim,), "q_norm.weight", "norm")
        if own_cache:
            yield Part("attn_k_norm.weight", (kv if wide else head_dim,), "k_norm.weight", "norm")
    if block.int("rope_long"):
        pairs = turned_numbers(block) // 2
        yield Part("rope_freqs.weight", (pairs,), "rope_short.weight", "norm")
        yield Part("rope_freqs_long.weight", (pairs,), "rope_long.weight", "norm")
    if block.kind == "swa" and block.get("sink"):
        yield Part("attn_sinks.weight", (heads,), "sinks.weight", "bias")
    if canon := block.int("canon"):
        yield Part("shortconv.conv.weight", (width, canon), "canon.weight", "conv")


def _gates(block: Block) -> int:
    """Returns the gates of a head: none, one, or one for each number."""
    return (block.int("head_dim") if block.get("gate_wide") else 1) if block.get("gate") else 0


def add_used(writer: GGUFWriter, key: str, numbers: Sequence[int] | Sequence[float]) -> None:
    """Adds a number per layer of our architecture, unless all are 0, as they are where the key is missing."""
    if any(numbers):
        writer.add_array(f"{writer.arch}.{key}", numbers)


def _attention_header(writer: GGUFWriter, layers: Sequence[Sequence[Block]]) -> None:
    # The key-value cache takes its head size from layer 0, whichever kind that layer is.
    cached = [sum(map(_cached_size, blocks)) for blocks in layers]
    first = next(filter(None, cached))
    sizes = [size or first for size in cached]
    writer.add_array(f"{writer.arch}.attention.head_sizes", sizes)
    writer.add_array(f"{writer.arch}.attention.rope_pattern", [int(any(map(_rope_theta, blocks))) for blocks in layers])
    blocks = list(itertools.chain.from_iterable(layers))
    writer.add_rope_freq_base(_rope_base(of_kind(blocks, "gqa", "mla")))
    attention = [of_kind(mixers, *ATTENTION) for mixers in layers]
    for key, size in _ATTENTION_EXTRAS:
        add_used(writer, key, [sum(map(size, mixers)) for mixers in attention])
    if tokens := max((block.int("rope_long") for block in of_kind(blocks, *ATTENTION)), default=0):
        writer.add_rope_scaling_orig_ctx_len(tokens)
    if bound := max(map(score_bound, blocks)):
        writer.add_attn_logit_softcapping(bound)


_ATTENTION_EXTRAS: tuple[tuple[str, Callable[[Block], int]], ...] = (
    ("attention.rope_sizes", lambda block: block.int("rope_dim")),
    ("attention.gate_sizes", _gates),
    ("attention.wide_norms", lambda block: int(bool(block.get("qk_norm_wide")))),
)

_ATTENTION_SIZES = (
    ("attention.head_count", argument("heads")),
    ("attention.head_count_kv", argument("kv_heads")),
    ("shortconv.l_cache", argument("canon")),
)


GQA = GgufKind(_attention_parts, _ATTENTION_SIZES, (_attention_header,))


def _window_header(writer: GGUFWriter, layers: Sequence[Sequence[Block]]) -> None:
    windowed = of_kind(itertools.chain.from_iterable(layers), "swa")
    writer.add_sliding_window(windowed[0].int("window"))
    pattern = [int(bool(of_kind(blocks, "swa"))) for blocks in layers]
    writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", pattern)
    writer.add_rope_freq_base_swa(_rope_base(windowed))


def _window_rules(blocks: Sequence[Block]) -> Iterable[str]:
    yield from one_rope_base("sliding windows", blocks)
    yield from one_per_model("window", blocks, "window", "llama.cpp")


SWA = GgufKind(_attention_parts, _ATTENTION_SIZES, (_attention_header, _window_header), rules=_window_rules)


def _mla_parts(block: Block, width: int) -> Iterator[Part]:
    heads, latent, value, nope, rope, rank = (
        block.int(name) for name in ("heads", "latent", "head_dim", "nope_dim", "rope_dim", "query")
    )
    if rank:
        yield Part("attn_q_a.weight", (rank, width), "q_down.weight")
        yield Part("attn_q_a_norm.weight", (rank,), "q_norm.weight", "norm")
        yield Part("attn_q_b.weight", (heads * (nope + rope), rank), "q_up.weight")
    else:
        yield Part("attn_q.weight", (heads * (nope + rope), width), "q.weight")
    yield Part("attn_kv_a_mqa.weight", (latent + rope, width), "kv_down.weight")
    yield Part("attn_kv_a_norm.weight", (latent,), "kv_norm.weight", "norm")
    yield Part("attn_k_b.weight", (heads, latent, nope), "k_up.weight", flat=True)
    yield Part("attn_v_b.weight", (heads, value, latent), "v_up.weight", flat=True)
    yield Part("attn_output.weight", (width, heads * value), "o.weight")


MLA = GgufKind(
    _mla_parts,
    (
        ("attention.head_count", argument("heads")),
        ("attention.head_count_kv", lambda block, d_model: 1),
        ("attention.kv_lora_rank", argument("latent")),
        ("attention.q_lora_rank", argument("query")),
        ("attention.key_length_mla", lambda block, d_model: block.int("nope_dim") + block.int("rope_dim")),
        ("attention.value_length_mla", argument("head_dim")),
    ),
    (_attention_header,),
    not_stock="latent attention is in no stock architecture next to the others",
)


def _conv_parts(block: Block, width: int) -> Iterator[Part]:
    yield Part("shortconv.conv.weight", (width, block.int("kernel")), "conv.weight", "conv")
    yield Part("shortconv.in_proj.weight", (3 * width, width), "in_proj.weight")
    yield Part("shortconv.out_proj.weight", (width, width), "out.weight")


CONV = GgufKind(_conv_parts, (("shortconv.l_cache", argument("kernel")),))


def _mamba2_parts(block: Block, width: int) -> Iterator[Part]:
    inner, heads, groups = inner_width(block, width), block.int("heads"), block.int("groups")
    mixed = inner + 2 * groups * block.int("state")
    yield Part("ssm_in.weight", (inner + mixed + heads, width), "in_proj.weight")
    yield Part("ssm_conv1d.weight", (mixed, block.int("conv")), "conv.weight", "conv")
    yield Part("ssm_conv1d.bias", (mixed,), "conv.bias", "bias")
    yield Part("ssm_dt.bias", (heads,), "dt_bias", "bias")
    yield Part("ssm_a", (heads, 1), "A_log", "decay", flat=True)
    yield Part("ssm_d", (heads, 1), "D", "norm", flat=True)
    if block.get("norm"):
        yield Part("ssm_norm.weight", (groups, inner // groups), "norm.weight", "norm", flat=True)
    yield Part("ssm_out.weight", (width, inner), "out.weight")


def _mamba2_rules(blocks: Sequence[Block]) -> Iterable[str]:
    if not all(block.get("norm") for block in blocks):
        what = "number of groups of Mamba-2 (norm=0)"
        yield from one_per_model(what, blocks, "groups", "llama.cpp")


def _without_convolution(block: Block) -> str | None:
    return None if block.int("conv") else "has no convolution (conv=0): the graph has one"


MAMBA2 = GgufKind(
    _mamba2_parts,
    (
        ("ssm.conv_kernel", argument("conv")),
        ("ssm.state_size", argument("state")),
        ("ssm.time_step_rank", argument("heads")),
        ("ssm.group_count", argument("groups")),
        ("ssm.inner_size", inner_width),
    ),
    rules=_mamba2_rules,
    refuses=_without_convolution,
    not_stock=(
        "Mamba-2 layers are in stock architectures only beside attention in each (falcon-h1) or in turns with attention"
        " without QK-norm (granitehybrid)"
    ),
)


def _gdn_parts(block: Block, width: int) -> Iterator[Part]:
    heads, size = block.int("heads"), block.int("head_dim")
    inner, mixed = heads * size, convolved(block)
    yield Part("attn_qkv.weight", (mixed, width), "qkv.weight")
    yield Part("attn_gate.weight", (inner, width), "gate.weight")
    yield Part("ssm_conv1d.weight", (mixed, block.int("conv")), "conv.weight", "conv")
    yield Part("ssm_beta.weight", (heads, width), "beta.weight")
    yield Part("ssm_alpha.weight", (heads, width), "step_size.weight")
    yield Part("ssm_dt.bias", (heads,), "dt_bias", "bias")
    yield Part("ssm_a", (heads, 1), "A_log", "decay", flat=True)
    yield Part("ssm_norm.weight", (size,), "norm.weight", "norm")
    yield Part("ssm_out.weight", (width, inner), "out.weight")


def _gdn_header(writer: GGUFWriter, layers: Sequence[Sequence[Block]]) -> None:
    epsilons = [[float(block.get("norm_eps") or 0) for block in of_kind(blocks, "gdn")] for blocks in layers]
    add_used(
        writer, "linear_attention.norm_epsilon", [math.fsum(eps for eps in layer if eps != 1e-5) for layer in epsilons]
    )


GDN = GgufKind(
    _gdn_parts,
    (
        ("ssm.conv_kernel", argument("conv")),
        ("ssm.time_step_rank", argument("heads")),
        ("ssm.group_count", argument("key_heads")),
        ("linear_attention.head_size", argument("head_dim")),
    ),
    (_gdn_header,),
    refuses=_without_convolution,
    not_stock="Gated DeltaNet layers are in stock architectures only next to attention with wide gates (qwen35)",
)


def _gla_parts(block: Block, width: int) -> Iterator[Part]:
    inner, rank = block.int("heads") * block.int("head_dim"), block.int("rank")
    yield Part("attn_qkv.weight", (3 * inner, width), "qkv.weight")
    yield Part("attn_gate.weight", (inner, width), "gate.weight")
    yield Part("ssm_f_a.weight", (rank, width), "decay_down.weight")
    yield Part("ssm_f_b.weight", (inner, rank), "decay_up.weight")
    yield Part("ssm_dt.bias", (inner,), "decay_bias", "bias")
    yield Part("ssm_norm.weight", (block.int("head_dim"),), "norm.weight", "norm")
    yield Part("ssm_out.weight", (width, inner), "out.weight")


GLA = GgufKind(
    _gla_parts,
    (
        ("ssm.time_step_rank", argument("heads")),
        ("linear_attention.head_size", argument("head_dim")),
        ("linear_attention.rank", argument("rank")),
    ),
    not_stock="gated linear attention layers are in no stock architecture next to the others",
)


def _mlstm_parts(block: Block, width: int) -> Iterator[Part]:
    heads, keys = block.int("heads"), block.int("key_dim")
    inner = heads * block.int("head_dim")
    yield Part("attn_qkv.weight", (2 * heads * keys + inner, width), "qkv.weight")
    yield Part("attn_gate.weight", (inner, width), "gate.weight")
    yield Part("ssm_dt.weight", (2 * heads, width), "gates.weight")
    yield Part("ssm_dt.bias", (2 * heads,), "gate_bias", "bias")
    yield Part("ssm_norm.weight", (inner,), "norm_weight", "norm")
    yield Part("ssm_out.weight", (width, inner), "out.weight")


MLSTM = GgufKind(
    _mlstm_parts,
    (
        ("ssm.time_step_rank", argument("heads")),
        ("ssm.state_size", argument("key_dim")),
        ("linear_attention.head_size", argument("head_dim")),
    ),
    not_stock="mLSTM layers are in no stock architecture next to the others",
)


def _swiglu_parts(block: Block, width: int) -> Iterator[Part]:
    hidden = block.int("width")
    yield Part("ffn_gate.weight", (hidden, width), "gate.weight")
    yield Part("ffn_up.weight", (hidden, width), "up.weight")
    yield Part("ffn_down.weight", (width, hidden), "down.weight")


SWIGLU = GgufKind(_swiglu_parts, (("feed_forward_length", argument("width")),))


def _geglu_header(writer: GGUFWriter, layers: Sequence[Sequence[Block]]) -> None:
    add_used(writer, "feed_forward_gelu", [len(of_kind(blocks, "geglu")) for blocks in layers])


GEGLU = GgufKind(_swiglu_parts, SWIGLU.sizes, (_geglu_header,))


def _relu2_parts(block: Block, width: int) -> Iterator[Part]:
    hidden = block.int("width")
    yield Part("ffn_up.weight", (hidden, width), "up.weight")
    yield Part("ffn_down.weight", (width, hidden), "down.weight")


RELU2 = GgufKind(_relu2_parts, (("feed_forward_length", argument("width")),))


def _moe_parts(block: Block, width: int) -> Iterator[Part]:
    experts, hidden = block.int("experts"), block.int("width")
    yield Part("ffn_gate_inp.weight", (experts, width), "router.weight", "router")
    yield Part("exp_probs_b.bias", (experts,), "bias.weight", "bias")
    yield Part("ffn_gate_exps.weight", (experts, hidden, width), "gate.weight")
    yield Part("ffn_up_exps.weight", (experts, hidden, width), "up.weight")
    yield Part("ffn_down_exps.weight", (experts, width, hidden), "down.weight")
    if joint := block.int("shared") * hidden:
        yield Part("ffn_gate_shexp.weight", (joint, width), "shared.gate.weight")
        yield Part("ffn_up_shexp.weight", (joint, width), "shared.up.weight")
        yield Part("ffn_down_shexp.weight", (width, joint), "shared.down.weight")
    if block.get("shared_gate"):
        yield Part("ffn_gate_inp_shexp.weight", (1, width), "shared_gate.weight", "router")


def _moe_header(writer: GGUFWriter, layers: Sequence[Sequence[Block]]) -> None:
    from gguf import ExpertGatingFuncType

    mixtures = [of_kind(blocks, "moe") for blocks in layers]
    writer.add_expert_count(next(filter(None, mixtures))[0].int("experts"))
    for key, name in (("expert_used_count", "top_k"), ("expert_feed_forward_length", "width")):
        writer.add_array(f"{writer.arch}.{key}", [sum(block.int(name) for block in blocks) for blocks in mixtures])
    softmax = any(block.get("softmax") for blocks in mixtures for block in blocks)
    writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX if softmax else ExpertGatingFuncType.SIGMOID)
    if not all(block.get("norm_topk") for blocks in mixtures for block in blocks):
        writer.add_expert_weights_norm(False)
    shared = [sum(block.int("shared") * block.int("width") for block in blocks) for blocks in mixtures]
    add_used(writer, "expert_shared_feed_forward_length", shared)


def _moe_rules(blocks: Sequence[Block]) -> Iterable[str]:
    yield from one_per_model("expert count", blocks, "experts", "llama.cpp")
    yield from one_per_model("kind of experts' scores (softmax)", blocks, "softmax", "llama.cpp")
    yield from one_per_model("sum of experts' weights (norm_topk)", blocks, "norm_topk", "llama.cpp")
    if any(block.int("experts") > _MAX_EXPERTS for block in blocks):
        yield f"more than {_MAX_EXPERTS} experts"


MOE = GgufKind(_moe_parts, headers=(_moe_header,), rules=_moe_rules)

BUILTIN = {
    "gqa": GQA,
    "swa": SWA,
    "conv": CONV,
    "mamba2": MAMBA2,
    "swiglu": SWIGLU,
    "moe": MOE,
    "gdn": GDN,
    "gla": GLA,
    "mlstm": MLSTM,
    "relu2": RELU2,
    "geglu": GEGLU,
    "mla": MLA,
}
IN_EVERY_FILE = ("gqa", "swa", "conv", "mamba2", "swiglu")
"""Kinds whose keys are in every file of our architecture, in this order; those of the others where they are used."""

KINDS: Registry[GgufKind] = Registry("block kind that llama.cpp holds", "nas.llama_cpp.kinds", BUILTIN)
