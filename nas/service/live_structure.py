"""What the layouts of a study's trials say by themselves: sizes of each, and where which block stands in all of them.

A layout never changes, and trials are numbered without gaps: what has been read is never read again. Reading takes
long in a large study, so it has a lock of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from nas.core.block import BLOCKS
from nas.core.layout import Layout
from nas.service.live_axes import KV_BYTES, PARAMS_ACTIVE, PARAMS_TOTAL
from nas.store import columns
from nas.store.store import Store

TENTHS = 10
"""Parts of the depth that shares of blocks are told for."""
NONE = "none"
"""Stands for a layer without a mixer, or without a feed-forward."""

_TRIALS_PER_READ = 1000

Floats = NDArray[np.float64]


class ShareView(BaseModel):
    """How large a part of each tenth of the depth, input first, a kind of block has."""

    role: str
    kind: str
    all: list[float]
    front: list[float] | None
    """None while nothing is on the front."""


class BlockCounts:
    """The layers of layouts by kind of block and tenth of the depth; every layout weighs the same."""

    def __init__(self) -> None:
        self.layouts = 0
        self._sums: dict[tuple[str, str], Floats] = {}

    def add(self, layout: Layout) -> None:
        """Takes one more layout. Mixers side by side share their layer's weight."""
        self.layouts += 1
        parts = _tenths(layout.depth)
        for index in range(layout.depth):
            layer = layout.own(index)
            mixers = [block.kind for block in layer.mixers] or [NONE]
            for role, kinds in (("mixer", mixers), ("ffn", [layer.ffn.kind if layer.ffn else NONE])):
                for kind in kinds:
                    held = self._sums.setdefault((role, kind), np.zeros(TENTHS))
                    held += parts[index] / len(kinds)

    def shares(self) -> Mapping[tuple[str, str], list[float]]:
        """(role, kind) -> share of each tenth; those of one role sum up to 1."""
        return {key: np.round(held / self.layouts, 4).tolist() for key, held in self._sums.items()}


class LiveStructure:
    """Sizes of all trials' layouts, about 24 bytes a trial; read as far as somebody asked for.

    Args:
        store: where the study is.
        study: its id.
        context: tokens that key-value caches are told for.
        check: called between pieces; what it raises ends the reading.
    """

    def __init__(self, store: Store, study: int, context: int, check: Callable[[], None]) -> None:
        self._store, self._study, self._context, self._check = store, study, context, check
        self._lock = threading.Lock()
        self._sizes = np.zeros((0, 3))
        self.known = 0
        """Trials that have been read: those numbered below."""
        self.blocks = BlockCounts()
        """Of all trials that have been read, references not counted."""

    def column(self, key: str, trials: int) -> Floats:
        """[trials] a size of each of the first so many trials; `key` is one of `live_axes.STRUCTURE`."""
        self.read(trials)
        return np.asarray(self._sizes[:trials, (PARAMS_TOTAL, PARAMS_ACTIVE, KV_BYTES).index(key)])

    def read(self, trials: int) -> None:
        """Makes sure that so many trials are known."""
        with self._lock:
            self._make_room(trials)
            for start in range(self.known, trials, _TRIALS_PER_READ):
                self._check()
                some = range(start, min(trials, start + _TRIALS_PER_READ))
                for row in columns.layouts(self._store, self._study, some):
                    self._take(row.number, Layout.from_json(row.layout), own=row.origin != "reference")
                self.known = some.stop

    def _take(self, number: int, layout: Layout, *, own: bool) -> None:
        params = layout.params
        self._sizes[number] = params.total, params.active, layout.kv_bytes(self._context)
        if own:
            self.blocks.add(layout)

    def _make_room(self, trials: int) -> None:
        if trials > len(self._sizes):
            larger = np.zeros((max(trials, 2 * len(self._sizes)), 3))
            larger[: self.known] = self._sizes[: self.known]
            self._sizes = larger


def share_views(everything: BlockCounts, front: Iterable[Layout]) -> list[ShareView]:
    """Shares of all kinds of blocks, mixers first, in the order in which `nas.core.block.BLOCKS` has them."""
    chosen = BlockCounts()
    for layout in front:
        chosen.add(layout)
    if not everything.layouts:
        return []
    whole, part = everything.shares(), chosen.shares() if chosen.layouts else None
    order = [*BLOCKS, NONE]
    keys = sorted(whole, key=lambda key: (key[0] != "mixer", order.index(key[1])))
    nothing = [0.0] * TENTHS
    return [
        ShareView(role=key[0], kind=key[1], all=whole[key], front=None if part is None else part.get(key, nothing))
        for key in keys
    ]


@lru_cache(maxsize=1024)
def _tenths(depth: int) -> Sequence[Floats]:
    """For each layer how much of each tenth of the depth it fills: of two layers, each fills five."""
    edges = np.linspace(0, TENTHS, depth + 1)
    lower = np.arange(TENTHS)
    return [np.clip(np.minimum(edges[i + 1], lower + 1) - np.maximum(edges[i], lower), 0, 1) for i in range(depth)]
