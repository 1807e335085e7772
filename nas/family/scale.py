"""A family's pattern at a size: candidate layouts of several shapes with the weights that the size asks for.

A shape is a width, a depth, what attention keeps, and for a mixture of experts how many there are. The feed-forward's
width is what is left: it is solved for, so that the candidates of a size have about equal weights and differ in shape.
Within the bounds below, the loss of transformers of equal weights hardly depends on the shape (Kaplan et al. 2020,
section 3.1 and Figure 5); beyond them no candidate is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from nas.core.errors import InvalidInput
from nas.core.layout import MAX_DEPTH, MAX_WIDTH, Layout, Params
from nas.core.units import show_count
from nas.family.pattern import ffn_ratio, mixer_blocks
from nas.family.sizes import Size
from nas.family.sketch import Experts, Frame, Sketch, moe_of, rounded
from nas.family.stack import Caches, stretched, width_step

MAX_ASPECT = 2.0
"""Factor by which d_model / depth may differ from the parent's; over a factor of 40 losses differed by 3 %."""
FFN_RATIO = (0.75, 4 / 3)
"""Feed-forward width / d_model, as multiples of the parent's; LFM2's own sizes have 0.78 to 1.17 of LFM2-350M's."""
EMBEDDING_SHARE = 0.5
"""Most of the weights that embedding and output tables may be; LFM2-350M's has 19 %."""
MAX_LAYERS = min(MAX_DEPTH, 512)
STEP = 256
"""Widths are multiples of it where they are large enough: K quants have blocks of 256; what does not fit falls back."""
PUBLISHED_EXPERTS = Experts(32, 4, 2)
"""Of LFM2-8B-A1B (LFM2 report, section 2.3)."""

MOST = 64
"""Candidates of a size."""

_BLOCK = 32
_SPREAD, _WIDE_SPREAD = 2.0, 6.0
"""Widths are tried up to so many times the one that the size suggests, either way; where all have too large tables,
up to the other, for what is nearest."""
_MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Scaled:
    """A candidate of a size.

    Args:
        layout: what it is.
        deviation: how far it is from the parent's proportions and the size's weights; see `_deviation`.
        caches: what attention keeps.
        experts: of a mixture, else None.
    """

    layout: Layout
    deviation: float
    caches: Caches
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """A sketch with feed-forwards that give it the size's weights, as far as the bounds let it."""

    sketch: Sketch
    ffn: float
    step: int
    params: Params
    deviation: float

    def scaled(self) -> Scaled:
        layout = self.sketch.layout(self.ffn, self.step)
        return Scaled(layout, self.deviation, self.sketch.frame.caches, self.sketch.experts)


def candidates(parent: Layout, size: Size, vocab: int) -> list[Scaled]:
    """Layouts of the size in the parent's pattern, those that are worth measuring most first.

    First comes the nearest of each width, by how near it is; its attention keeps its key-value heads, and with them a
    cache that the search found worth it, as published families do. Then the nearest of each width with the ratio of
    heads kept; then other depths. A parent that is of this size stands alone: the search that found it has tried other
    shapes, with their quality.

    Args:
        parent: whose pattern it is.
        size: the weights that are wanted.
        vocab: rows of the embedding table.

    Raises:
        InvalidInput: no shape has these weights; the message says what the nearest has.
    """
    own = moe_of(parent)
    if size.admits(parent.params) and vocab == parent.vocab and (own is None) == (size.active is None):
        return [Scaled(parent, 0.0, "heads", own)]
    shapes = sorted(_shapes(parent, size, vocab, _SPREAD), key=lambda shape: shape.deviation)
    fitting = [shape for shape in shapes if size.admits(shape.params)]
    if not fitting:
        raise InvalidInput(_unreached(parent, size, vocab, shapes), where="--sizes")
    widths: dict[int, _Shape] = {}
    ratios: dict[int, _Shape] = {}
    depths: dict[tuple[int, int], _Shape] = {}
    for shape in sorted(fitting, key=lambda shape: shape.sketch.frame.caches):  # "heads" first, each kind nearest first
        frame = shape.sketch.frame
        nearest = widths.setdefault(frame.width, shape)
        if frame.caches != nearest.sketch.frame.caches:
            ratios.setdefault(frame.width, shape)
        depths.setdefault((frame.width, len(shape.sketch.order)), shape)
    ranked = [sorted(some.values(), key=lambda shape: shape.deviation) for some in (widths, ratios, depths)]
    chosen = {id(shape): shape for shape in (*ranked[0], *ranked[1], *ranked[2])}
    return [shape.scaled() for shape in islice(chosen.values(), MOST)]


def entangled(parent: Layout) -> bool:
    """Whether layers read each other's weights or caches, so that none can be left out or put in."""
    shares = any(layer.share is not None for layer in parent.layers)
    return shares or any(dict(block.given).get("kv") is not None for layer in parent.layers for block in layer.mixers)


def _shapes(parent: Layout, size: Size, vocab: int, spread: float) -> Iterator[_Shape]:
    """Every shape with widths up to `spread` off; those with too large tables are none."""
    orders: dict[int, tuple[int, ...]] = {}
    for width in _widths(parent, size, spread):
        frames = [Frame.of(parent, vocab, width, caches) for caches in ("heads", "ratio")]
        for frame in frames[: 1 + (frames[0].mixers != frames[1].mixers)]:
            for depth in _depths(parent, width):
                if depth not in orders:
                    orders[depth] = stretched(parent.layers, depth)
                for experts in _experts(parent, size, depth):
                    shape = _fitted(Sketch(frame, orders[depth], experts), size)
                    if _table(parent, width, vocab) <= EMBEDDING_SHARE * shape.params.total:
                        yield shape


def _table(parent: Layout, width: int, vocab: int) -> int:
    """Weights of the embedding, and of the output where it has its own."""
    return width * vocab * (1 if parent.tied else 2)


def _widths(parent: Layout, size: Size, spread: float) -> range:
    """Around the width that keeps the parent's proportions."""
    step = width_step(mixer_blocks(parent))
    ideal = parent.d_model * (size.active_goal / parent.params.active) ** (1 / 3)
    if ideal > 3 * STEP:
        step = math.lcm(step, STEP)
    low = max(step, round(ideal / spread / step) * step)
    return range(low, min(MAX_WIDTH, max(low, math.ceil(ideal * spread / step) * step)) + 1, step)


def _depths(parent: Layout, width: int) -> Iterable[int]:
    """Those whose aspect is near the parent's; its own where the layers are entangled."""
    if entangled(parent):
        return (parent.depth,)
    aspect = parent.d_model / parent.depth
    kinds = len({(*(block.kind for block in layer.mixers), layer.ffn is not None) for layer in parent.layers})
    least = max(kinds, math.ceil(width / aspect / MAX_ASPECT))
    return range(least, min(MAX_LAYERS, max(least, math.floor(width / aspect * MAX_ASPECT))) + 1)


def _experts(parent: Layout, size: Size, depth: int) -> list[Experts | None]:
    """The parent's mixture or the published one, then with twice or half the experts, then with half of a token's."""
    if size.active is None:
        return [None]
    count, top_k, leading = moe_of(parent) or PUBLISHED_EXPERTS
    leading = min(leading, max(0, depth - 1))
    tried = [(count, top_k), (count * 2, top_k), (count // 2, top_k), (count // 4, top_k), (count // 2, top_k // 2)]
    return [Experts(e, k, leading) for e, k in tried if 1 <= k < e <= _MAX_EXPERTS]


def _fitted(sketch: Sketch, size: Size) -> _Shape:
    """The shape with the feed-forward width that comes nearest to the size's weights, in the bounds of the ratio."""
    top_k = sketch.experts.top_k if sketch.experts else 1
    ratio = ffn_ratio(sketch.frame.parent)
    low, high = (bound * ratio * sketch.frame.width / top_k for bound in FFN_RATIO)
    wanted = min(max(sketch.fitted(size.total), low), high)
    coarse = {rounded(wanted + side, STEP) for side in (-STEP / 2, STEP / 2)} if wanted > 3 * STEP else set()
    made = [(float(ffn), STEP, sketch.params(ffn, STEP)) for ffn in sorted(coarse) if low <= ffn <= high]
    admitted = [each for each in made if size.admits(each[2])]
    ffn, step, params = min(
        admitted or [(wanted, _BLOCK, sketch.params(wanted, _BLOCK))], key=lambda each: _off(size, each[2])
    )
    return _Shape(
        sketch, ffn, step, params, _deviation(sketch, size, params, rounded(ffn, step) * top_k / sketch.frame.width)
    )


def _deviation(sketch: Sketch, size: Size, params: Params, ratio: float) -> float:
    """Log ratios of feed-forward and aspect to the parent's, and of the weights to the size's, which count double.

    The aspect counts half, since it matters least; what attention should keep and does not, a fifth; experts other than
    the parent's or the published ones, a tenth.
    """
    parent = sketch.frame.parent
    aspect = (sketch.frame.width / len(sketch.order)) / (parent.d_model / parent.depth)
    found = abs(math.log(aspect)) / 2 + 2 * _off(size, params) + sketch.frame.strain / 5
    if ffn_ratio(parent):
        found += abs(math.log(ratio / ffn_ratio(parent)))
    if sketch.experts is not None:
        own = moe_of(parent) or PUBLISHED_EXPERTS
        found += abs(math.log2(sketch.experts.number / own.number)) / 10
        found += abs(math.log2(sketch.experts.top_k / own.top_k)) / 10
    return found


def _off(size: Size, params: Params) -> float:
    """How far the weights are from the size's, as logarithms; active ones count a quarter, since they have a range."""
    total = abs(math.log(params.total / size.total))
    return total + (abs(math.log(params.active / size.active_goal)) / 4 if size.active else 0.0)


def _unreached(parent: Layout, size: Size, vocab: int, shapes: Sequence[_Shape]) -> str:
    """Why no shape has the size's weights, and what comes nearest."""
    told = f"{size.name}: no layout of this pattern has {size.budget()}"
    shapes = shapes or list(_shapes(parent, size, vocab, _WIDE_SPREAD))
    if shapes:
        nearest = min(shapes, key=lambda shape: _short(size, shape.params))
        active = f" and {show_count(nearest.params.active)} active" if size.active else ""
        told += (
            f"; the nearest that is reached has {show_count(nearest.params.total)}{active}: {nearest.scaled().layout}"
        )
    least = min(_widths(parent, size, _WIDE_SPREAD))
    if _table(parent, least, vocab) > EMBEDDING_SHARE * size.total / 4:
        told += (
            f". At most {EMBEDDING_SHARE:.0%} of the weights may be the table of {vocab} tokens: try a smaller --vocab"
        )
    return told


def _short(size: Size, params: Params) -> float:
    low, high = size.active or (params.active, params.active)
    active = min(max(params.active, low), high)
    return abs(math.log(params.total / size.total)) + abs(math.log(params.active / active))
