"""Layouts: what the search proposes.

A layout is data: width, vocabulary and one `Layer` per depth. It has a canonical JSON form, whose SHA-256 is its id,
and a one-line string (`nas.core.layout_text`). Its arithmetic asks each block's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from nas.core.block import BLOCKS, Block, Count, Role, Scalar
from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput

MAX_DEPTH = 1024
MAX_WIDTH = 1 << 16
MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class Layer:
    """One residual layer: mixers side by side, then a feed-forward.

    Args:
        mixers: run in parallel on one pre-norm; none: the layer has no mixer.
        ffn: the feed-forward, or None.
        share: the layer is a second use of that earlier layer's weights (0-based); it has no blocks of its own.
    """

    mixers: tuple[Block, ...] = ()
    ffn: Block | None = None
    share: int | None = None

    @property
    def mixer(self) -> Block | None:
        """The layer's only mixer, or None where it has none.

        Raises:
            AssertionError: several run in parallel.
        """
        assert len(self.mixers) <= 1, "layer has parallel mixers"
        return self.mixers[0] if self.mixers else None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Mixers, then the feed-forward."""
        return self.mixers + ((self.ffn,) if self.ffn else ())


@dataclass(frozen=True, slots=True)
class Params:
    """Weights of a layout, norms included.

    Args:
        total: all of them; tied embeddings count once.
        active: those that one token passes through.
        non_embedding: total without embedding and output tables.
    """

    total: int
    active: int
    non_embedding: int


@dataclass(frozen=True)
class Layout:
    """A decoder-only stack. Build one with `Layout.of`, `Layout.parse` or `Layout.from_json`: they check it.

    Args:
        d_model: residual width.
        vocab: rows of the embedding table.
        layers: first to last.
        tied: whether the output head is the embedding table.
    """

    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = True

    @staticmethod
    def of(d_model: int, vocab: int, layers: Sequence[Layer], *, tied: bool = True) -> Layout:
        """A checked layout in canonical form.

        Raises:
            InvalidInput: a size out of range, or a layer that cannot stand where it does.
        """
        if not 32 <= d_model <= MAX_WIDTH or d_model % 32:
            raise InvalidInput(
                f"d_model must be a multiple of 32 (the quantisers' block) up to {MAX_WIDTH}, not {d_model}"
            )
        if not 2 <= vocab <= MAX_VOCAB:
            raise InvalidInput(f"vocab must be in [2, {MAX_VOCAB}], not {vocab}")
        if not 1 <= len(layers) <= MAX_DEPTH:
            raise InvalidInput(f"a layout has 1 to {MAX_DEPTH} layers, not {len(layers)}")
        checked = tuple(_checked_layer(layer, i, layers, d_model) for i, layer in enumerate(layers))
        return Layout(d_model, vocab, checked, tied)

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout a one-line string names; see `nas.core.layout_text`."""
        from nas.core.layout_text import parse_layout

        return parse_layout(text)

    def format(self) -> str:
        """The one-line string; `Layout.parse(layout.format()) == layout`."""
        from nas.core.layout_text import format_layout

        return format_layout(self)

    def __str__(self) -> str:
        return self.format()

    def to_json(self) -> dict[str, Any]:
        """Canonical form: defaults left out, so that equal layouts give equal JSON."""
        from nas.core.layout_json import layout_to_json

        return layout_to_json(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` wrote; see `nas.core.layout_json`."""
        from nas.core.layout_json import layout_from_json

        return layout_from_json(data)

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits; people see 12."""
        return content_hash(self.to_json())

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def own(self, index: int) -> Layer:
        """The layer whose weights run at depth `index`: itself, or the one it shares."""
        layer = self.layers[index]
        return layer if layer.share is None else self.layers[layer.share]

    def cache_source(self, index: int, mixer: int) -> tuple[int, int] | None:
        """Depth and mixer whose cache the mixer `mixer` at depth `index` reads (`kv=n`); None: its own, if any."""
        block = self.own(index).mixers[mixer]
        source = dict(block.given).get("kv")
        if source is None:
            return None
        owner = _cache_owner(block, self.layers[int(source)], self.d_model)
        assert owner is not None, "Layout.of checked it"
        return int(source), owner

    @cached_property
    def params(self) -> Params:
        """Weight counts, equal to those of the torch module."""
        total = active = self.d_model  # the final norm
        for layer in self.layers:
            counts = [_count(block, self.d_model) for block in layer.blocks]
            norms = self.d_model * (bool(layer.mixers) + (layer.ffn is not None))
            total += norms + sum(count.total for count in counts)
            active += norms + sum(count.active for count in counts)
        for index, layer in enumerate(self.layers):
            if layer.share is not None:
                active += _active(self.own(index), self.d_model)
        table = self.d_model * self.vocab
        tables = table if self.tied else 2 * table
        return Params(total + tables, active + tables, total)

    def kv_bytes(self, context: int, element: float = 2.0) -> float:
        """Bytes of key-value cache at `context` tokens; `element` bytes a number (2: f16)."""
        return self._sum(lambda block: block.spec.kv_bytes(block, self.d_model, context, element))

    def state_bytes(self) -> float:
        """Bytes of recurrent state (float32), whatever the context."""
        return self._sum(lambda block: block.spec.state_bytes(block, self.d_model))

    def flops(self, context: int) -> float:
        """Multiply-adds x 2 for one token that sees `context` tokens, output head included."""
        return self._sum(lambda block: block.spec.flops(block, self.d_model, context)) + 2.0 * self.d_model * self.vocab

    def _sum(self, part: Callable[[Block], float]) -> float:
        return sum(part(block) for i in range(self.depth) for block in self.own(i).blocks)


def _active(layer: Layer, d_model: int) -> int:
    norms = d_model * (bool(layer.mixers) + (layer.ffn is not None))
    return norms + sum(_count(block, d_model).active for block in layer.blocks)


@lru_cache(maxsize=1 << 14)
def _count(block: Block, d_model: int) -> Count:
    return block.spec.count(block, d_model)


def _checked_layer(layer: Layer, index: int, layers: Sequence[Layer], d_model: int) -> Layer:
    try:
        if layer.share is not None:
            return _checked_share(layer, index, layers)
        for block in layer.mixers:
            _check_kv_source(block, index, layers, d_model)
        return _canonical_layer(layer, d_model)
    except InvalidInput as error:
        raise InvalidInput(f"layer {index}: {error.message}") from error


@lru_cache(maxsize=1 << 14)
def _canonical_layer(layer: Layer, d_model: int) -> Layer:
    for block in layer.mixers:
        _check_role(block, "mixer")
    if layer.ffn:
        _check_role(layer.ffn, "ffn")
    if not layer.blocks:
        raise InvalidInput("a layer needs a mixer or a feed-forward")
    mixers = tuple(block.canonical(d_model) for block in layer.mixers)
    return Layer(mixers, layer.ffn.canonical(d_model) if layer.ffn else None)


def _checked_share(layer: Layer, index: int, layers: Sequence[Layer]) -> Layer:
    if layer.blocks:
        raise InvalidInput("a layer that shares weights has no blocks of its own")
    if not 0 <= (layer.share or 0) < index or layers[layer.share or 0].share is not None:
        raise InvalidInput(f"^{layer.share} must name an earlier layer with weights of its own")
    return layer


def _check_role(block: Block, role: Role) -> None:
    if BLOCKS[block.kind].role != role:
        raise InvalidInput(f"{block.kind} is no {role}")


def _check_kv_source(block: Block, index: int, layers: Sequence[Layer], d_model: int) -> None:
    source = dict(block.given).get("kv")
    if source is None:
        return
    if source >= index or _cache_owner(block, layers[int(source)], d_model) is None:
        shape = ", ".join(block.spec.cache_args)
        raise InvalidInput(f"kv={source} must name an earlier layer with a {block.kind} cache of the same {shape}")


def _cache_owner(reader: Block, layer: Layer, d_model: int) -> int | None:
    """The first mixer of `layer` whose cache `reader` can read."""
    for j, mixer in enumerate(layer.mixers):
        owns = mixer.kind == reader.kind and mixer.get("kv") is None
        if owns and _cache_shape(mixer, d_model) == _cache_shape(reader, d_model):
            return j
    return None


def _cache_shape(block: Block, d_model: int) -> list[Scalar | None]:
    resolved = block.resolve(d_model)
    return [resolved.get(name) for name in block.spec.cache_args]
