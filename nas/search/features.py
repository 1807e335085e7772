"""What a surrogate sees of a layout: numbers that follow from its structure, whatever kinds of block it is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nas.core.block import Block
from nas.core.layout import Layer, Layout
from nas.core.space import SearchSpace

BYTES_PER_WEIGHT = 0.5625
"""Of Q4_0: 18 bytes a block of 32. Only a scale that puts weights and cache on one axis."""


class Features:
    """Layouts of one space as vectors.

    Counts and positions are given per block kind of the space; sizes, caches and work on logarithms, since devices
    respond to ratios.

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
        self.names = [name for name, _ in self._named(next(iter(space.references.layouts().values())))]

    def vector(self, layout: Layout) -> NDArray[np.float64]:
        """[len(names)] features of one layout."""
        return np.array([value for _, value in self._named(layout)])

    def matrix(self, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        """[L, len(names)] features, one row a layout."""
        return np.array([self.vector(layout) for layout in layouts]).reshape(-1, len(self.names))

    def _named(self, layout: Layout) -> Iterator[tuple[str, float]]:
        layers = [layout.own(index) for index in range(layout.depth)]
        yield from self._sizes(layout)
        for kind in self._mixers:
            yield from _placement(kind, layers)
        yield from _neighbours(self._mixers, layers)
        for kind in self._ffn:
            yield (
                f"{kind}.share",
                sum(layer.ffn is not None and layer.ffn.kind == kind for layer in layers) / len(layers),
            )
        for kind, name in self._arguments:
            yield f"{kind}.{name}", _mean_log(kind, name, layers, layout.d_model)

    def _sizes(self, layout: Layout) -> Iterator[tuple[str, float]]:
        yield "depth", layout.depth
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


def _placement(kind: str, layers: Sequence[Layer]) -> Iterator[tuple[str, float]]:
    """How often a kind of mixer stands in the stack, and where."""
    depth = len(layers)
    at = [index for index, layer in enumerate(layers) if any(block.kind == kind for block in layer.mixers)]
    ends = [-1, *at, depth]
    yield f"{kind}.share", len(at) / depth
    yield f"{kind}.log_count", math.log1p(len(at))
    yield f"{kind}.first", (at[0] if at else depth) / depth
    yield f"{kind}.last", (at[-1] + 1 if at else 0) / depth
    yield f"{kind}.gap", (max(b - a for a, b in itertools.pairwise(ends)) - 1) / depth
    for third in range(3):
        yield f"{kind}.third{third}", sum(3 * index // depth == third for index in at) / depth


def _neighbours(kinds: Sequence[str], layers: Sequence[Layer]) -> Iterator[tuple[str, float]]:
    """How often one kind of mixer stands right below another."""
    found = [{block.kind for block in layer.mixers} for layer in layers]
    pairs = list(itertools.pairwise(found))
    for below, above in itertools.product(kinds, kinds):
        count = sum(below in a and above in b for a, b in pairs)
        yield f"{below}>{above}", count / max(1, len(pairs))


def _mean_log(kind: str, name: str, layers: Sequence[Layer], d_model: int) -> float:
    """The argument's mean over the stack, on logarithms; 0 where the kind is absent."""
    values = [_log(block, name, d_model) for layer in layers for block in layer.blocks if block.kind == kind]
    return sum(values) / len(values) if values else 0.0


def _log(block: Block, name: str, d_model: int) -> float:
    return math.log1p(float(block.resolve(d_model).get(name) or 0))
