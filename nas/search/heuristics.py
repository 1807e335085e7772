"""Layouts worth trying before anything has been measured: local mixers with evenly spaced global ones.

Which mixers are global follows from their arithmetic (a cache that grows with the context), so a new kind of block
takes part without a line here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from nas.core.frame import Frame
from nas.core.layout import Layout
from nas.search.draft import Draft, distance, layer_kinds
from nas.search.sampling import Rng, Sampler

_SHARES = (1 / 3, 1 / 5, 1 / 2, 1 / 10, 2 / 3)
"""Of global layers. Five of them, so that shares, depths and kinds of feed-forward meet in every combination."""
_ROUNDS = 20


def seed_layouts(sampler: Sampler, count: int) -> list[Layout]:
    """Up to `count` distinct layouts of the space, the same each time: its references, then spaced hybrids."""
    found: dict[str, Layout] = {}
    for layout in itertools.chain(_references(sampler), _spaced(sampler, count)):
        if len(found) == count:
            break
        found.setdefault(layout.id, layout)
    return list(found.values())


def _references(sampler: Sampler) -> Iterator[Layout]:
    for layout in sampler.space.references.layouts().values():
        if not sampler.contains(layout):
            yield layout


def _spaced(sampler: Sampler, count: int) -> Iterator[Layout]:
    """Hybrids that meet the budget as they are; where limits allow none, those that a few edits bring inside."""
    for repaired in (False, True):
        rng = np.random.default_rng(0)
        for index in range(_ROUNDS * count):
            frame = _frame(sampler, index, rng)
            draft = _hybrid(sampler, frame, index, rng) if frame else None
            if draft is not None and (repaired or distance(draft, sampler.space) == 0):
                layout = sampler.settle(draft, rng)
                if layout is not None:
                    yield layout


def _frame(sampler: Sampler, index: int, rng: Rng) -> Frame | None:
    """A random frame that can meet the budget with the feed-forward kind whose turn it is."""
    kinds = [block.kind for block in sampler.space.ffn]
    for _ in range(_ROUNDS):
        frame = sampler.random_frame(rng)
        if frame.ffn in (None, kinds[index % len(kinds)]):
            return frame
    return None


def _hybrid(sampler: Sampler, frame: Frame, index: int, rng: Rng) -> Draft:
    """A stack of one local mixer with one global mixer at even distances."""
    mixers, ffn = layer_kinds(sampler.frames, frame)
    wide = [kind for kind in mixers if is_global(sampler, frame, kind)]
    local = [kind for kind in mixers if kind not in wide]
    depths = sampler.depths(frame)
    depth = (depths[len(depths) // 2], depths[-1], depths[0])[index % 3]
    length = min(frame.period, depth) or depth
    base = sampler.block(frame, (local or wide)[index % len(local or wide)], rng)
    ahead = sampler.block(frame, (wide or local)[index % len(wide or local)], rng)
    feed = sampler.block(frame, ffn[index % len(ffn)], rng)
    draft = Draft(frame, depth, ((base, feed),) * length, sampler.lead(frame, (), rng))
    count = max(1, round(_SHARES[index % len(_SHARES)] * length))
    for number in range(count):
        draft = draft.with_gene((2 * number + 1) * length // (2 * count), (ahead, feed))
    return draft


def is_global(sampler: Sampler, frame: Frame, kind: str) -> bool:
    """Whether a mixer's cache grows with the context."""
    block = sampler.frames.blocks(frame, kind)[0]
    near, far = (block.spec.kv_bytes(block, frame.d_model, context, 2.0) for context in (1 << 16, 1 << 17))
    return far > near
