"""Edits of layouts that stay inside the space: what evolution and the surrogate's candidate pool are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from nas.core.frame import Frame
from nas.core.layout import Layout
from nas.search.draft import Draft, layer_kinds
from nas.search.draft_of import draft_of
from nas.search.sampling import Rng, Sampler

_TRIES = 60


def mutate(layout: Layout, sampler: Sampler, rng: Rng, again: float = 0.0) -> tuple[Layout, str]:
    """A layout of the space one edit away from `layout`, and the edit's name.

    Where no edit of many leads to another layout inside the space, the result is a random layout ('random').

    Args:
        layout: one inside the space.
        sampler: of the space.
        rng: for all choices.
        again: chance that an edit is followed by a further one, whose name it is then.
    """
    draft = draft_of(layout, sampler, rng)
    for _ in range(_TRIES):
        edited, name = _edited(draft, sampler, rng)
        while edited and rng.random() < again:
            edited, name = _edited(edited, sampler, rng)
        found = sampler.settle(edited, rng) if edited else None
        if found is not None and found != layout:
            return found, name
    return sampler.draw(rng), "random"


def _edited(draft: Draft, sampler: Sampler, rng: Rng) -> tuple[Draft | None, str]:
    name = list(EDITS)[int(rng.integers(len(EDITS)))]
    return EDITS[name](draft, sampler, rng), name


def crossover(first: Layout, second: Layout, sampler: Sampler, rng: Rng) -> tuple[Layout, str]:
    """The lower part of one parent under the upper part of the other, with widths from either.

    Cuts are at the same relative depth, so that the child's depth lies between its parents'. Where the child is a
    parent again or outside the space, one parent is mutated instead, and the edit's name says so.
    """
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
    """Each choice from either parent; the values of one block kind come from the same parent."""
    sources = [(a, b)[int(rng.integers(2))] for _ in range(5 + len(a.knobs))]
    width, vocab, ffn, lead, period = sources[:5]
    knobs = tuple((kind, source.values(kind)) for (kind, _), source in zip(a.knobs, sources[5:], strict=True))
    return Frame(width.d_model, vocab.vocab, ffn.ffn, lead.leading_dense, period.period, knobs)


def _mixer_kind(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Another kind of mixer in one layer."""
    index = _position(draft, rng)
    mixer, ffn = draft.genes[index]
    others = [kind for kind in layer_kinds(sampler.frames, draft.frame)[0] if kind != mixer.kind]
    if not others:
        return None
    kind = others[int(rng.integers(len(others)))]
    return draft.with_gene(index, (sampler.block(draft.frame, kind, rng), ffn))


def _mixer_arguments(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Other arguments of one mixer, or of all mixers of its kind alike."""
    index = _position(draft, rng)
    block = sampler.block(draft.frame, draft.genes[index][0].kind, rng)
    everywhere = rng.random() < 0.5
    genes = tuple(
        (block, ffn) if position == index or (everywhere and mixer.kind == block.kind) else (mixer, ffn)
        for position, (mixer, ffn) in enumerate(draft.genes)
    )
    return replace(draft, genes=genes)


def _feed_forward(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Another feed-forward in one layer, or in all that have the same; a frame with one kind and width has none."""
    index = _position(draft, rng)
    before, after = draft.genes[index][1], sampler.gene(draft.frame, rng)[1]
    everywhere = rng.random() < 0.5
    genes = tuple(
        (mixer, after if position == index or (everywhere and ffn == before) else ffn)
        for position, (mixer, ffn) in enumerate(draft.genes)
    )
    return replace(draft, genes=genes)


def _lead(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """Another dense feed-forward in the leading layers of a mixture of experts."""
    return replace(draft, lead=sampler.lead(draft.frame, (), rng)) if draft.lead else None


def _swap(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """The mixers of two layers change places."""
    i, j = _position(draft, rng), _position(draft, rng)
    (first, ffn_i), (second, ffn_j) = draft.genes[i], draft.genes[j]
    return draft.with_gene(i, (second, ffn_i)).with_gene(j, (first, ffn_j))


def _move(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """One layer moves to another height; a layer of the rarest mixer kind half of the time."""
    genes = list(draft.genes)
    index = _position(draft, rng)
    if rng.random() < 0.5:
        kinds = [mixer.kind for mixer, _ in genes]
        rare = [i for i, kind in enumerate(kinds) if kinds.count(kind) == min(map(kinds.count, kinds))]
        index = rare[int(rng.integers(len(rare)))]
    gene = genes.pop(index)
    genes.insert(int(rng.integers(len(genes) + 1)), gene)
    return replace(draft, genes=tuple(genes))


def _insert(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """One layer more: a copy of a neighbour, or a random one."""
    index = _position(draft, rng)
    gene = draft.genes[index] if rng.random() < 0.5 else sampler.gene(draft.frame, rng)
    return replace(draft, depth=draft.depth + 1, genes=(*draft.genes[:index], gene, *draft.genes[index:]))


def _remove(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """One layer less."""
    index = _position(draft, rng)
    genes = draft.genes[:index] + draft.genes[index + 1 :]
    return replace(draft, depth=draft.depth - 1, genes=genes) if genes else None


def _frame(draft: Draft, sampler: Sampler, rng: Rng) -> Draft | None:
    """One model-wide choice: width, kernel, experts, kind of feed-forward."""
    axes = sampler.frames.axes
    open_axes = [index for index, axis in enumerate(axes) if len(axis) > 1]
    if not open_axes:
        return None
    picks = sampler.frames.picks(draft.frame)
    axis = open_axes[int(rng.integers(len(open_axes)))]
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
"""Name -> edit; each is tried as often as the others."""
