"""Seed layouts, tried before any measurement: local mixers with evenly spaced global ones.

A mixer is global if its cache grows with the context, so new kinds of blocks need no change here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from nas.core.layout import Layout
from nas.core.model_choices import Frame, Half
from nas.search.proposers.editable_layout import Draft, distance, layer_kinds
from nas.search.proposers.sampling import Rng, Sampler

Pair = tuple[str, str]
"""Choices of local and of global mixers."""

_SHARES = (1 / 3, 1 / 5, 1 / 2, 1 / 10, 2 / 3)
"""Shares of global layers. They are five, so that shares, depths and feed-forward kinds occur in all combinations."""
_ROUNDS = 20
"""Rounds over all pairs of mixers per wanted layout; also frames drawn to find a suitable one."""
_TRIES = 8
"""Random widths tried per combination of kinds, share and depth."""


def seed_layouts(sampler: Sampler, count: int) -> list[Layout]:
    """Returns up to `count` distinct layouts of the space, always the same: its references, then spaced hybrids.

    In a space that lists its layouts, layouts that differ most from each other follow the references.
    """
    layouts: dict[str, Layout] = {}
    further = _spaced(sampler, count) if sampler.listed is None else iter(sampler.listed.spread(count))
    for layout in itertools.chain(_references(sampler), further):
        if len(layouts) == count:
            break
        layouts.setdefault(layout.id, layout)
    return list(layouts.values())


def _references(sampler: Sampler) -> Iterator[Layout]:
    for reference in sampler.space.references.layouts().values():
        layout = sampler.space.variants(reference)[0]
        if not sampler.contains(layout):
            yield layout


def _spaced(sampler: Sampler, count: int) -> Iterator[Layout]:
    """Yields hybrids that meet the budget as they are, then those that meet it after a few edits."""
    for repaired in (False, True):
        rng = np.random.default_rng(0)
        pairs = _pairs(sampler, rng)
        for index in range(_ROUNDS * count if pairs else 0):
            turn, which = divmod(index, len(pairs))
            layouts = (_layout(sampler, pairs[which], turn, rng, repaired) for _ in range(_TRIES))
            yield from itertools.islice(filter(None, layouts), 1)


def _layout(sampler: Sampler, pair: Pair, turn: int, rng: Rng, repaired: bool) -> Layout | None:
    """Returns the hybrid of this turn with random widths; None where these do not meet the budget."""
    frame = _frame(sampler, turn, rng)
    draft = _hybrid(sampler, frame, pair, turn, rng) if frame else None
    if draft is None or not (repaired or distance(draft, sampler.space) == 0):
        return None
    return sampler.settle(draft, rng)


def _hybrid(sampler: Sampler, frame: Frame, pair: Pair, turn: int, rng: Rng) -> Draft | None:
    """Returns a stack of a local mixer with evenly spaced global ones; None where the frame lacks one of them.

    Mixers that the space requires besides the pair take the place of the highest global ones, if these are more.
    """
    mixers, ffn = layer_kinds(sampler.frames, frame)
    if not ffn or not set(pair) <= set(mixers):
        return None
    depths = sampler.depths(frame)
    depth = (depths[len(depths) // 2], depths[-1], depths[0])[turn % 3]
    length = min(frame.period, depth) or depth
    feed = sampler.half(frame, ffn[turn % len(ffn)], rng)
    below, above = ((sampler.half(frame, kind, rng), feed) for kind in pair)
    draft = Draft(frame, depth, (below,) * length, sampler.lead(frame, (), rng))
    count = max(1, round(_SHARES[turn % len(_SHARES)] * length))
    required = [
        kind for kind, limit in sampler.space.limits.items() if kind in {*mixers} - {*pair} for _ in range(limit.min)
    ]
    genes = [above] * count
    if required and len(required) < count:
        genes[-len(required) :] = [(sampler.half(frame, kind, rng), feed) for kind in required]
    for number, gene in enumerate(genes):
        draft = draft.with_gene((2 * number + 1) * length // (2 * count), gene)
    return draft


def _frame(sampler: Sampler, turn: int, rng: Rng) -> Frame | None:
    """Returns a random frame that can meet the budget with the feed-forward kind of this turn."""
    kinds = [block.kind for block in sampler.space.ffn]
    for _ in range(_ROUNDS):
        frame = sampler.random_frame(rng)
        if frame.ffn in (None, kinds[turn % len(kinds)]):
            return frame
    return None


def _pairs(sampler: Sampler, rng: Rng) -> list[Pair]:
    """Returns each local mixer with each global one; each with itself where the space has only one of both sorts.

    Pairs vary fastest, so that a few seeds already have every mixer.
    """
    local: list[str] = []
    wide: list[str] = []
    for choice in sampler.space.mixer_choices:
        frames = (sampler.random_frame(rng) for _ in range(_ROUNDS))
        halves = ((frame, half) for frame in frames for half in sampler.frames.halves(frame, choice))
        if pair := next(halves, None):
            (wide if is_global(*pair) else local).append(choice)
    return list(itertools.product(local, wide)) or [(kind, kind) for kind in local + wide]


def is_global(frame: Frame, mixers: Half) -> bool:
    """Returns whether the cache of mixers grows with the context."""

    def cache(context: int) -> float:
        return sum(mixer.spec.kv_bytes(mixer, frame.d_model, context, 2.0) for mixer in mixers)

    return cache(1 << 17) > cache(1 << 16)
