"""What a surrogate sees of a layout: numbers that follow from its structure, whatever kinds of block it is made of."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nas.core.block import Block
from nas.core.layout import Layer, Layout
from nas.core.space import SearchSpace

GROUPS = ("sizes", "heights", "neighbours", "pairs")
"""Sorts of features; a surrogate learns how much each of them matters."""
BYTES_PER_WEIGHT = 0.5625
"""Of Q4_0: 18 bytes a block of 32. Only a scale that puts weights and cache on one axis."""
_HEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)
_BLUR = 0.12
"""Standard deviation of the window around each height, as a share of the stack."""
_PAIRS = 64
"""Columns that pairs of neighbouring mixers, arguments included, are hashed into (Weinberger et al. 2009)."""


class Features:
    """Layouts of one space as vectors.

    Sizes, caches and work on logarithms, since devices respond to ratios; what stands at which height, for each kind of
    block and each argument that varies; which kinds of mixers are neighbours; and which mixers are, arguments included.

    Args:
        space: says which kinds, which of their arguments vary, and at which contexts work is counted.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._mixers = [block.kind for block in space.mixers]
        self._ffn = [block.kind for block in space.ffn]
        self._arguments = [
            (block.kind, "width" if name == "expansion" else name)
            for block in space.mixers + space.ffn
            for name, knob in block.knobs.items()
            if len(knob.choices) > 1
        ]
        self._contexts = sorted({workload.window for workload in space.workloads.values()})
        self._seen: dict[str, NDArray[np.float64]] = {}
        named = list(self._named(next(iter(space.references.layouts().values()))))
        self.names = [name for _, name, _ in named]
        self.groups = np.array([GROUPS.index(group) for group, _, _ in named])
        """[len(names)] index into `GROUPS`."""

    def vector(self, layout: Layout) -> NDArray[np.float64]:
        """[len(names)] features of one layout; remembered."""
        if layout.id not in self._seen:
            self._seen[layout.id] = np.array([value for _, _, value in self._named(layout)])
        return self._seen[layout.id]

    def matrix(self, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        """[L, len(names)] features, one row a layout."""
        return np.array([self.vector(layout) for layout in layouts]).reshape(-1, len(self.names))

    def _named(self, layout: Layout) -> Iterator[tuple[str, str, float]]:
        layers = [layout.own(index) for index in range(layout.depth)]
        yield from (("sizes", name, value) for name, value in self._sizes(layout))
        windows = _windows(len(layers))
        for name, values in self._tracks(layers, layout.d_model):
            yield "sizes", f"{name}.mean", sum(values) / len(values)
            for height, value in zip(_HEIGHTS, windows @ values, strict=True):
                yield "heights", f"{name}@{height}", float(value)
        yield from (("neighbours", name, value) for name, value in self._neighbours(layers))
        yield from (("pairs", f"pair{index}", value) for index, value in enumerate(_hashed_pairs(layers)))

    def _sizes(self, layout: Layout) -> Iterator[tuple[str, float]]:
        yield "depth", math.log(layout.depth)
        yield "d_model", math.log(layout.d_model)
        yield "vocab", math.log(layout.vocab)
        yield "total", math.log(layout.params.total)
        yield "active", math.log(layout.params.active)
        yield "non_embedding", math.log(layout.params.non_embedding)
        yield "state", math.log1p(layout.state_bytes())
        for context in self._contexts:
            cache = layout.kv_bytes(context)
            yield f"flops@{context}", math.log(layout.flops(context))
            yield f"resident@{context}", math.log(BYTES_PER_WEIGHT * layout.params.total + cache)
            yield f"read@{context}", math.log(BYTES_PER_WEIGHT * layout.params.active + cache)

    def _tracks(self, layers: Sequence[Layer], d_model: int) -> Iterator[tuple[str, list[float]]]:
        """One value a layer: whether a kind stands there, and the logarithm of each of its arguments that varies."""
        for kind in self._mixers:
            yield kind, [float(any(block.kind == kind for block in layer.mixers)) for layer in layers]
        for kind in self._ffn:
            yield kind, [float(layer.ffn is not None and layer.ffn.kind == kind) for layer in layers]
        for kind, name in self._arguments:
            found = (next((block for block in layer.blocks if block.kind == kind), None) for layer in layers)
            yield f"{kind}.{name}", [0.0 if block is None else _log(block, name, d_model) for block in found]

    def _neighbours(self, layers: Sequence[Layer]) -> Iterator[tuple[str, float]]:
        """How often one kind of mixer stands right below another, and the longest stretch without each kind."""
        found = [{block.kind for block in layer.mixers} for layer in layers]
        steps = list(itertools.pairwise(found))
        for below, above in itertools.product(self._mixers, self._mixers):
            yield f"{below}>{above}", sum(below in a and above in b for a, b in steps) / max(1, len(steps))
        for kind in self._mixers:
            ends = [-1, *(index for index, kinds in enumerate(found) if kind in kinds), len(found)]
            yield f"{kind}.gap", (max(b - a for a, b in itertools.pairwise(ends)) - 1) / len(found)
            runs = (sum(1 for _ in run) for present, run in itertools.groupby(kind in kinds for kinds in found) if present)
            yield f"{kind}.run", max(runs, default=0) / len(found)


@lru_cache
def _windows(depth: int) -> NDArray[np.float64]:
    """[len(_HEIGHTS), depth] weights of the layers around each height, each row sums to 1."""
    places = (np.arange(depth) + 0.5) / depth
    weights = np.exp(-0.5 * ((places - np.array(_HEIGHTS)[:, None]) / _BLUR) ** 2)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _hashed_pairs(layers: Sequence[Layer]) -> list[float]:
    counts = [0.0] * _PAIRS
    words = [" ".join(block.format() for block in layer.mixers) for layer in layers]
    for below, above in itertools.pairwise(words):
        code = zlib.crc32(f"{below}>{above}".encode())
        counts[code % _PAIRS] += 1.0 if code >> 16 & 1 else -1.0
    return counts


@lru_cache(maxsize=1 << 14)
def _log(block: Block, name: str, d_model: int) -> float:
    return math.log1p(float(block.resolve(d_model).get(name) or 0))
