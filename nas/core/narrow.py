"""Deploy scale -> proxy scale: the same layout made narrow (design: two scales, kept apart)."""

from __future__ import annotations

from dataclasses import replace

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout


def narrow(layout: Layout, d_model: int, vocab: int, length_ratio: float = 1.0) -> Layout:
    """`layout` at width `d_model` with a vocabulary of its own.

    Widths scale by one factor; head sizes stay >= 16, so there are fewer heads; depth, order and kernels stay.
    Several layouts can map to one proxy: they share its result and are shown as ties. At its own width a layout keeps
    its layers, so that a proxy is its own proxy.

    Args:
        layout: at deploy scale, or already narrow.
        d_model: width of the proxy.
        vocab: its rows of the embedding table.
        length_ratio: length of the proxy's sequences / of those that the layout is meant for; attention windows
            shrink with it, so that they stay the same share of a sequence.

    Raises:
        InvalidInput: the proxy would be wider than the layout, or a size is out of range.
    """
    if d_model > layout.d_model:
        raise InvalidInput(f"proxy width {d_model} exceeds the layout's {layout.d_model}")
    if d_model == layout.d_model:
        return replace(layout, vocab=vocab)
    layers = [_narrow_layer(layer, layout.d_model, d_model, length_ratio) for layer in layout.layers]
    return Layout.of(d_model, vocab, layers, tied=layout.tied)


def _narrow_layer(layer: Layer, d_model: int, to: int, length_ratio: float) -> Layer:
    def fit(block: Block) -> Block:
        return block.spec.shorten(block.spec.narrow(block, d_model, to), length_ratio)

    return replace(layer, mixers=tuple(map(fit, layer.mixers)), ffn=fit(layer.ffn) if layer.ffn else None)
