"""A layout as people look at it: each layer's blocks with their shape, weights, cache and work."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from nas.core.block import Block
from nas.core.layout import Layout

CONTEXTS = (512, 2048, 4096, 8192, 32768)
"""Tokens of context that cache and work are told for, beside those of the space's workloads."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class BlockView(_Frozen):
    """One block; a layer that shares weights shows those of the layer that has them."""

    kind: str
    role: str
    text: str
    """As in the one-line string."""
    doc: str
    shape: dict[str, float]
    """Arguments, those that follow from the width included."""
    params: int
    active: int
    """Weights that one token passes through."""
    kv_bytes: float
    """Of key-value cache at `LayoutView.context`, in 16-bit numbers."""
    state_bytes: float
    """Of recurrent state, whatever the context."""
    flops: float
    """For one token that sees `LayoutView.context` tokens."""


class LayerView(_Frozen):
    """One layer."""

    index: int
    mixers: tuple[BlockView, ...]
    """Side by side; none: the layer has no mixer."""
    ffn: BlockView | None
    share: int | None
    """The earlier layer whose weights run here."""

    @property
    def blocks(self) -> tuple[BlockView, ...]:
        """Mixers, then the feed-forward."""
        return self.mixers + ((self.ffn,) if self.ffn else ())

    @property
    def params(self) -> int:
        """Weights of its blocks, whoever owns them."""
        return sum(block.params for block in self.blocks)


class ContextCost(_Frozen):
    """What a context costs."""

    context: int
    kv_bytes: float
    """In 16-bit numbers."""
    flops: float
    """For one token that sees the whole context, output head included."""


class LayoutView(_Frozen):
    """A layout and its arithmetic."""

    id: str
    text: str
    d_model: int
    vocab: int
    tied: bool
    context: int
    """Tokens that the layers' cache and work are told for."""
    layers: tuple[LayerView, ...]
    params: int
    active: int
    non_embedding: int
    state_bytes: float
    contexts: tuple[ContextCost, ...]


def layout_view(layout: Layout, context: int, *further: int) -> LayoutView:
    """The view of a layout.

    Args:
        layout: any.
        context: tokens that the layers' own figures are told for.
        further: contexts to tell in sum beside it and `CONTEXTS`.
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
            ContextCost(context=each, kv_bytes=layout.kv_bytes(each), flops=layout.flops(each))
            for each in sorted({context, *further, *CONTEXTS})
        ),
    )


def _layer(layout: Layout, index: int, context: int) -> LayerView:
    own = layout.own(index)
    return LayerView(
        index=index,
        mixers=tuple(_block(block, layout.d_model, context) for block in own.mixers),
        ffn=_block(own.ffn, layout.d_model, context) if own.ffn else None,
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
