"""What a search space leaves open, in two steps: a frame is chosen for the whole model, then blocks for each layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nas.core.block import Block, Scalar
from nas.core.block_space import EXPANSION, BlockSpace
from nas.core.errors import InvalidInput
from nas.core.space import SearchSpace

Values = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything that is chosen once for a whole layout.

    Args:
        d_model: residual width.
        vocab: rows of the embedding table.
        ffn: kind of feed-forward; None where each layer chooses.
        leading_dense: first layers that stay dense where later ones are mixtures of experts.
        period: layers after which the stack repeats; 0: never.
        knobs: block kind -> values of its model-wide knobs.
    """

    d_model: int
    vocab: int
    ffn: str | None
    leading_dense: int
    period: int
    knobs: tuple[tuple[str, Values], ...]

    def values(self, kind: str) -> Values:
        """Model-wide values of `kind`'s knobs."""
        return dict(self.knobs)[kind]


def ffn_width(expansion: float, d_model: int) -> int:
    """Feed-forward width for an expansion: the nearest multiple of 256, or of 32 where d_model is below 1024.

    256 is the block of llama.cpp's K-quants, 32 that of Q4_0 and 8da4w.
    """
    multiple = 256 if d_model >= 1024 else 32
    return max(multiple, round(expansion * d_model / multiple) * multiple)


class Frames:
    """All frames of a space, as a product of axes, and the blocks each frame allows."""

    def __init__(self, space: SearchSpace) -> None:
        model = space.model
        self.space = space
        self._spaces = {block.kind: block for block in space.mixers + space.ffn}
        self._shared = [
            (block.kind, name)
            for block in self._spaces.values()
            for name, knob in block.knobs.items()
            if knob.scope == "model"
        ]
        ffn: tuple[str | None, ...] = (None,)
        if model.ffn_scope == "model":
            ffn = tuple(block.kind for block in space.ffn)
        self.axes: tuple[tuple[Scalar | str | None, ...], ...] = (
            model.d_model.choices,
            model.vocab.choices,
            ffn,
            model.leading_dense.choices,
            space.pattern.period.choices,
            *(self._spaces[kind].knobs[name].choices for kind, name in self._shared),
        )
        self.count = math.prod(len(axis) for axis in self.axes)
        self._blocks: dict[tuple[str, int, Values], tuple[Block, ...]] = {}

    def at(self, picks: Sequence[int]) -> Frame:
        """The frame with choice number `picks[i]` on axis i."""
        values = [axis[pick] for axis, pick in zip(self.axes, picks, strict=True)]
        d_model, vocab, ffn, leading, period = values[:5]
        shared = dict(zip(self._shared, values[5:], strict=True))
        knobs = tuple(
            (kind, tuple((name, _scalar(value)) for (owner, name), value in shared.items() if owner == kind))
            for kind in self._spaces
        )
        kind = None if ffn is None else str(ffn)
        return Frame(int(d_model or 0), int(vocab or 0), kind, int(leading or 0), int(period or 0), knobs)

    def picks(self, frame: Frame) -> list[int]:
        """The choice numbers of `frame`: the inverse of `at`."""
        shared = [dict(frame.values(kind))[name] for kind, name in self._shared]
        own = (frame.d_model, frame.vocab, frame.ffn, frame.leading_dense, frame.period)
        return [axis.index(value) for axis, value in zip(self.axes, (*own, *shared), strict=True)]

    def all(self) -> Iterator[Frame]:
        """Every frame, first axis slowest."""
        for picks in itertools.product(*(range(len(axis)) for axis in self.axes)):
            yield self.at(picks)

    def blocks(self, frame: Frame, kind: str) -> tuple[Block, ...]:
        """The blocks of `kind` that a layer may use in `frame`, in canonical form, without those that cannot stand."""
        key = (kind, frame.d_model, frame.values(kind))
        if key not in self._blocks:
            self._blocks[key] = tuple(dict.fromkeys(_blocks(self._spaces[kind], *key[1:])))
        return self._blocks[key]


def _blocks(space: BlockSpace, d_model: int, shared: Values) -> Iterator[Block]:
    free = [name for name, knob in space.knobs.items() if knob.scope == "layer"]
    for choice in itertools.product(*(space.knobs[name].choices for name in free)):
        values = dict(shared) | dict(zip(free, choice, strict=True))
        if EXPANSION in values:
            values["width"] = ffn_width(values.pop(EXPANSION), d_model)
        try:
            yield Block.of(space.kind, **values).canonical(d_model)
        except InvalidInput:
            continue  # such as key-value heads that do not divide the query heads


def _scalar(value: Scalar | str | None) -> Scalar:
    assert isinstance(value, int | float), value
    return value
