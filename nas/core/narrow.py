"""Deploy scale -> proxy scale: the same layout made narrow (design: two scales, kept apart)."""

from __future__ import annotations

from dataclasses import replace

from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout


def narrow(layout: Layout, d_model: int, vocab: int) -> Layout:
    """`layout` at width `d_model` with a vocabulary of its own.

    Widths scale by one factor; head sizes stay >= 16, so there are fewer heads; depth, order and kernels stay.
    Several layouts can map to one proxy: they share its result and are shown as ties. At its own width a layout keeps
    its layers.

    Raises:
        InvalidInput: the proxy would be wider than the layout, or a size is out of range.
    """
    if d_model > layout.d_model:
        raise InvalidInput(f"proxy width {d_model} exceeds the layout's {layout.d_model}")
    if d_model == layout.d_model:
        return replace(layout, vocab=vocab)
    layers = [_narrow_layer(layer, layout.d_model, d_model) for layer in layout.layers]
    return Layout.of(d_model, vocab, layers, tied=layout.tied)


def _narrow_layer(layer: Layer, d_model: int, to: int) -> Layer:
    mixers = tuple(block.spec.narrow(block, d_model, to) for block in layer.mixers)
    ffn = layer.ffn.spec.narrow(layer.ffn, d_model, to) if layer.ffn else None
    return replace(layer, mixers=mixers, ffn=ffn)
