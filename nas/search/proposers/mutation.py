"""Edits and crossovers of layouts that stay inside the space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from nas.core.block import Block
from nas.core.block_space import EXPANSION, BlockSpace, Choice, arguments, matches
from nas.core.layout import Layout
from nas.core.model_choices import Frame, Half, Values, choice_of, ffn_width
from nas.search.proposers.editable_layout import Draft, Gene, layer_kinds
from nas.search.proposers.membership import EXPERTS, leading_dense, repeats
from nas.search.proposers.sampling import Rng, Sampler, pick

_TRIES = 60


def draft_of(layout: Layout, sampler: Sampler, rng: Rng) -> Draft:
    """Returns the draft that unfolds into `layout`.

    Choices without effect on the layout, such as the width of experts in a dense one, are random.

    Args:
        layout: one inside the space.
        sampler: of the space.
        rng: for choices without effect.
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
        int(pick(space.model.leading_dense.choices, rng)) if shown_lead is None else shown_lead,
        min((int(p) for p in space.pattern.period.choices if p and repeats(layout, int(p), lead)), default=0),
        tuple((block.kind, _values(block, layout, rng)) for block in space.mixers + space.ffn),
        layout.quantisation,
        layout.vectors,
        layout.tower.format() if layout.tower else "",
    )
    length = min(frame.period, layout.depth) or layout.depth
    return Draft(frame, layout.depth, tuple(_genes(layout, length, lead, ffn)), tuple(_draft_lead(layout, lead)))


def _genes(layout: Layout, length: int, lead: int, ffn: str | None) -> Iterator[Gene]:
    """Yields mixers and feed-forward of the first layers; for the lead, the feed-forwards of later repeats."""
    for index in range(length):
        block = layout.layers[index].ffn
        if index < lead:
            routed = block if ffn is None else layout.layers[lead].ffn
            later = range(index, layout.depth, length)
            block = next((layout.layers[i].ffn for i in later if i >= lead), routed)
        assert block is not None, "layouts of a space have a feed-forward in every layer"
        yield layout.layers[index].mixers, (block,)


def _draft_lead(layout: Layout, lead: int) -> Iterator[Half]:
    for layer in layout.layers[:lead]:
        assert layer.ffn is not None, "layouts of a space have a feed-forward in every layer"
        yield (layer.ffn,)


def _values(space: BlockSpace, layout: Layout, rng: Rng) -> Values:
    """Returns the model-wide values of the first block of the kind; random ones where there is none."""
    blocks = [block for layer in layout.layers for block in layer.blocks if block.kind == space.kind]
    return tuple(
        (name, _value(blocks, name, knob.choices, layout.d_model) if blocks else pick(knob.choices, rng))
        for name, knob in space.knobs.items()
        if knob.scope == "model"
    )


def _value(blocks: Sequence[Block], name: str, choices: tuple[Choice, ...], d_model: int) -> Choice:
    """Returns the choice that gives the argument of all `blocks`."""
    if name == EXPANSION:
        width = blocks[0].int("width")
        return next(choice for choice in choices if ffn_width(float(choice), d_model) == width)
    resolved = [arguments(block, d_model) for block in dict.fromkeys(blocks)]
    return next(choice for choice in choices if all(matches(args[name], choice, args) for args in resolved))


def mutate(layout: Layout, sampler: Sampler, rng: Rng, again: float = 0.0) -> tuple[Layout, str]:
    """Returns a layout of the space one edit away from `layout`, and the edit's name.

    Where no edit gives another layout inside the space, the result is a random layout ('random'). In a space that lists
    its layouts, the result is one like `layout` ('neighbour').

    Args:
        layout: one inside the space.
        sampler: of the space.
        rng: for all choices.
        again: chance that an edit is followed by another one, whose name is returned.
    """
    if sampler.listed is not None:
        return sampler.listed.near([layout], rng), "neighbour"
    draft = draft_of(layout, sampler, rng)
    for _ in range(_TRIES):
        edited, name = _edited(draft, sampler, rng)
        while edited and rng.random() < again:
            edited, name = _edited(edited, sampler, rng)
        settled = sampler.settle(edited, rng) if edited else None
        if settled is not None and settled != layout:
            return settled, name
    return sampler.draw(rng), "random"


def _edited(draft: Draft, sampler: Sampler, rng: Rng) -> tuple[Draft | None, str]:
    name = pick(list(EDITS), rng)
    return EDITS[name](draft, sampler, rng), name


def crossover(first: Layout, second: Layout, sampler: Sampler, rng: Rng) -> tuple[Layout, str]:
    """Returns the lower part of one parent under the upper part of the other, and the edit's name.

    Widths are from either parent. Cuts are at the same relative depth, so that the child's depth is between those of
    its parents. Where the child equals a parent or is outside the space, one parent is mutated instead. In a space that
    lists its layouts, the child is one between its parents.
    """
    if sampler.listed is not None:
        return sampler.listed.near([first, second], rng), "crossover"
    a, b = draft_of(first, sampler, rng), draft_of(second, sampler, rng)
    cut = rng.uniform(0.2, 0.8)
    below, above = a.genes[: round(cut * len(a.genes))], b.genes[round(cut * len(b.genes)) :]
    if below and above:
        frame = _mixed_frame(a.frame, b.frame, rng)
        depth = max(1, round(cut * a.depth) + b.depth - round(cut * b.depth))
        child = sampler.settle(Draft(frame, depth, below + above, a.lead), rng)
        if child is not None and child not in (first, second):
            return child, "crossover"
    return mutate(first if rng.random() < 0.5 else second, sampler, rng)


def _mixed_frame(a: Frame, b: Frame, rng: Rng) -> Frame:
    """Returns a frame with each choice from either parent; the values of one block kind come from the same parent."""
    sources = [pick((a, b), rng) for _ in range(5 + len(a.knobs))]
    width, vocab, ffn, lead, period = sources[:5]
    knobs = tuple((kind, source.values(kind)) for (kind, _), source in zip(a.knobs, sources[5:], strict=True))
    stored_as = a if a.quantisation == b.quantisation or rng.random() < 0.5 else b
    vectors = a if a.vectors == b.vectors or rng.random() < 0.5 else b
    sizes = width.d_model, vocab.vocab, ffn.ffn, lead.leading_dense, period.period
    seeing = a if a.tower == b.tower or rng.random() < 0.5 else b
    return Frame(*sizes, knobs, stored_as.quantisation, vectors.vectors, seeing.tower)


def _mixer_kind(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Changes the kind of mixer in one layer, or adds or takes away one that runs in parallel."""
    index = _position(draft, rng)
    mixers, ffn = draft.genes[index]
    others = [choice for choice in layer_kinds(sampler.frames, draft.frame)[0] if choice != choice_of(mixers)]
    if not others:
        return None
    drawn = sampler.half(draft.frame, pick(others, rng), rng)
    old = {block.kind: block for block in mixers}
    return draft.with_gene(index, (tuple(old.get(block.kind, block) for block in drawn), ffn))


def _mixer_arguments(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Changes the arguments of a layer's mixers, or of those of all layers of the same choice alike."""
    index = _position(draft, rng)
    choice = choice_of(draft.genes[index][0])
    drawn = sampler.half(draft.frame, choice, rng)
    everywhere = rng.random() < 0.5
    genes = tuple(
        (drawn, ffn) if position == index or (everywhere and choice_of(mixers) == choice) else (mixers, ffn)
        for position, (mixers, ffn) in enumerate(draft.genes)
    )
    return replace(draft, genes=genes)


def _feed_forward(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Changes the feed-forward in one layer, or in all that have the same."""
    index = _position(draft, rng)
    before, after = draft.genes[index][1], sampler.gene(draft.frame, rng)[1]
    everywhere = rng.random() < 0.5
    genes = tuple(
        (mixers, after if position == index or (everywhere and ffn == before) else ffn)
        for position, (mixers, ffn) in enumerate(draft.genes)
    )
    return replace(draft, genes=genes)


def _lead(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Changes the dense feed-forward in the leading layers of a mixture of experts."""
    return replace(draft, lead=sampler.lead(draft.frame, (), rng)) if draft.lead else None


def _swap(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Swaps the mixers of two layers."""
    i, j = _position(draft, rng), _position(draft, rng)
    (first, ffn_i), (second, ffn_j) = draft.genes[i], draft.genes[j]
    return draft.with_gene(i, (second, ffn_i)).with_gene(j, (first, ffn_j))


def _move(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Moves one layer to another height; half of the time one of the rarest mixer kind."""
    genes = list(draft.genes)
    index = _position(draft, rng)
    if rng.random() < 0.5:
        kinds = [choice_of(mixers) for mixers, _ in genes]
        rare = [i for i, kind in enumerate(kinds) if kinds.count(kind) == min(map(kinds.count, kinds))]
        index = pick(rare, rng)
    gene = genes.pop(index)
    genes.insert(int(rng.integers(len(genes) + 1)), gene)
    return replace(draft, genes=tuple(genes))


def _insert(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Inserts a layer: a copy of a neighbour, or a random one."""
    index = _position(draft, rng)
    gene = draft.genes[index] if rng.random() < 0.5 else sampler.gene(draft.frame, rng)
    return replace(draft, depth=draft.depth + 1, genes=(*draft.genes[:index], gene, *draft.genes[index:]))


def _remove(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Removes a layer."""
    index = _position(draft, rng)
    genes = draft.genes[:index] + draft.genes[index + 1 :]
    return replace(draft, depth=draft.depth - 1, genes=genes) if genes else None


def _frame(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Changes one model-wide choice: width, kernel, kind of feed-forward; half of the time the quantisation."""
    axes = sampler.frames.axes
    open_axes = [index for index, axis in enumerate(axes) if len(axis) > 1]
    if not open_axes:
        return None
    picks = sampler.frames.picks(draft.frame)
    axis = pick(open_axes, rng)
    if len(sampler.space.quantisations) > 1 and rng.random() < 0.5:
        axis = len(axes) - 1
    picks[axis] = (picks[axis] + 1 + int(rng.integers(len(axes[axis]) - 1))) % len(axes[axis])
    return replace(draft, frame=sampler.frames.at(picks))


def _position(draft: Draft, rng: Rng) -> int:
    return int(rng.integers(len(draft.genes)))


Edit = Callable[[Draft, Sampler, Rng], Draft | None]
EDITS: Mapping[str, Edit] = {
    "mixer_kind": _mixer_kind,
    "mixer_arguments": _mixer_arguments,
    "feed_forward": _feed_forward,
    "lead": _lead,
    "swap": _swap,
    "move": _move,
    "insert": _insert,
    "remove": _remove,
    "frame": _frame,
}
"""Name -> edit; all are equally likely."""
