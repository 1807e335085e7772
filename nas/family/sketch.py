"""A layout's proportions before it is built: how wide its feed-forwards must be for it to have so many weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from nas.blocks.attention import AttentionKind
from nas.core.block import Block
from nas.core.layout import Layout, Params
from nas.family.pattern import active_width, ffn_ratio, is_sparse
from nas.family.stack import Caches, scaled_mixer, strain

DENSE = "swiglu"
"""The feed-forward of dense layers where the parent has none: the one of the experts, and of lfm2moe's first layers."""


class Experts(NamedTuple):
    """The mixture of a stack: experts in a layer, those of a token, and dense layers in front."""

    number: int
    top_k: int
    leading: int


@dataclass(frozen=True)
class Frame:
    """A parent's layers at another width, whatever the depth.

    Args:
        parent: whose they are.
        vocab: rows of the embedding table.
        width: d_model.
        caches: what attention keeps.
        mixers: of each of the parent's layers.
        weights: of these mixers and of the layer's norms.
        ffns: of each of the parent's layers, its width / the mean; 0: it has none. Beside experts all count alike.
        strain: how far attention is from what it should keep, mean over its layers.
    """

    parent: Layout
    vocab: int
    width: int
    caches: Caches
    mixers: tuple[tuple[Block, ...], ...]
    weights: tuple[int, ...]
    ffns: tuple[float, ...]
    strain: float

    @staticmethod
    def of(parent: Layout, vocab: int, width: int, caches: Caches) -> Frame:
        """The frame of a parent."""
        mixers = tuple(
            tuple(scaled_mixer(block, parent.d_model, width, caches) for block in layer.mixers)
            for layer in parent.layers
        )
        weights = tuple(
            sum(block.spec.count(block, width).total for block in blocks)
            + width * (bool(blocks) + (layer.ffn is not None))
            for blocks, layer in zip(mixers, parent.layers, strict=True)
        )
        return Frame(
            parent, vocab, width, caches, mixers, weights, _ffn_shares(parent), _strain(parent, width, mixers, caches)
        )


@dataclass(frozen=True)
class Sketch:
    """A frame at a depth, with or without experts; its feed-forwards are still to be fitted.

    Args:
        frame: the layers.
        order: which of the frame's layers stands at each depth.
        experts: None: all feed-forwards are dense.
    """

    frame: Frame
    order: tuple[int, ...]
    experts: Experts | None

    def params(self, ffn: float, step: int) -> Params:
        """The weights with feed-forwards `ffn` wide on average (in a mixture, each expert), in multiples of `step`."""
        frame = self.frame
        outside = frame.width + sum(frame.weights[i] for i in self.order)
        total = active = outside
        for (kind, share), layers in self._ffns().items():
            width = self._width(ffn, share, step)
            parts = _weights(kind, self.experts, frame.width)
            total += layers * (parts.base + parts.slope * width)
            active += layers * (parts.active_base + parts.active_slope * width)
        table = frame.width * frame.vocab * (1 if frame.parent.tied else 2)
        return Params(total + table, active + table, total)

    def fitted(self, total: int) -> float:
        """The width with which there are `total` weights; below 0 where the rest has more already."""
        least = self.params(0, 1)
        ones = self._ffns().items()
        slope = sum(
            layers * share * _weights(kind, self.experts, self.frame.width).slope for (kind, share), layers in ones
        )
        return (total - least.total) / slope if slope else 0.0

    def layout(self, ffn: float, step: int) -> Layout:
        """The layout itself; arguments as of `params`."""
        layers = []
        for depth, i in enumerate(self.order):
            layer = self.frame.parent.layers[i]
            block = self._ffn(depth, i, ffn, step) if layer.ffn else None
            layers.append(replace(layer, mixers=self.frame.mixers[i], ffn=block))
        return Layout.of(self.frame.width, self.frame.vocab, layers, tied=self.frame.parent.tied)

    def _ffns(self) -> Counter[tuple[str, float]]:
        return Counter(self._slot(depth, i) for depth, i in enumerate(self.order) if self.frame.ffns[i])

    def _slot(self, depth: int, i: int) -> tuple[str, float]:
        """Kind and relative width of a feed-forward; dense layers in front are as wide as the experts of a token."""
        if self.experts is None:
            ffn = self.frame.parent.layers[i].ffn
            assert ffn is not None
            return (DENSE if is_sparse(ffn) else ffn.kind), self.frame.ffns[i]
        return (DENSE, float(self.experts.top_k)) if depth < self.experts.leading else ("moe", 1.0)

    def _ffn(self, depth: int, i: int, ffn: float, step: int) -> Block:
        kind, share = self._slot(depth, i)
        return _block(kind, self.experts, self._width(ffn, share, step))

    def _width(self, ffn: float, share: float, step: int) -> int:
        """In a mixture shares are whole, and dense layers exactly as wide as the experts of a token."""
        return rounded(ffn * share, step) if self.experts is None else rounded(ffn, step) * round(share)


def _ffn_shares(parent: Layout) -> tuple[float, ...]:
    if moe_of(parent) is not None:
        return tuple(float(layer.ffn is not None) for layer in parent.layers)
    mean = ffn_ratio(parent) * parent.d_model or 1.0
    return tuple(active_width(layer.ffn) / mean for layer in parent.layers)


def _strain(parent: Layout, width: int, mixers: tuple[tuple[Block, ...], ...], caches: Caches) -> float:
    pairs = [
        (block.resolve(parent.d_model), scaled.resolve(width))
        for layer, blocks in zip(parent.layers, mixers, strict=True)
        for block, scaled in zip(layer.mixers, blocks, strict=True)
    ]
    attention = [pair for pair in pairs if isinstance(pair[0].spec, AttentionKind)]
    return sum(strain(*pair, caches) for pair in attention) / max(1, len(attention))


def rounded(width: float, step: int) -> int:
    """The nearest multiple of `step`, at least one."""
    return max(step, round(width / step) * step)


class _Weights(NamedTuple):
    """Weights of a feed-forward, which are linear in its width."""

    base: int
    slope: int
    active_base: int
    active_slope: int


@lru_cache(maxsize=1 << 12)
def _weights(kind: str, experts: Experts | None, d_model: int) -> _Weights:
    one, two = (block.spec.count(block, d_model) for block in (_block(kind, experts, width) for width in (32, 64)))
    slope, active = (two.total - one.total) // 32, (two.active - one.active) // 32
    return _Weights(one.total - 32 * slope, slope, one.active - 32 * active, active)


def _block(kind: str, experts: Experts | None, width: int) -> Block:
    if kind != "moe":
        return Block.of(kind, width=width)
    assert experts is not None, "only mixtures have experts"
    return Block.of(kind, experts=experts.number, top_k=experts.top_k, width=width)


def moe_of(parent: Layout) -> Experts | None:
    """The parent's own mixture of experts, if it has one."""
    sparse = [i for i in range(parent.depth) if is_sparse(parent.own(i).ffn)]
    if not sparse:
        return None
    ffn = parent.own(sparse[0]).ffn
    assert ffn is not None
    return Experts(ffn.int("experts"), ffn.int("top_k"), sparse[0])
