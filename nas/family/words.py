"""What a family's build decided, in words: decisions with their reasons, for the record and for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from nas.blocks.attention import AttentionKind
from nas.core.block import BLOCKS, Block
from nas.core.family import Decision
from nas.core.layout import Layout
from nas.core.units import show_count
from nas.family.pattern import DEPTHS, Pattern, active_width, ffn_ratio, is_sparse, mixer_blocks, mixer_counts
from nas.family.scale import MAX_ASPECT, Scaled, entangled
from nas.family.sizes import TOLERANCE, Size
from nas.family.sketch import moe_of
from nas.family.stack import MAX_GROUP
from nas.family.terms import EXPONENT, Terms


def order_of(layout: Layout) -> str:
    """The mixers' letters, first to last: 'C*2 A C*2 A'."""
    letters = [
        "&".join(BLOCKS[block.kind].letter for block in layout.own(i).mixers) or "-" for i in range(layout.depth)
    ]
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return " ".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def pattern_in_words(layout: Layout) -> str:
    """A layout's pattern in one sentence."""
    counts = mixer_counts(layout)
    parts = [f"{count} of {_blocks(layout, kind)}" for kind, count in counts.items()]
    return f"{layout.depth} layers, {', '.join(parts)}: {order_of(layout)}; feed-forward {_ffn_in_words(layout)}"


def pattern_decisions(pattern: Pattern) -> Iterator[Decision]:
    """What the winners have in common, and which of them the family is scaled from."""
    layouts = [winner.layout for winner in pattern.winners]
    one = len(layouts) == 1
    for kind, shares in sorted(pattern.shares.items(), key=lambda item: -item[1].mean()):
        told = " ".join(f"{share:.0%}" for share in shares)
        yield Decision(
            what=f"share of {kind}",
            value=f"{shares.mean():.0%} of the layers; from the first eighth of the stack to the last: {told}",
            reason="of the only winner" if one else "mean over the winners, by hypervolume contribution",
        )
    assert DEPTHS == 8, "eighths are spoken of"
    yield Decision(what="blocks", value=_over(layouts, _mixers_in_words), reason=_alike(layouts, _mixers_in_words))
    yield Decision(what="feed-forward", value=_over(layouts, _ffn_in_words), reason=_alike(layouts, _ffn_in_words))
    parent = pattern.parent
    who = "the given layout" if parent.trial is None else f"trial {parent.trial}"
    near = f"{pattern.distance:.0%} of its blocks would have to be others to have the common shares"
    yield Decision(
        what="parent",
        value=f"{who}: {parent.layout}",
        reason="the only winner"
        if one
        else f"of {len(layouts)} winners the nearest to what they have in common: {near}",
    )


def quality_decision(terms: Terms, parent: Layout, *, studied: bool) -> Decision:
    """What stands in for the quality of layouts that nobody trained."""
    told = f"{terms.quality:.4g} x (weights outside the tables / the nearest candidate's)^{EXPONENT}"
    return Decision(
        what="quality",
        value=told,
        reason=(
            f"{_source_of_quality(terms, parent, studied=studied)}. That more weights of one "
            "pattern are better by that power is an assumption (Kaplan et al. 2020, equation 1.1), as is that shape "
            "matters little; of experts the geometric mean of all and active weights counts. No candidate was trained"
        ),
    )


def _source_of_quality(terms: Terms, parent: Layout, *, studied: bool) -> str:
    if not studied:
        return "1, since no study trained the pattern"
    if terms.trained(parent) is None:
        return "1 for all, since the study did not train the pattern: trained ones beside it would not compare"
    own = "a candidate whose own proxy the study trained has that one's instead"
    return f"the parent's proxy quality in the study; {own}"


def member_decisions(scaled: Scaled, parent: Layout, size: Size) -> Iterator[Decision]:
    """Why a member's layout is what it is, part by part."""
    layout = scaled.layout
    params = layout.params
    active = f", {show_count(params.active)} active" if size.active else ""
    yield Decision(
        what="weights",
        value=f"{show_count(params.total)}{active}, {show_count(params.non_embedding)} outside the tables",
        reason=f"{size.name} admits {size.budget()}: {TOLERANCE:.0%} to either side of the name",
    )
    aspect, before = layout.d_model / layout.depth, parent.d_model / parent.depth
    yield Decision(
        what="width and depth",
        value=f"{layout.d_model} wide, {layout.depth} layers",
        reason=(
            f"width / depth {aspect:.0f}, the parent's {before:.0f}; at most {MAX_ASPECT:g} times either way"
            + (", with the parent's depth, since its layers read each other" if entangled(parent) else "")
        ),
    )
    yield Decision(what="order", value=order_of(layout), reason=_order_reason(layout, parent))
    for block in _kinds_once(mixer_blocks(layout)):
        if isinstance(block.spec, AttentionKind):
            yield _heads(block, layout, parent, scaled)
    yield _ffn(layout, parent, scaled)
    yield Decision(
        what="vocabulary",
        value=f"{layout.vocab} tokens, {'one table' if layout.tied else 'two tables'}",
        reason="the parent's" if layout.vocab == parent.vocab else f"as asked for; the parent has {parent.vocab}",
    )


def _order_reason(layout: Layout, parent: Layout) -> str:
    if layout.depth == parent.depth:
        return "the parent's"
    counts, before = mixer_counts(layout), mixer_counts(parent)
    told = ", ".join(
        f"{kind} {counts[kind]} of {layout.depth} after {n} of {parent.depth}" for kind, n in before.items()
    )
    return f"each kind keeps its share and its density along the stack: {told}"


def _heads(block: Block, layout: Layout, parent: Layout, scaled: Scaled) -> Decision:
    heads, kv_heads, size = (block.int(name) for name in ("heads", "kv_heads", "head_dim"))
    own = _kinds_once(mixer_blocks(parent, block.kind))[0]
    how = "the ratio of heads is kept as nearly as they divide"
    if scaled.caches == "heads" and heads > own.int("heads"):
        how = (
            f"{own.int('kv_heads')} key-value heads are kept as nearly as heads divide, up to {MAX_GROUP} query heads "
            "each: a token's cache stays what the search found worth it, as in LFM2 and Llama 3"
        )
    return Decision(
        what=f"heads of {block.kind}",
        value=f"{heads} of {size}, {kv_heads} key-value heads",
        reason=f"the head size is kept (the parent has {own.int('heads')}/{own.int('kv_heads')}); {how}",
    )


def _ffn(layout: Layout, parent: Layout, scaled: Scaled) -> Decision:
    told = f"what the size leaves; {ffn_ratio(layout):.2f} times the width, the parent {ffn_ratio(parent):.2f}"
    if scaled.experts is not None:
        own = moe_of(parent)
        whose = "experts as in the parent" if own else "the parent has no experts: begun from those of LFM2-8B-A1B"
        told += f" (what one token passes through); {whose}; leading dense layers as wide as a token's experts"
    return Decision(what="feed-forward", value=_ffn_in_words(layout), reason=told)


def _mixers_in_words(layout: Layout) -> str:
    return ", ".join(_blocks(layout, kind) for kind in sorted(mixer_counts(layout)))


def _blocks(layout: Layout, kind: str) -> str:
    """A kind's different blocks, such as 'grouped-query attention A16/8 A16/4'."""
    texts = sorted({block.canonical(layout.d_model).format() for block in mixer_blocks(layout, kind)})
    return f"{BLOCKS[kind].doc} {' '.join(texts)}"


def _ffn_in_words(layout: Layout) -> str:
    ffns = [layer.ffn for i in range(layout.depth) if (layer := layout.own(i)).ffn is not None]
    texts = []
    for kind, same in groupby(ffns, key=lambda ffn: ffn.kind if ffn else ""):
        blocks = list(same)
        ratios = sorted({active_width(block) / layout.d_model for block in blocks})
        wide = f"{ratios[0]:.3g}" if len(ratios) == 1 else f"{ratios[0]:.3g} to {ratios[-1]:.3g}"
        first = blocks[0]
        experts = f" {first.int('top_k')} of {first.int('experts')} experts" if is_sparse(first) and first else ""
        texts.append(f"{len(blocks)} {kind}{experts} {wide} times the width")
    return ", then ".join(texts) or "none"


def _kinds_once(blocks: Sequence[Block]) -> list[Block]:
    """The first block of each kind."""
    return list({block.kind: block for block in reversed(blocks)}.values())[::-1]


def _over(layouts: Sequence[Layout], told: Callable[[Layout], str]) -> str:
    return " | ".join(dict.fromkeys(map(told, layouts)))


def _alike(layouts: Sequence[Layout], told: Callable[[Layout], str]) -> str:
    number = len(set(map(told, layouts)))
    if len(layouts) == 1:
        return "of the only winner"
    return "all winners agree" if number == 1 else f"{number} ways among {len(layouts)} winners; the parent's is taken"
