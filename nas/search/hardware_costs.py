"""What a layout makes a device do, by arithmetic: the terms that costs are attributed to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nas.core.block import BLOCKS
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.search.gp import Array

TERMS = ("once", "layers", "table", "held", "cache", "state", "read", "prompt", "decode", "widest")
"""Of a whole layout: 1; layers; weights of the embedding; all weights of blocks; bytes of cache; bytes of state;
weights that a token passes through; work on tokens seen, without weights, while the prompt is read and while tokens are
decoded; and the most that one block has of weights per number of its input, which is what buffers are made for."""
_NOT_OF = {"MB": ("read", "prompt", "decode"), "ms": ("widest",)}
"""Unit of a figure -> what it does not depend on: memory on no work, time on no buffers."""
_OWN = ("layers", "read", "held", "decode", "cache", "state")
"""Of each kind of block by itself."""


class Costs:
    """Layouts as amounts of work and memory under one workload.

    Args:
        workload: what is run: says how many tokens are seen, and how long the cache is.
        kinds: of blocks that are told apart; others count with the whole only.
        unit: of the figure, which says what it may depend on.
    """

    def __init__(self, workload: Workload, kinds: Sequence[str], unit: str = "") -> None:
        self._used = [index for index, term in enumerate(TERMS) if term not in _NOT_OF.get(unit, ())]
        self._workload, self._kinds = workload, tuple(dict.fromkeys(kinds))
        self._seen: dict[str, tuple[Array, Array]] = {}

    def terms(self, layouts: Sequence[Layout]) -> Array:
        """[L, <= len(TERMS)] amounts of the terms that the figure may depend on."""
        return np.array([self._amounts(layout)[0] for layout in layouts])[:, self._used]

    def tracks(self, layouts: Sequence[Layout]) -> Array:
        """[L, T] amounts of each kind of block, and the sums of its arguments."""
        return np.array([self._amounts(layout)[1] for layout in layouts])

    def _amounts(self, layout: Layout) -> tuple[Array, Array]:
        if layout.id not in self._seen:
            self._seen[layout.id] = self._count(layout)
        return self._seen[layout.id]

    def _count(self, layout: Layout) -> tuple[Array, Array]:
        d_model, workload = layout.d_model, self._workload
        own = {kind: np.zeros(len(_OWN)) for kind in self._kinds}
        whole, widest = np.zeros(len(TERMS)), 0.0
        for index in range(layout.depth):
            for block in layout.own(index).blocks:
                spec, count = block.spec, block.spec.count(block, d_model)
                prompt, decode = (
                    spec.flops(block, d_model, seen) - 2.0 * count.active
                    for seen in (workload.prompt // 2, workload.prompt + workload.gen // 2)
                )
                cache = spec.kv_bytes(block, d_model, workload.window, 2.0)
                state = spec.state_bytes(block, d_model)
                if block.kind in own:
                    own[block.kind] += np.array([1.0, count.active, count.total, decode, cache, state])
                widest = max(widest, count.active / d_model)
                whole[3:-1] += np.array([count.total, cache, state, count.active, prompt, decode])
        whole[:3], whole[-1] = (1.0, layout.depth, d_model * layout.vocab), widest
        return whole, np.concatenate([*own.values(), self._arguments(layout)])

    def _arguments(self, layout: Layout) -> Array:
        """Sums of every argument of every kind, so that two sizes of one kind may differ by more than their work."""
        names = [(kind, arg.name) for kind in self._kinds for arg in BLOCKS[kind].args]
        sums = dict.fromkeys(names, 0.0)
        for index in range(layout.depth):
            for block in (each.resolve(layout.d_model) for each in layout.own(index).blocks):
                for arg in block.spec.args if block.kind in self._kinds else ():
                    sums[block.kind, arg.name] += float(block.get(arg.name) or 0)
        return np.array(list(sums.values()))
