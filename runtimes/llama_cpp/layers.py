"""A layout seen as GGUF sees it: one mixer and one feed-forward per layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from nas.core.block import Block
from nas.core.layout import Layout

ATTENTION = ("gqa", "swa")


def mixers(layout: Layout) -> list[Block]:
    """The mixer of each layer, resolved, of a layout that passed the rules of shape."""
    found = [layer.mixer for layer in layout.layers]
    return [block.resolve(layout.d_model) for block in found if block]


def feed_forwards(layout: Layout) -> list[Block]:
    """The feed-forward of each layer, resolved, of a layout that passed the rules of shape."""
    return [layer.ffn.resolve(layout.d_model) for layer in layout.layers if layer.ffn]


def of_kind(blocks: Iterable[Block], *kinds: str) -> list[Block]:
    """Those of some kinds."""
    return [block for block in blocks if block.kind in kinds]


def one_per_model(
    what: str, blocks: Iterable[Block], value: Callable[[Block], Hashable], build: str = "stock llama.cpp"
) -> Iterable[str]:
    """The reason, if any, that blocks differ in what a build stores once."""
    values = list(dict.fromkeys(map(value, blocks)))
    if len(values) > 1:
        yield f"more than one {what} ({', '.join(map(str, values))}): {build} has one per model"
