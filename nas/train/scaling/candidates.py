"""Scales a parent's pattern to another size: candidate layouts of several shapes with the size's number of weights.

A shape is a width, a depth, what attention keeps, and for a mixture of experts their number. The feed-forward's width
is solved for, so that the candidates of a size have about equal weights and differ in shape. Within the bounds below,
the loss of transformers of equal weights hardly depends on the shape (Kaplan et al. 2020, section 3.1 and Figure 5); no
candidate is outside them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from nas.core.block import Block, Caches, Scalar
from nas.core.errors import InvalidInput
from nas.core.layout import MAX_DEPTH, MAX_WIDTH, Layer, Layout, Params
from nas.core.units import parse_count, show_count
from nas.model.blocks.attention import AttentionKind

TOLERANCE = 0.08
"""Share by which all weights may differ from the named size: LFM2-700M has 742M weights, LFM2-8B-A1B 8.34B."""
MAX_ASPECT = 2.0
"""Factor by which d_model / depth may differ from the parent's; over a factor of 40 losses differed by 3 %."""
FFN_RATIO = (0.75, 4 / 3)
"""Feed-forward width / d_model, as multiples of the parent's; LFM2's own sizes have 0.78 to 1.17 of LFM2-350M's."""
EMBEDDING_SHARE = 0.5
"""Largest share of the weights that embedding and output tables may have; LFM2-350M's has 19 %."""
MAX_LAYERS = min(MAX_DEPTH, 512)
STEP = 256
"""Large widths are multiples of it: K quants have blocks of 256; other widths fall back to other types."""
MAX_CANDIDATES = 64
DENSE = "swiglu"
"""Feed-forward of dense layers where the parent has none: that of the experts, and of lfm2moe's first layers."""

_BLOCK = 32
"""All widths are multiples of it."""
_SPREAD = 2.0
"""Maximum factor between tried widths and the one that the size suggests."""
_WIDE_SPREAD = 6.0
"""The same for error messages: it finds the nearest shape if the tables are too large for every width of `_SPREAD`."""
_MAX_EXPERTS = 1024
"""Most experts that are tried."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?[MB])(?:-A(\d+(?:\.\d+)?)([MB]))?")


@dataclass(frozen=True, slots=True)
class Size:
    """A size of a family: '350M', '1.2B', or '8B-A1B' for 8B weights of which one token uses 1B.

    Args:
        name: as requested.
        total: goal of the number of weights.
        active: least and most weights that one token uses; None: the size is dense.
    """

    name: str
    total: int
    active: tuple[int, int] | None = None

    @property
    def active_goal(self) -> int:
        """Goal of the weights that one token uses: the middle of the allowed range, or all."""
        return sum(self.active) // 2 if self.active else self.total

    def admits(self, params: Params) -> bool:
        """Returns whether a layout with these weights may be called this size."""
        near = abs(params.total / self.total - 1) <= TOLERANCE
        return near and (self.active is None or self.active[0] <= params.active <= self.active[1])

    def budget(self) -> str:
        """Describes the allowed weights."""
        low, high = (show_count(self.total * (1 + sign * TOLERANCE)) for sign in (-1, 1))
        active = f", {show_count(self.active[0])} to {show_count(self.active[1])} active" if self.active else ""
        return f"{low} to {high} weights{active}"


def parse_size(text: str) -> Size:
    """Parses the name of a size.

    Names truncate the active count (LFM2-8B-A1B has 1.56B active weights, Qwen3-30B-A3B 3.3B), so 'A1B'
    means 1B up to 2B and 'A1.5B' 1.5B up to 1.6B, with the tolerance of the total around the written count.

    Raises:
        InvalidInput: it is no size, or more weights are active than there are.
    """
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1][:-1]) == 0:
        raise InvalidInput(
            f"{text!r} is no size; write '350M', '1.2B', or '8B-A1B' with the active weights", where="--sizes"
        )
    total = parse_count(match[1])
    if match[2] is None:
        return Size(text, total)
    unit, digits = parse_count(f"1{match[3]}"), len(match[2].partition(".")[2])
    named = round(float(match[2]) * unit)
    if not 0 < named < total:
        raise InvalidInput(
            f"{text!r}: {show_count(named)} active of {show_count(total)} weights; a mixture of experts needs active "
            "weights, and fewer than it has in total",
            where="--sizes",
        )
    last = unit / 10**digits
    return Size(text, total, (round(named * (1 - TOLERANCE)), round(max(named * (1 + TOLERANCE), named + last))))


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Parses sizes separated by commas; returns them smallest first.

    Raises:
        InvalidInput: one is no size, or is named twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidInput("no size is named; write '350M,700M'", where="--sizes")
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidInput(f"{', '.join(sorted(twice))} is named twice", where="--sizes")
    return tuple(sorted(map(parse_size, names), key=lambda size: (size.total, size.active_goal, size.name)))


class Experts(NamedTuple):
    """The mixture of a stack: experts per layer, experts per token, leading dense layers, and further arguments."""

    number: int
    top_k: int
    leading: int
    more: tuple[tuple[str, Scalar], ...] = ()

    @property
    def used(self) -> int:
        """Experts that one token passes, shared ones included."""
        return self.top_k + int(dict(self.more).get("shared", 0))


PUBLISHED_EXPERTS = Experts(32, 4, 2)
"""Of LFM2-8B-A1B (LFM2 report, section 2.3)."""


@dataclass(frozen=True, slots=True)
class ScaledLayout:
    """A candidate of a size.

    Args:
        layout: the candidate.
        deviation: distance from the parent's proportions and the size's weights; see `_deviation`.
        caches: what attention keeps.
        experts: of a mixture, else None.
    """

    layout: Layout
    deviation: float
    caches: Caches
    experts: Experts | None = None


def candidates(parent: Layout, size: Size, vocab: int) -> list[ScaledLayout]:
    """Returns layouts of a size in the parent's pattern, the most promising first.

    First the nearest layout of each width, in order of deviation; attention keeps its key-value heads, and with them a
    cache size that the search selected, as published families do. Then the nearest of each width with the ratio of
    heads kept; then other depths. A parent of this size is the only candidate: the search that found it has
    tried other shapes, and measured their quality.

    Args:
        parent: its pattern is kept.
        size: the number of weights.
        vocab: rows of the embedding table.

    Raises:
        InvalidInput: no shape has these weights; the message gives the nearest.
    """
    parent = parent.architecture  # members name no quantisation: it is that of the runtimes
    experts = moe_of(parent)
    if size.admits(parent.params) and vocab == parent.vocab and (experts is None) == (size.active is None):
        return [ScaledLayout(parent, 0.0, "heads", experts)]
    shapes = sorted(_shapes(parent, size, vocab, _SPREAD), key=lambda shape: shape.deviation)
    fitting = [shape for shape in shapes if size.admits(shape.params)]
    if not fitting:
        raise InvalidInput(_unreached(parent, size, vocab, shapes), where="--sizes")
    widths: dict[int, _Shape] = {}
    ratios: dict[int, _Shape] = {}
    depths: dict[tuple[int, int], _Shape] = {}
    for shape in sorted(fitting, key=lambda shape: shape.stack.scaled.caches):  # "heads" first, each by deviation
        scaled = shape.stack.scaled
        nearest = widths.setdefault(scaled.width, shape)
        if scaled.caches != nearest.stack.scaled.caches:
            ratios.setdefault(scaled.width, shape)
        depths.setdefault((scaled.width, len(shape.stack.order)), shape)
    groups = (widths.values(), ratios.values(), depths.values())
    ranked = [shape for group in groups for shape in sorted(group, key=lambda shape: shape.deviation)]
    chosen = {id(shape): shape for shape in ranked}
    return [shape.candidate() for shape in islice(chosen.values(), MAX_CANDIDATES)]


# Properties of a layout.


def mixer_counts(layout: Layout) -> dict[str, int]:
    """Returns kind -> number of layers that have it, the most frequent first."""
    counts = Counter(block.kind for i in range(layout.depth) for block in layout.layer_at(i).mixers)
    return dict(counts.most_common())


def mixer_blocks(layout: Layout, *kinds: str) -> list[Block]:
    """Returns the mixers, or those of some kinds, first to last, with arguments that follow from the width."""
    blocks = [block for i in range(layout.depth) for block in layout.layer_at(i).mixers]
    return [block.resolve(layout.d_model) for block in blocks if not kinds or block.kind in kinds]


def ffn_ratio(layout: Layout) -> float:
    """Returns the feed-forward width that one token uses / d_model, mean over the layers that have a feed-forward."""
    widths = [active_width(layer.ffn) for i in range(layout.depth) if (layer := layout.layer_at(i)).ffn is not None]
    return math.fsum(widths) / len(widths) / layout.d_model if widths else 0.0


def active_width(ffn: Block | None) -> int:
    """Returns the hidden width that one token uses."""
    if ffn is None:
        return 0
    return ffn.int("width") * (_experts_of(ffn, 0).used if is_sparse(ffn) else 1)


def is_sparse(ffn: Block | None) -> bool:
    """Returns whether a feed-forward is a mixture of experts."""
    return ffn is not None and any(arg.name == "experts" for arg in ffn.spec.args)


def moe_of(parent: Layout) -> Experts | None:
    """Returns the parent's own mixture of experts, if it has one."""
    for index in range(parent.depth):
        ffn = parent.layer_at(index).ffn
        if ffn is not None and is_sparse(ffn):
            return _experts_of(ffn, index)
    return None


def _experts_of(ffn: Block, leading: int) -> Experts:
    more = tuple((name, value) for name, value in ffn.args if name not in ("experts", "top_k", "width"))
    return Experts(ffn.int("experts"), ffn.int("top_k"), leading, more)


def entangled(parent: Layout) -> bool:
    """Returns whether layers share weights or caches, so that the depth cannot change."""
    shares = any(layer.share is not None for layer in parent.layers)
    return shares or any(dict(block.args).get("kv") is not None for layer in parent.layers for block in layer.mixers)


# Layers at another depth.


def stretched(layers: Sequence[Layer], depth: int) -> tuple[int, ...]:
    """Returns, for each of `depth` layers, the index of the layer that it copies.

    Layers with the same kinds of blocks form a class. Each class keeps its share of the layers (largest remainders, at
    least one each) and its density along the stack: positions are quantiles of the class's positions in the parent, so
    that attention that grows denser towards the end still does, and separate layers do not become neighbours.

    Raises:
        ValueError: there are more classes than layers.
    """
    if depth == len(layers):
        return tuple(range(depth))
    classes: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        classes[(*(block.kind for block in layer.mixers), "+" if layer.ffn else "-")].append(index)
    counts = apportion([len(members) for members in classes.values()], depth)
    placed: list[tuple[float, int]] = []
    for members, count in zip(classes.values(), counts, strict=True):
        for rank in range(count):
            share = (rank + 0.5) / count
            after = members[min(len(members) - 1, int(share * len(members)))]
            placed.append((_quantile(members, len(layers), share), after))
    return tuple(after for _, after in sorted(placed))


def apportion(counts: Sequence[int], seats: int) -> list[int]:
    """Distributes `seats` in proportion to `counts`, at least one each (largest remainders, Hamilton).

    Raises:
        ValueError: fewer seats than counts.
    """
    if seats < len(counts):
        raise ValueError(f"{len(counts)} kinds of layers do not fit into {seats} layers")
    exact = [count * seats / sum(counts) for count in counts]
    apportioned = [max(1, math.floor(share)) for share in exact]
    while sum(apportioned) != seats:
        short = sum(apportioned) < seats
        movable = [i for i in range(len(apportioned)) if short or apportioned[i] > 1]
        pick = max(movable, key=lambda i: (exact[i] - apportioned[i]) * (1 if short else -1))
        apportioned[pick] += 1 if short else -1
    return apportioned


def _quantile(members: Sequence[int], depth: int, share: float) -> float:
    """Returns the relative depth below which `share` of a class is.

    Each member is spread evenly to halfway to its neighbours; a single one to halfway to the ends, so that it keeps its
    relative depth.
    """
    middle = (np.array(members) + 0.5) / depth
    between = (middle[1:] + middle[:-1]) / 2
    first = max(0.0, 2 * middle[0] - between[0]) if len(between) else middle[0] / 2
    last = min(1.0, 2 * middle[-1] - between[-1]) if len(between) else (middle[-1] + 1) / 2
    edges = np.concatenate([[first], between, [last]])
    return float(np.interp(share, np.linspace(0, 1, len(edges)), edges))


# Mixers at another width.


def width_step(blocks: Sequence[Block]) -> int:
    """Returns the step of widths that resolved `blocks` fit into: a multiple of the quantisers' 32."""
    return math.lcm(32, *(block.spec.width_step(block) for block in blocks))


def scaled_mixer(block: Block, d_model: int, to: int, caches: Caches) -> Block:
    """Returns the mixer at width `to`, scaled by its kind.

    Raises:
        InvalidInput: the kind has no such block.
    """
    return block if to == d_model else block.spec.scale(block, d_model, to, caches)


@dataclass(frozen=True)
class ScaledMixers:
    """A parent's layers at another width, for any depth.

    Args:
        parent: of the layers.
        vocab: rows of the embedding table.
        width: d_model.
        caches: what attention keeps.
        mixers: of each of the parent's layers.
        weights: of these mixers and of the layer's norms.
        ffns: of each of the parent's layers, feed-forward width / mean; 0: none. With experts all layers count alike.
        deviation: distance of attention from what it should keep, mean over its layers.
    """

    parent: Layout
    vocab: int
    width: int
    caches: Caches
    mixers: tuple[tuple[Block, ...], ...]
    weights: tuple[int, ...]
    ffns: tuple[float, ...]
    deviation: float

    @staticmethod
    def of(parent: Layout, vocab: int, width: int, caches: Caches) -> ScaledMixers:
        """Scales the mixers of a parent.

        Raises:
            InvalidInput: a kind has no such block at this width, or a layer cannot read another one's cache any more.
        """
        scaled_layers = [
            replace(layer, mixers=tuple(scaled_mixer(block, parent.d_model, width, caches) for block in layer.mixers))
            for layer in parent.layers
        ]
        mixers = tuple(layer.mixers for layer in parent.with_layers(scaled_layers, d_model=width).layers)
        weights = tuple(
            sum(block.spec.count(block, width).total for block in blocks)
            + width * (bool(blocks) + (layer.ffn is not None)) * (1 + (parent.norms == "both"))
            for blocks, layer in zip(mixers, parent.layers, strict=True)
        )
        attention = [
            block.spec.strain(block.resolve(parent.d_model), scaled.resolve(width), caches)
            for layer, blocks in zip(parent.layers, mixers, strict=True)
            for block, scaled in zip(layer.mixers, blocks, strict=True)
            if isinstance(block.spec, AttentionKind)
        ]
        deviation = sum(attention) / max(1, len(attention))
        return ScaledMixers(parent, vocab, width, caches, mixers, weights, _ffn_shares(parent), deviation)

    @cached_property
    def ffn_ratio(self) -> float:
        """That of the parent."""
        return ffn_ratio(self.parent)

    @cached_property
    def experts(self) -> Experts:
        """The parent's mixture of experts, else the published one."""
        return moe_of(self.parent) or PUBLISHED_EXPERTS


def _ffn_shares(parent: Layout) -> tuple[float, ...]:
    if moe_of(parent) is not None:
        return tuple(float(layer.ffn is not None) for layer in parent.layers)
    mean = ffn_ratio(parent) * parent.d_model or 1.0
    return tuple(active_width(layer.ffn) / mean for layer in parent.layers)


# Feed-forward width at a width and a depth.


@dataclass(frozen=True)
class ScaledStack:
    """Scaled mixers at a depth, with or without experts; the width of the feed-forwards is the free parameter.

    Args:
        scaled: the mixers.
        order: for each layer, the parent's layer that it copies.
        experts: None: all feed-forwards are dense.
    """

    scaled: ScaledMixers
    order: tuple[int, ...]
    experts: Experts | None

    def params(self, ffn: float, step: int) -> Params:
        """Counts the weights with feed-forwards of mean width `ffn` (of a mixture: each expert), rounded to `step`."""
        scaled = self.scaled
        total = active = self._outside
        for (kind, share), layers in self._ffns.items():
            width = self._width(ffn, share, step)
            parts = _linear_weights(kind, self.experts, scaled.width)
            total += layers * (parts.base + parts.slope * width)
            active += layers * (parts.active_base + parts.active_slope * width)
        for owner in self._again:
            active += scaled.weights[owner]
            if scaled.ffns[owner]:
                kind, share = self._slot(owner, owner)
                parts = _linear_weights(kind, self.experts, scaled.width)
                active += parts.active_base + parts.active_slope * self._width(ffn, share, step)
        table = scaled.width * scaled.vocab * (1 if scaled.parent.tied else 2)
        return Params(total + table, active + table, total)

    def fitted(self, total: int) -> float:
        """Returns the mean feed-forward width that gives `total` weights; below 0 if the rest has more."""
        least = self.params(0, 1)
        slope = sum(
            layers * share * _linear_weights(kind, self.experts, self.scaled.width).slope
            for (kind, share), layers in self._ffns.items()
        )
        return (total - least.total) / slope if slope else 0.0

    def layout(self, ffn: float, step: int) -> Layout:
        """Returns the layout; arguments as of `params`."""
        layers = []
        for depth, i in enumerate(self.order):
            layer = self.scaled.parent.layers[i]
            block = self._ffn(depth, i, ffn, step) if layer.ffn else None
            layers.append(replace(layer, mixers=self.scaled.mixers[i], ffn=block))
        return self.scaled.parent.with_layers(layers, d_model=self.scaled.width, vocab=self.scaled.vocab)

    @cached_property
    def _outside(self) -> int:
        """The weights besides those of feed-forwards and tables."""
        return self.scaled.width + sum(self.scaled.weights[i] for i in self.order)

    @cached_property
    def _again(self) -> list[int]:
        """Layers whose weights later ones share, once for each; the order is then the parent's."""
        shares = (self.scaled.parent.layers[i].share for i in self.order)
        return [share for share in shares if share is not None]

    @cached_property
    def _ffns(self) -> Counter[tuple[str, float]]:
        return Counter(self._slot(depth, i) for depth, i in enumerate(self.order) if self.scaled.ffns[i])

    def _slot(self, depth: int, i: int) -> tuple[str, float]:
        """Returns kind and relative width of a feed-forward; leading dense layers are as wide as a token's experts."""
        if self.experts is None:
            ffn = self.scaled.parent.layers[i].ffn
            assert ffn is not None
            return (DENSE if is_sparse(ffn) else ffn.kind), self.scaled.ffns[i]
        return (DENSE, float(self.experts.used)) if depth < self.experts.leading else ("moe", 1.0)

    def _ffn(self, depth: int, i: int, ffn: float, step: int) -> Block:
        kind, share = self._slot(depth, i)
        return _ffn_block(kind, self.experts, self._width(ffn, share, step))

    def _width(self, ffn: float, share: float, step: int) -> int:
        """Returns the rounded width; in a mixture shares are whole: dense layers are as wide as a token's experts."""
        return _rounded(ffn * share, step) if self.experts is None else _rounded(ffn, step) * round(share)


class _LinearWeights(NamedTuple):
    """Numbers of a feed-forward's weights, which are linear in its width."""

    base: int
    slope: int
    active_base: int
    active_slope: int


@lru_cache(maxsize=1 << 12)
def _linear_weights(kind: str, experts: Experts | None, d_model: int) -> _LinearWeights:
    one, two = (block.spec.count(block, d_model) for block in (_ffn_block(kind, experts, width) for width in (32, 64)))
    slope, active = (two.total - one.total) // 32, (two.active - one.active) // 32
    return _LinearWeights(one.total - 32 * slope, slope, one.active - 32 * active, active)


def _ffn_block(kind: str, experts: Experts | None, width: int) -> Block:
    if kind != "moe":
        return Block.of(kind, width=width)
    assert experts is not None, "only mixtures have experts"
    return Block.of(kind, experts=experts.number, top_k=experts.top_k, width=width, **dict(experts.more))


def _rounded(width: float, step: int) -> int:
    """Returns the nearest multiple of `step`, at least `step`."""
    return max(step, round(width / step) * step)


# Shapes of a size.


@dataclass(frozen=True, slots=True)
class _Shape:
    """A stack with feed-forwards that give it the size's weights, as far as the bounds allow."""

    stack: ScaledStack
    ffn: float
    step: int
    params: Params
    deviation: float

    def candidate(self) -> ScaledLayout:
        layout = self.stack.layout(self.ffn, self.step)
        return ScaledLayout(layout, self.deviation, self.stack.scaled.caches, self.stack.experts)


def _shapes(parent: Layout, size: Size, vocab: int, spread: float) -> Iterator[_Shape]:
    """Yields every shape whose tables are not too large, with widths up to a factor `spread` from the suggested one."""
    orders: dict[int, tuple[int, ...]] = {}
    for width in _widths(parent, size, spread):
        for scaled in _variants(parent, vocab, width):
            for depth in _depths(parent, width):
                if depth not in orders:
                    orders[depth] = stretched(parent.layers, depth)
                for experts in _experts(scaled.experts, size, depth):
                    shape = _fitted(ScaledStack(scaled, orders[depth], experts), size)
                    if _table(parent, width, vocab) <= EMBEDDING_SHARE * shape.params.total:
                        yield shape


def _variants(parent: Layout, vocab: int, width: int) -> list[ScaledMixers]:
    """Returns the different ways to scale the mixers to a width; none where a kind has no block of it."""
    variants: list[ScaledMixers] = []
    ways: tuple[Caches, ...] = ("heads", "ratio")
    for caches in ways:
        with suppress(InvalidInput):  # such as groups of heads that do not divide the heads
            scaled = ScaledMixers.of(parent, vocab, width, caches)
            if all(scaled.mixers != variant.mixers for variant in variants):
                variants.append(scaled)
    return variants


def _table(parent: Layout, width: int, vocab: int) -> int:
    """Returns the weights of the embedding and, if untied, of the output."""
    return width * vocab * (1 if parent.tied else 2)


def _widths(parent: Layout, size: Size, spread: float) -> range:
    """Returns widths around the one that keeps the parent's proportions."""
    step = width_step(mixer_blocks(parent))
    ideal = parent.d_model * (size.active_goal / parent.params.active) ** (1 / 3)
    if ideal > 3 * STEP:
        step = math.lcm(step, STEP)
    low = max(step, round(ideal / spread / step) * step)
    return range(low, min(MAX_WIDTH, max(low, math.ceil(ideal * spread / step) * step)) + 1, step)


def _depths(parent: Layout, width: int) -> Iterable[int]:
    """Returns depths whose aspect is near the parent's; its own if the layers are entangled."""
    if entangled(parent):
        return (parent.depth,)
    aspect = parent.d_model / parent.depth
    kinds = len({(*(block.kind for block in layer.mixers), layer.ffn is not None) for layer in parent.layers})
    least = max(kinds, math.ceil(width / aspect / MAX_ASPECT))
    return range(least, min(MAX_LAYERS, max(least, math.floor(width / aspect * MAX_ASPECT))) + 1)


def _experts(experts: Experts, size: Size, depth: int) -> list[Experts | None]:
    """Returns a mixture and variants of its numbers of experts; None alone for a dense size."""
    if size.active is None:
        return [None]
    count, top_k = experts.number, experts.top_k
    leading = min(experts.leading, max(0, depth - 1))
    pairs = [(count, top_k), (count * 2, top_k), (count // 2, top_k), (count // 4, top_k), (count // 2, top_k // 2)]
    return [Experts(e, k, leading, experts.more) for e, k in pairs if 1 <= k < e <= _MAX_EXPERTS]


def _fitted(stack: ScaledStack, size: Size) -> _Shape:
    """Returns the shape whose feed-forward width is nearest to the size's weights, within the bounds of the ratio."""
    used = stack.experts.used if stack.experts else 1
    d_model = stack.scaled.width
    low, high = (bound * stack.scaled.ffn_ratio * d_model / used for bound in FFN_RATIO)
    ideal = min(max(stack.fitted(size.total), low), high)
    coarse = {_rounded(ideal + side, STEP) for side in (-STEP / 2, STEP / 2)} if ideal > 3 * STEP else set()
    widths = [(float(ffn), STEP, stack.params(ffn, STEP)) for ffn in sorted(coarse) if low <= ffn <= high]
    admitted = [width for width in widths if size.admits(width[2])]
    ffn, step, params = min(
        admitted or [(ideal, _BLOCK, stack.params(ideal, _BLOCK))], key=lambda width: _off(size, width[2])
    )
    return _Shape(stack, ffn, step, params, _deviation(stack, size, params, _rounded(ffn, step) * used / d_model))


def _deviation(stack: ScaledStack, size: Size, params: Params, ratio: float) -> float:
    """Returns the sum of absolute log ratios of feed-forward and aspect to the parent's and of weights to the size's.

    Weights count double; the aspect counts half, since it matters least; deviating heads of attention count a fifth;
    experts other than the parent's or the published ones a tenth.
    """
    parent = stack.scaled.parent
    aspect = (stack.scaled.width / len(stack.order)) / (parent.d_model / parent.depth)
    deviation = abs(math.log(aspect)) / 2 + 2 * _off(size, params) + stack.scaled.deviation / 5
    if stack.scaled.ffn_ratio:
        deviation += abs(math.log(ratio / stack.scaled.ffn_ratio))
    if stack.experts is not None:
        experts = stack.scaled.experts
        deviation += abs(math.log2(stack.experts.number / experts.number)) / 10
        deviation += abs(math.log2(stack.experts.top_k / experts.top_k)) / 10
    return deviation


def _off(size: Size, params: Params) -> float:
    """Returns the log distance of the weights from the size's; active ones count a quarter, since they have a range."""
    total = abs(math.log(params.total / size.total))
    return total + (abs(math.log(params.active / size.active_goal)) / 4 if size.active else 0.0)


def _unreached(parent: Layout, size: Size, vocab: int, shapes: Sequence[_Shape]) -> str:
    """Returns the message that no shape has the size's weights, with the nearest shape."""
    message = f"{size.name}: no layout of this pattern has {size.budget()}"
    if shapes := shapes or list(_shapes(parent, size, vocab, _WIDE_SPREAD)):
        nearest = min(shapes, key=lambda shape: _distance(size, shape.params))
        active = f" and {show_count(nearest.params.active)} active" if size.active else ""
        message += f"; the nearest has {show_count(nearest.params.total)}{active}: {nearest.candidate().layout}"
    widths = _widths(parent, size, _WIDE_SPREAD)
    if not widths:
        step = width_step(mixer_blocks(parent))
        return f"{message}; its width would have to be a multiple of {step:,} and at most {MAX_WIDTH:,}"
    if _table(parent, min(widths), vocab) > EMBEDDING_SHARE * size.total / 4:
        message += f". The table of {vocab} tokens may have at most {EMBEDDING_SHARE:.0%} of the weights: try a smaller"
        message += " --vocab"
    return message


def _distance(size: Size, params: Params) -> float:
    low, high = size.active or (params.active, params.active)
    active = min(max(params.active, low), high)
    return abs(math.log(params.total / size.total)) + abs(math.log(params.active / active))
