"""Explains the decisions of a family's build, for its record and for its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from nas.core.block import BLOCKS, Block
from nas.core.family import BuildDecision
from nas.core.layout import Layout
from nas.core.units import show_count
from nas.model.blocks.attention import MAX_GROUP, AttentionKind
from nas.model.blocks.mla import MultiHeadLatentAttention
from nas.train.scaling.candidates import (
    MAX_ASPECT,
    TOLERANCE,
    ScaledLayout,
    Size,
    active_width,
    entangled,
    ffn_ratio,
    is_sparse,
    mixer_blocks,
    mixer_counts,
    moe_of,
)
from nas.train.scaling.source import DEPTHS, EXPONENT, Criteria, Pattern


def order_of(layout: Layout) -> str:
    """Returns the mixers' letters, first to last: 'C*2 A C*2 A'."""
    letters = [
        "&".join(BLOCKS[block.kind].letter for block in layout.layer_at(i).mixers) or "-" for i in range(layout.depth)
    ]
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return " ".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def pattern_in_words(layout: Layout) -> str:
    """Returns a description of a layout's pattern."""
    mixers = ", ".join(f"{count} {_blocks(layout, kind)}" for kind, count in mixer_counts(layout).items())
    return f"{layout.depth} layers ({order_of(layout)}): {mixers}; feed-forward: {_ffn_in_words(layout)}"


def pattern_decisions(pattern: Pattern) -> Iterator[BuildDecision]:
    """Yields the common pattern of the winners, and the one that the family is scaled from."""
    layouts = [winner.layout for winner in pattern.winners]
    single = "there is only one winner" if len(layouts) == 1 else ""
    assert DEPTHS == 8, "the text names eighths"
    for kind, shares in sorted(pattern.shares.items(), key=lambda item: -item[1].mean()):
        eighths = " ".join(f"{share:.0%}" for share in shares)
        yield BuildDecision(
            what=f"share of {kind}",
            value=f"{shares.mean():.0%} of the layers; by eighth of the depth, first to last: {eighths}",
            reason=single or "mean over the winners, weighted by hypervolume contribution",
        )
    for what, describe in (("blocks", _mixers_in_words), ("feed-forward", _ffn_in_words)):
        yield _common(what, layouts, describe, single)
    parent = pattern.parent
    who = "the given layout" if parent.trial is None else f"trial {parent.trial}"
    near = f"of {len(layouts)} winners the closest to the common pattern: {pattern.distance:.0%} of its blocks differ"
    yield BuildDecision(what="parent", value=f"{who}: {parent.layout}", reason=single or near)


def quality_decision(criteria: Criteria, parent: Layout, *, studied: bool) -> BuildDecision:
    """Returns the rule for the quality of untrained layouts."""
    if not studied:
        base = "1, because no study trained the pattern"
    elif criteria.trained(parent) is None:
        base = "1 for all, because the study did not train the pattern and trained qualities would not compare with 1"
    else:
        base = "the parent's proxy quality in the study; a candidate whose own proxy the study trained has that quality"
    return BuildDecision(
        what="quality",
        value=f"{criteria.quality:.4g} x (weights outside the tables / the nearest candidate's)^{EXPONENT}",
        reason=(
            f"{base}. No candidate was trained: that quality grows with the weights by this power (Kaplan et al. 2020, "
            "equation 1.1) and hardly depends on the shape is assumed. A mixture of experts counts with the geometric "
            "mean of its total and active weights"
        ),
    )


def member_decisions(scaled: ScaledLayout, parent: Layout, size: Size) -> Iterator[BuildDecision]:
    """Yields the decisions on a member's layout, part by part."""
    layout = scaled.layout
    params = layout.params
    active = f", {show_count(params.active)} active" if size.active else ""
    yield BuildDecision(
        what="weights",
        value=f"{show_count(params.total)}{active}, {show_count(params.non_embedding)} outside the tables",
        reason=f"{size.name} allows {size.budget()}, within {TOLERANCE:.0%} of the name",
    )
    aspect, before = layout.d_model / layout.depth, parent.d_model / parent.depth
    entanglement = "; the depth is the parent's, because its layers read each other's weights or caches"
    yield BuildDecision(
        what="width and depth",
        value=f"{layout.d_model} wide, {layout.depth} layers",
        reason=f"width / depth is {aspect:.0f}, the parent's {before:.0f}; it may differ by a factor of {MAX_ASPECT:g}"
        + (entanglement if entangled(parent) else ""),
    )
    yield BuildDecision(what="order", value=order_of(layout), reason=_order_reason(layout, parent))
    for block in _first_of_each_kind(mixer_blocks(layout)):
        if isinstance(block.spec, MultiHeadLatentAttention):
            yield _latents(block, parent)
        elif isinstance(block.spec, AttentionKind):
            yield _heads(block, parent, scaled)
    yield _ffn(layout, parent, scaled)
    yield BuildDecision(
        what="vocabulary",
        value=f"{layout.vocab} tokens, {'tied embeddings' if layout.tied else 'separate input and output tables'}",
        reason="the parent's" if layout.vocab == parent.vocab else f"requested; the parent has {parent.vocab}",
    )


def _order_reason(layout: Layout, parent: Layout) -> str:
    if layout.depth == parent.depth:
        return "the parent's"
    counts, before = mixer_counts(layout), mixer_counts(parent)
    kinds = ", ".join(
        f"{kind} in {counts[kind]} of {layout.depth} (parent: {n} of {parent.depth})" for kind, n in before.items()
    )
    return f"each kind of layer keeps its share and its distribution over the depth: {kinds}"


def _heads(block: Block, parent: Layout, scaled: ScaledLayout) -> BuildDecision:
    heads, kv_heads, size = (block.int(name) for name in ("heads", "kv_heads", "head_dim"))
    before = _first_of_each_kind(mixer_blocks(parent, block.kind))[0]
    how = "the ratio of query heads to key-value heads is kept as nearly as the heads divide"
    if scaled.caches == "heads" and heads > before.int("heads"):
        how = (
            f"{before.int('kv_heads')} key-value heads are kept as far as heads divide, up to {MAX_GROUP} queries "
            "each: a token's cache stays at the size that the search selected, as in LFM2 and Llama 3"
        )
    return BuildDecision(
        what=f"heads of {block.kind}",
        value=f"{heads} of size {size}, {kv_heads} key-value heads",
        reason=f"the head size is kept (the parent has {before.int('heads')}/{before.int('kv_heads')} heads); {how}",
    )


def _latents(block: Block, parent: Layout) -> BuildDecision:
    before = _first_of_each_kind(mixer_blocks(parent, block.kind))[0]
    same = block.int("latent") == before.int("latent")
    how = "the latent, which is a token's cache, is the parent's" if same else "the latent scales with the width"
    return BuildDecision(
        what=f"heads of {block.kind}",
        value=f"{block.int('heads')} of size {block.int('head_dim')}, latents of {block.int('latent')}",
        reason=f"the head size is kept (the parent has {before.int('heads')} heads); {how}",
    )


def _ffn(layout: Layout, parent: Layout, scaled: ScaledLayout) -> BuildDecision:
    ratio, before = ffn_ratio(layout), ffn_ratio(parent)
    reason = f"solved for the weights of the size: {ratio:.2f} x width, the parent's {before:.2f} x width"
    if scaled.experts is not None:
        experts = (
            "the experts are the parent's" if moe_of(parent) else "the parent has no experts: LFM2-8B-A1B's are used"
        )
        reason += f" (as one token uses it); {experts}; leading dense layers are as wide as a token's experts together"
    return BuildDecision(what="feed-forward", value=_ffn_in_words(layout), reason=reason)


def _mixers_in_words(layout: Layout) -> str:
    return ", ".join(_blocks(layout, kind) for kind in sorted(mixer_counts(layout)))


def _blocks(layout: Layout, kind: str) -> str:
    """Returns a kind's different blocks, such as 'grouped-query attention A16/8 A16/4'."""
    texts = sorted({block.canonical(layout.d_model).format() for block in mixer_blocks(layout, kind)})
    return f"{BLOCKS[kind].doc} {' '.join(texts)}"


def _ffn_in_words(layout: Layout) -> str:
    ffns = [ffn for i in range(layout.depth) if (ffn := layout.layer_at(i).ffn) is not None]
    texts = []
    for kind, same in groupby(ffns, key=lambda ffn: ffn.kind):
        blocks = list(same)
        ratios = sorted({active_width(block) / layout.d_model for block in blocks})
        wide = f"{ratios[0]:.3g}" if len(ratios) == 1 else f"{ratios[0]:.3g} to {ratios[-1]:.3g}"
        first = blocks[0]
        experts = f" with {first.int('top_k')} of {first.int('experts')} experts" if is_sparse(first) else ""
        texts.append(f"{len(blocks)} {kind}{experts}, {wide} x width")
    return "; then ".join(texts) or "none"


def _first_of_each_kind(blocks: Sequence[Block]) -> list[Block]:
    return list({block.kind: block for block in reversed(blocks)}.values())[::-1]


def _common(what: str, layouts: Sequence[Layout], describe: Callable[[Layout], str], single: str) -> BuildDecision:
    variants = list(dict.fromkeys(map(describe, layouts)))
    agree = "all winners agree" if len(variants) == 1 else ""
    reason = single or agree or f"{len(variants)} variants among {len(layouts)} winners; the parent's is used"
    return BuildDecision(what=what, value=" | ".join(variants), reason=reason)
