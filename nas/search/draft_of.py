"""From a finished layout back to a draft, so that it can be edited."""

from __future__ import annotations

from collections.abc import Iterator

from nas.core.block import Block, Scalar
from nas.core.block_space import EXPANSION, BlockSpace
from nas.core.frame import Frame, Values, ffn_width
from nas.core.layout import Layout
from nas.core.space import DENSE, SearchSpace
from nas.search.draft import Draft
from nas.search.membership import EXPERTS, leading_dense, repeats
from nas.search.sampling import Rng, Sampler


def draft_of(layout: Layout, sampler: Sampler, rng: Rng) -> Draft:
    """The draft that unfolds into `layout`.

    What the layout does not show, such as the width of experts in a dense one, is chosen at random.

    Args:
        layout: one inside the sampler's space.
        sampler: of the space.
        rng: for what is not shown.
    """
    space = sampler.space
    kinds = {layer.ffn.kind for layer in layout.layers if layer.ffn}
    routed = EXPERTS in kinds
    lead = leading_dense(layout)
    ffn = None
    if space.model.ffn_scope == "model":
        ffn = EXPERTS if routed else next(iter(kinds))
    shown_lead = lead if routed and lead in space.model.leading_dense.choices else None
    frame = Frame(
        layout.d_model,
        layout.vocab,
        ffn,
        int(_any(space.model.leading_dense.choices, rng)) if shown_lead is None else shown_lead,
        _period(space, layout, lead),
        tuple((block.kind, _values(block, layout, rng)) for block in space.mixers + space.ffn),
    )
    length = min(frame.period, layout.depth) or layout.depth
    return Draft(frame, layout.depth, tuple(_genes(layout, length, lead, ffn)), tuple(_lead(layout, lead)))


def _genes(layout: Layout, length: int, lead: int, ffn: str | None) -> Iterator[tuple[Block, Block]]:
    """Mixer and feed-forward of the first layers; behind a dense lead, feed-forwards of the layers that repeat."""
    for index in range(length):
        mixer, own = layout.layers[index].mixers[0], layout.layers[index].ffn
        if ffn is not None and index < lead:
            later = range(index, layout.depth, length)
            routed = [layout.layers[i].ffn for i in later if i >= lead] or [layout.layers[lead].ffn]
            own = routed[0]
        assert own is not None, "layouts of a space have a feed-forward in every layer"
        yield mixer, own


def _lead(layout: Layout, lead: int) -> Iterator[Block]:
    for layer in layout.layers[:lead]:
        assert layer.ffn is not None and layer.ffn.kind == DENSE, "leading layers are dense"
        yield layer.ffn


def _period(space: SearchSpace, layout: Layout, lead: int) -> int:
    """The shortest of the space's periods that the stack repeats with; 0 where it has none."""
    return min((int(p) for p in space.pattern.period.choices if p and repeats(layout, int(p), lead)), default=0)


def _values(space: BlockSpace, layout: Layout, rng: Rng) -> Values:
    """The model-wide values that the first block of the kind shows, random ones where there is none."""
    blocks = (block for layer in layout.layers for block in layer.blocks if block.kind == space.kind)
    block = next(blocks, None)
    return tuple(
        (name, _any(knob.choices, rng) if block is None else _value(block, name, knob.choices, layout.d_model))
        for name, knob in space.knobs.items()
        if knob.scope == "model"
    )


def _value(block: Block, name: str, choices: tuple[Scalar, ...], d_model: int) -> Scalar:
    if name == EXPANSION:
        return next(choice for choice in choices if ffn_width(float(choice), d_model) == block.int("width"))
    value = block.resolve(d_model).get(name)
    return next(choice for choice in choices if choice == value)


def _any(choices: tuple[Scalar, ...], rng: Rng) -> Scalar:
    return choices[int(rng.integers(len(choices)))]
