"""The reference models, made small: the same code with other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nas.core.layout import Layout, narrow, padded
from nas.train.compare.published import REFERENCES, Decoder, ReferenceModel

_SIZES: dict[str, Any] = {
    "layers": 4, "width": 256, "vocab": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "mamba_heads": 8,
    "attention_layers": (1, 3), "experts": (6, 2, 128), "latent": (64, 32, 32, 32),
}  # fmt: skip
_OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "gemma3": {"layers": 7, "width": 288},  # a whole period of windows, and a width that Q6_K does not divide
    "plm": {"kv_heads": 4},
}


def tiny(reference: ReferenceModel) -> ReferenceModel:
    """The same kind of model with a million weights."""
    shape = reference.shape
    if isinstance(shape, Layout):
        return replace(reference, shape=_tiny_layout(shape))
    sizes = _SIZES | _OF_ARCHITECTURE.get(shape.architecture, {})
    changes = {name: value for name, value in sizes.items() if getattr(shape, name)}
    if "attention.sliding_window" in shape.extra:
        changes["extra"] = {**shape.extra, "attention.sliding_window": 64}
    return replace(reference, shape=replace(shape, **changes))


def _tiny_layout(layout: Layout) -> Layout:
    """The first layers that have every kind of block, two at least, at a width of 256."""
    blocks = _blocks_of(layout)
    for depth in range(2, layout.depth + 1):
        first = Layout.of(layout.d_model, layout.vocab, layout.layers[:depth], tied=layout.tied)
        if _blocks_of(first) == blocks:
            return padded(narrow(first, _SIZES["width"], _SIZES["vocab"]))
    raise AssertionError(layout)


def _blocks_of(layout: Layout) -> frozenset[str]:
    return frozenset(block.kind for layer in layout.layers for block in layer.blocks)


def layouts() -> dict[str, ReferenceModel]:
    """One reference model of each set of blocks, of those that are layouts of ours."""
    references: dict[frozenset[str], ReferenceModel] = {}
    for reference in REFERENCES.values():
        if isinstance(reference.shape, Layout):
            references.setdefault(_blocks_of(reference.shape), reference)
    return {reference.name: reference for reference in references.values()}


def kinds() -> dict[str, ReferenceModel]:
    """One reference model of each kind of graph, of those that are no layouts."""
    references: dict[tuple[str, bool, bool], ReferenceModel] = {}
    for reference in REFERENCES.values():
        if isinstance(reference.shape, Decoder):
            kind = (reference.architecture, bool(reference.shape.experts), "rope.scaling.type" in reference.shape.extra)
            references.setdefault(kind, reference)
    return {reference.name: reference for reference in references.values()}
