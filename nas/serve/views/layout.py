"""View model of a layout: each layer's blocks with shape, parameters, cache and FLOPs; and the alignment of layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nas.core.block import Block
from nas.core.layout import Layout
from nas.serve.views.base import View

CONTEXTS = (512, 2048, 4096, 8192, 32768)
"""Context lengths, in tokens, for which cache and FLOPs are given, in addition to the workloads'."""
_GAP = 2
Row = tuple[int | None, ...]
"""For each layout the index of its layer, or None for a gap."""


class BlockView(View):
    """One block; with shared weights, that of the layer that owns them."""

    kind: str
    role: str
    text: str = Field(description="as in the one-line string")
    doc: str
    shape: dict[str, float] = Field(description="arguments, those that follow from the width included")
    params: int
    active: int = Field(description="weights that one token passes through")
    kv_bytes: float = Field(description="of key-value cache at `LayoutView.context`, in 16-bit numbers")
    state_bytes: float = Field(description="of recurrent state; it does not depend on the context")
    flops: float = Field(description="for one token that sees `LayoutView.context` tokens")


class LayerView(View):
    """One layer."""

    index: int
    mixers: tuple[BlockView, ...] = Field(description="in parallel; empty: the layer has no mixer")
    ffn: BlockView | None
    share: int | None = Field(description="the earlier layer whose weights run here")

    @property
    def blocks(self) -> tuple[BlockView, ...]:
        """Mixers, then the feed-forward."""
        return self.mixers + ((self.ffn,) if self.ffn else ())

    @property
    def params(self) -> int:
        """Weights of its blocks, own or shared."""
        return sum(block.params for block in self.blocks)


class ContextCost(View):
    """The cost of a context."""

    context: int
    kv_bytes: float = Field(description="in 16-bit numbers")
    flops: float = Field(description="for one token that sees the whole context, output head included")


class LayoutView(View):
    """A layout and its arithmetic."""

    id: str
    text: str
    d_model: int
    vocab: int
    tied: bool
    context: int = Field(description="context of the layers' cache and FLOPs, in tokens")
    layers: tuple[LayerView, ...]
    params: int
    active: int
    non_embedding: int
    state_bytes: float
    contexts: tuple[ContextCost, ...]


def layout_view(layout: Layout, context: int, *further: int) -> LayoutView:
    """Returns the view of a layout.

    Args:
        layout: any.
        context: of the layers' own figures, in tokens.
        further: contexts for `LayoutView.contexts`, in addition to it and `CONTEXTS`.
    """
    return LayoutView(
        id=layout.id,
        text=layout.format(),
        d_model=layout.d_model,
        vocab=layout.vocab,
        tied=layout.tied,
        context=context,
        layers=tuple(_layer(layout, index, context) for index in range(layout.depth)),
        params=layout.params.total,
        active=layout.params.active,
        non_embedding=layout.params.non_embedding,
        state_bytes=layout.state_bytes(),
        contexts=tuple(
            ContextCost(context=tokens, kv_bytes=layout.kv_bytes(tokens), flops=layout.flops(tokens))
            for tokens in sorted({context, *further, *CONTEXTS})
        ),
    )


def align(layouts: Sequence[Layout]) -> list[Row]:
    """Aligns every layout with the first, layer by layer, in order, at the least cost.

    Pairs cost 1 for another mixer and 1 for another feed-forward, gaps 2: Needleman and Wunsch (1970). On a tie,
    layers are paired as early as possible. Layers that the first layout lacks come between its layers, those of
    several layouts in the same row.

    Args:
        layouts: one or more.
    """
    first, others = layouts[0], layouts[1:]
    matched = [_against(first, other) for other in others]
    rows: list[Row] = []
    for index in range(first.depth + 1):
        between = [gaps[index] for _, gaps in matched]
        for index_in_gap in range(max((len(gap) for gap in between), default=0)):
            rows.append((None, *(gap[index_in_gap] if index_in_gap < len(gap) else None for gap in between)))
        if index < first.depth:
            rows.append((index, *(pairs[index] for pairs, _ in matched)))
    return rows


def differs(layouts: Sequence[Layout], row: Row) -> bool:
    """Returns whether a row's layers differ in kind or shape, or one is missing."""
    return (
        len({None if index is None else layout.layer_at(index) for layout, index in zip(layouts, row, strict=True)}) > 1
    )


def layer_codes(layouts: Sequence[Layout]) -> NDArray[np.int32]:
    """Returns [N, D, 2] the mixers and the feed-forward of each layer as numbers, equal for equal blocks; 0: no layer.

    Args:
        layouts: N layouts of at most D layers.
    """
    numbers: dict[object, int] = {}
    codes = np.zeros((len(layouts), max((layout.depth for layout in layouts), default=0), 2), np.int32)
    for row, layout in zip(codes, layouts, strict=True):
        for index in range(layout.depth):
            layer = layout.layer_at(index)
            row[index] = [numbers.setdefault(part, len(numbers) + 1) for part in (layer.mixers, layer.ffn)]
    return codes


def distances(codes: NDArray[np.int32], number: int) -> NDArray[np.int32]:
    """Returns [N] the least cost of an alignment of each layout with one of them, as `align` counts it.

    Args:
        codes: see `layer_codes`.
        number: of the layout to compare with.
    """
    depths = (codes[:, :, 0] > 0).sum(axis=1)
    one = codes[number, : depths[number]]
    costs = _GAP * np.broadcast_to(np.arange(codes.shape[1] + 1), (len(codes), codes.shape[1] + 1)).astype(np.int32)
    for layer in one:  # costs[:, j]: of the layers so far and the first j layers of each layout
        pairs = (codes != layer).sum(axis=2)
        now = costs + _GAP
        now[:, 1:] = np.minimum(now[:, 1:], costs[:, :-1] + pairs)
        for j in range(1, now.shape[1]):
            now[:, j] = np.minimum(now[:, j], now[:, j - 1] + _GAP)
        costs = now
    return np.asarray(costs[np.arange(len(codes)), depths])


def _layer(layout: Layout, index: int, context: int) -> LayerView:
    layer = layout.layer_at(index)
    return LayerView(
        index=index,
        mixers=tuple(_block(block, layout.d_model, context) for block in layer.mixers),
        ffn=_block(layer.ffn, layout.d_model, context) if layer.ffn else None,
        share=layout.layers[index].share,
    )


def _block(block: Block, d_model: int, context: int) -> BlockView:
    kind, resolved = block.spec, block.resolve(d_model)
    values = {arg.name: resolved.get(arg.name) for arg in kind.args}
    count = kind.count(block, d_model)
    return BlockView(
        kind=kind.name,
        role=kind.role,
        text=block.format(),
        doc=kind.doc,
        shape={name: float(value) for name, value in values.items() if value is not None},
        params=count.total,
        active=count.active,
        kv_bytes=kind.kv_bytes(block, d_model, context, 2.0),
        state_bytes=kind.state_bytes(block, d_model),
        flops=kind.flops(block, d_model, context),
    )


def _against(first: Layout, other: Layout) -> tuple[list[int | None], list[list[int]]]:
    """Returns the partner of each layer of `first`, and for each gap between them the layers of `other` without one."""
    costs = _costs(first, other)
    pairs: list[int | None] = []
    gaps: list[list[int]] = [[]]
    i = j = 0
    while i < first.depth or j < other.depth:
        rest = costs[i][j]
        if i < first.depth and j < other.depth and rest == costs[i + 1][j + 1] + _cost(first, i, other, j):
            pairs.append(j)
            gaps.append([])
            i, j = i + 1, j + 1
        elif i < first.depth and rest == costs[i + 1][j] + _GAP:
            pairs.append(None)
            gaps.append([])
            i += 1
        else:
            gaps[-1].append(j)
            j += 1
    return pairs, gaps


def _costs(first: Layout, other: Layout) -> list[list[int]]:
    """Returns [i][j]: the least cost of what follows layer `i` of `first` and layer `j` of `other`."""
    costs = [
        [_GAP * (first.depth - i + other.depth - j) for j in range(other.depth + 1)] for i in range(first.depth + 1)
    ]
    for i in reversed(range(first.depth)):
        for j in reversed(range(other.depth)):
            paired = costs[i + 1][j + 1] + _cost(first, i, other, j)
            costs[i][j] = min(paired, costs[i + 1][j] + _GAP, costs[i][j + 1] + _GAP)
    return costs


def _cost(first: Layout, i: int, other: Layout, j: int) -> int:
    a, b = first.layer_at(i), other.layer_at(j)
    return int(a.mixers != b.mixers) + int(a.ffn != b.ffn)
