"""Layouts as vectors for the surrogate, computed from their structure for any kinds of blocks."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from nas.core.block import Block
from nas.core.block_space import EXPANSION, Choice
from nas.core.layout import Layer, Layout
from nas.core.space import SearchSpace
from nas.core.tower import Tower
from nas.search.proposers.gp import Array

GROUPS = ("sizes", "values", "heights", "neighbours", "pairs")
"""Groups of features; a surrogate learns how much each of them matters."""
STRING_GROUPS = ("places", "steps", "triples")
"""Further groups, of a layout as a string of layers."""
BYTES_PER_WEIGHT = 0.5625
"""Of Q4_0: 18 bytes per block of 32. Only a scale that puts weights and cache on one axis."""
_MOST_KEPT = 20_000
"""Layouts whose values are cached at most."""
_MOST_VALUES = 8
"""An argument with at most this many choices has a feature per choice: its effect need not follow its size."""
_HEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""At which kinds and values are counted, as shares of the stack."""
_BLUR = 0.12
"""Standard deviation of the window around each height, as a share of the stack."""
_PAIRS = 64
"""Columns that pairs of neighbouring mixers, arguments included, are hashed into (Weinberger et al. 2009)."""
_FINE_HEIGHTS = tuple((index + 0.5) / 10 for index in range(10))
"""Finer heights, for the string groups."""
_FINE_BLUR = 0.06
"""Standard deviation of the window around each of them, as a share of the stack."""
_TRIPLES = 128
"""Columns that triples of neighbouring mixers, arguments included, are hashed into."""


class Features:
    """Layouts of one space as vectors.

    Features are: logarithms of sizes, caches and work, since devices respond to ratios; how often each value is chosen;
    the presence of each kind of block and the values of each varying argument, by height; which kinds of mixers are
    neighbours; and which mixers are, arguments included.

    Args:
        space: gives the kinds, their varying arguments, and the contexts at which work is counted.
        strings: whether to add `STRING_GROUPS`: kinds of blocks at ten heights, pairs of kinds of neighbouring mixers
            by height, and triples of mixers, arguments included.
    """

    def __init__(self, space: SearchSpace, *, strings: bool = False) -> None:
        self._strings = strings
        self._mixers = [block.kind for block in space.mixers]
        self._kinds = [block.kind for block in space.mixers + space.ffn]
        self._arguments = [
            (block.kind, "width" if name == EXPANSION else name)
            for block in space.mixers + space.ffn
            for name, knob in block.knobs.items()
            if len(knob.choices) > 1
        ]
        self._tracks = len(self._kinds) + len(self._arguments)
        self._values = [
            (block.kind, name, choice)
            for block in space.mixers + space.ffn
            for name, knob in block.knobs.items()
            if name != EXPANSION and 1 < len(knob.choices) <= _MOST_VALUES
            for choice in knob.choices
        ]
        self._quantisations = space.quantisations
        self._vectors = len(space.model.vectors.choices) > 1
        self._choices = space.model.tower.choices
        self._towers = len(self._choices) > 1
        self._media = [workload for workload in space.workloads.values() if workload.media]
        self._contexts = sorted({workload.window for workload in space.workloads.values()})
        self._cache: dict[str, Array] = {}
        self._track = lru_cache(maxsize=1 << 14)(self._draw_track)
        named = list(self._named())
        self.names = [name for _, name in named]
        order = GROUPS + STRING_GROUPS
        self.groups = np.array([order.index(group) for group, _ in named])
        """[len(names)] index into `GROUPS + STRING_GROUPS`."""

    def vector(self, layout: Layout) -> Array:
        """Returns [len(names)] features of one layout; cached."""
        if (vector := self._cache.get(layout.id)) is None:
            if len(self._cache) >= _MOST_KEPT:
                self._cache.clear()
            vector = self._cache[layout.id] = self._vector(layout)
        return vector

    def matrix(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L, len(names)] features, one row per layout."""
        return np.array([self.vector(layout) for layout in layouts]).reshape(-1, len(self.names))

    def spread_over(self, pool: Sequence[Layout], fixed: Sequence[Layout], count: int) -> list[Layout]:
        """Returns the `count` layouts of `pool` that, with those given, stand for all of it.

        Each in turn is the one that most reduces the sum over the pool of the distance to the nearest chosen one
        (Nemhauser, Wolsey and Fisher 1978, the greedy rule for facility location): typical layouts of all parts of a
        space, where the layouts farthest from each other would be its oddities.
        """
        vectors = self.matrix([*pool, *fixed])
        vectors = (vectors - vectors.mean(axis=0)) / np.maximum(vectors.std(axis=0), 1e-9)
        square = (vectors**2).sum(axis=1)
        apart = np.sqrt(np.maximum(0.0, square[:, None] + square[None] - 2 * vectors @ vectors.T))
        within, nearest = apart[: len(pool), : len(pool)], apart[: len(pool), len(pool) :].min(axis=1, initial=np.inf)
        nearest = np.minimum(nearest, within.max(initial=0.0) + 1.0)
        chosen: list[int] = []
        while len(chosen) < min(count, len(pool)):
            remaining = np.minimum(nearest[:, None], within).sum(axis=0)
            remaining[chosen] = np.inf
            chosen.append(int(remaining.argmin()))
            nearest = np.minimum(nearest, within[chosen[-1]])
        return [pool[index] for index in chosen]

    def _named(self) -> Iterator[tuple[str, str]]:
        """Yields group and name of each column, in the order of `_vector`; those of a group are side by side."""
        names = ["depth", "d_model", "vocab", "total", "active", "non_embedding", "state"]
        names += [f"{name}@{context}" for context in self._contexts for name in ("flops", "resident", "read")]
        tracks = self._kinds + [f"{kind}.{name}" for kind, name in self._arguments]
        yield from (("sizes", name) for name in (*names, *(f"{track}.mean" for track in tracks)))
        yield from (("sizes", name) for name in ("vectors",) if self._vectors)
        yield from (("sizes", f"tower.{name}") for name in self._tower_names())
        yield from (("values", f"{kind}.{name}={choice}") for kind, name, choice in self._values)
        yield from (("values", f"quantisation={name}") for name in self._quantisations)
        yield from (("heights", f"{track}@{height}") for height in _HEIGHTS for track in tracks)
        yield from (("neighbours", f"{below}>{above}") for below in self._mixers for above in self._mixers)
        yield from (("neighbours", f"{kind}.{name}") for kind in self._mixers for name in ("gap", "run"))
        yield from (("pairs", f"pair{index}") for index in range(_PAIRS))
        if self._strings:
            yield from (("places", f"{kind}@{height:.2f}") for height in _FINE_HEIGHTS for kind in self._kinds)
            pairs = [f"{below}>{above}" for below in self._mixers for above in self._mixers]
            yield from (("steps", f"{pair}@{height}") for height in _HEIGHTS for pair in pairs)
            yield from (("triples", f"triple{index}") for index in range(_TRIPLES))

    def _vector(self, layout: Layout) -> Array:
        layers = [layout.layer_at(index) for index in range(layout.depth)]
        rows = np.array([self._track(layer, layout.d_model) for layer in layers])
        ends = self._tracks, self._tracks + len(self._values)
        tracks, values, work = rows[:, : ends[0]], rows[:, ends[0] : ends[1]], rows[:, ends[1] :].sum(axis=0)
        mixers = tracks[:, : len(self._mixers)]
        steps = mixers[:-1].T @ mixers[1:] / max(1, len(layers) - 1)
        parts = (
            self._sizes(layout, work),
            tracks.mean(axis=0),
            [math.log(layout.vectors)] if self._vectors else [],
            self._tower(layout),
            values.mean(axis=0),
            [float(layout.quantisation == name) for name in self._quantisations],
            (_windows(len(layers), _HEIGHTS, _BLUR) @ tracks).ravel(),
            steps.ravel(),
            _stretches(mixers),
            _hashed(layers, 2, _PAIRS),
        )
        return np.concatenate([*parts, *self._string_parts(layers, tracks[:, : len(self._kinds)])])

    def _string_parts(self, layers: Sequence[Layer], present: Array) -> Iterator[Array]:
        """Yields the string groups of a layout with [L, K] marks of kinds."""
        if not self._strings:
            return
        yield (_windows(len(layers), _FINE_HEIGHTS, _FINE_BLUR) @ present).ravel()
        mixers = present[:, : len(self._mixers)]
        steps = (mixers[:-1, :, None] * mixers[1:, None, :]).reshape(len(layers) - 1, len(self._mixers) ** 2)
        yield (_windows(len(steps), _HEIGHTS, _BLUR) @ steps).ravel()
        yield _hashed(layers, 3, _TRIPLES)

    def _tower_names(self) -> list[str]:
        if not self._towers:
            return []
        names = [*Tower.parse(self._choices[0]).sizes, "weights"]
        return names + [f"{name}@{number}" for number in range(len(self._media)) for name in ("tokens", "flops")]

    def _tower(self, layout: Layout) -> list[float]:
        """Returns logarithms of a tower's sizes, and of its tokens and work in each workload with images or sounds."""
        if not self._towers:
            return []
        tower = layout.tower
        assert tower is not None, "layouts of spaces of vision or audio have a tower"
        sizes: list[float] = [*tower.sizes.values(), tower.weights(layout.d_model)]
        for workload in self._media:
            sizes += [workload.tower_tokens(tower), workload.tower_flops(tower, layout.d_model)]
        return [math.log(size) for size in sizes]

    def _sizes(self, layout: Layout, work: Array) -> list[float]:
        counts = layout.params
        sizes = [layout.depth, layout.d_model, layout.vocab, counts.total, counts.active, counts.non_embedding]
        features = [math.log(size) for size in sizes] + [math.log1p(work[0])]
        head = 2.0 * layout.d_model * layout.vocab
        for flops, cache in zip(work[1::2], work[2::2], strict=True):
            held, read = BYTES_PER_WEIGHT * counts.total + cache, BYTES_PER_WEIGHT * counts.active + cache
            features += [math.log(flops + head), math.log(held), math.log(read)]
        return features

    def _draw_track(self, layer: Layer, d_model: int) -> tuple[float, ...]:
        """Returns the features of one layer.

        These are: the presence of each kind, the logarithm of each varying argument (0 without), the presence of each
        value, bytes of state, and at each context work and bytes of cache.
        """
        arguments = {block.kind: block.resolve(d_model) for block in layer.blocks}
        present = [float(kind in arguments) for kind in self._kinds]
        values = [arguments[kind].get(name) if kind in arguments else 0 for kind, name in self._arguments]
        chosen = [
            float(kind in arguments and _has(arguments[kind], name, choice)) for kind, name, choice in self._values
        ]
        work = [sum(block.spec.state_bytes(block, d_model) for block in layer.blocks)]
        for context in self._contexts:
            work.append(sum(block.spec.flops(block, d_model, context) for block in layer.blocks))
            work.append(sum(block.spec.kv_bytes(block, d_model, context, 2.0) for block in layer.blocks))
        return (*present, *(math.log1p(float(value or 0)) for value in values), *chosen, *work)


def _has(block: Block, name: str, choice: Choice) -> bool:
    """Returns whether an argument has a value, or that of the argument which `choice` names."""
    return block.get(name) == (block.get(choice) if isinstance(choice, str) else choice)


@lru_cache
def _windows(depth: int, heights: tuple[float, ...], blur: float) -> Array:
    """Returns [len(heights), depth] weights of the layers around each height; each row sums to 1."""
    centres = (np.arange(depth) + 0.5) / depth
    weights = np.exp(-0.5 * ((centres - np.array(heights)[:, None]) / blur) ** 2)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _stretches(present: Array) -> list[float]:
    """Returns for each column of [L, K] marks the longest run of layers without, and with, as shares of the stack."""
    shares = []
    for marks in present.T.tolist():
        runs = [(mark, sum(1 for _ in run)) for mark, run in itertools.groupby(marks)]
        shares += [max((size for mark, size in runs if mark == value), default=0) / len(marks) for value in (0, 1)]
    return shares


def _hashed(layers: Sequence[Layer], length: int, size: int) -> Array:
    """Returns [size] signed counts of so many mixers in a row, by the hash of all."""
    counts = np.zeros(size)
    for start in range(len(layers) - length + 1):
        column, sign = _column(size, *(layer.mixers for layer in layers[start : start + length]))
        counts[column] += sign
    return counts


@lru_cache(maxsize=1 << 17)
def _column(size: int, *mixers: tuple[Block, ...]) -> tuple[int, float]:
    code = zlib.crc32(">".join(" ".join(block.format() for block in layer) for layer in mixers).encode())
    return code % size, 1.0 if code >> 16 & 1 else -1.0
