"""The layouts of the study: equal in width and, within 2 %, in weights; unlike in kinds of blocks and their order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from nas.core.errors import InvalidInput
from nas.core.layout import Layout

LFM2 = ["C3", "C3", "A8/4", "C3", "C3", "A8/4", "C3", "C3", "A8/4", "C3", "A8/4", "C3", "A8/4", "C3", "A8/4", "C3"]
"""The 16 mixers of LFM2-350M to 2.6B, at a width of 512."""
MIXERS = {
    "conv": "C3",
    "gqa": "A8/4",
    "swa": "W8/4@128",
    "mamba2": "M64",
    "mlstm": "X8",
    "gdn": "D8",
}
"""Kind -> the block of it."""
_WEIGHTS = 38_300_000
"""Of LFM2's pattern with a feed-forward of 1.5 times the width."""
_OFF = 0.02
_SWIGLU = range(256, 3200, 128)
_EXPERTS = range(64, 768, 32)
_EXPERT = "moe:8x2"


def draw(count: int, seed: int = 0) -> list[Layout]:
    """Returns `count` layouts, LFM2's pattern first.

    Then come that pattern with another kind in place of convolutions or with experts, stacks of mostly one kind, and
    random ones.
    """
    rng = random.Random(seed)
    layouts: dict[str, Layout] = {}
    for mixers, experts in itertools.chain(_patterns(), iter(lambda: _random(rng), None)):
        if len(layouts) == count:
            break
        try:
            layout = sized(mixers, experts)
        except InvalidInput:  # no width of feed-forwards gives the size
            continue
        layouts[layout.id] = layout
    return list(layouts.values())


def sized(mixers: Sequence[str], experts: Sequence[bool]) -> Layout:
    """Returns the layout of these mixers whose weights are next to `_WEIGHTS`, by the width of its feed-forwards.

    Args:
        mixers: of each layer.
        experts: whether each layer's feed-forward has experts, of two thirds of the dense ones' width in all.

    Raises:
        InvalidInput: none is within 2 %.
    """
    candidates = [_layout(mixers, experts, dense) for dense in _SWIGLU]
    layout = min(candidates, key=lambda layout: abs(layout.params.total - _WEIGHTS))
    if abs(layout.params.total / _WEIGHTS - 1) > _OFF:
        raise InvalidInput(f"{layout} has {layout.params.total:,} weights")
    return layout


def _layout(mixers: Sequence[str], experts: Sequence[bool], dense: int) -> Layout:
    expert = min(_EXPERTS, key=lambda width: abs(width - dense / 4))
    layers = [f"{mixer}+{_EXPERT}:{expert}" if moe else mixer for mixer, moe in zip(mixers, experts, strict=True)]
    return Layout.parse(f"d512 v8192 ffn=swiglu:{dense} [{' '.join(layers)}]")


def _patterns() -> Iterator[tuple[list[str], list[bool]]]:
    for block in MIXERS.values():
        mixers = [block if mixer == "C3" else mixer for mixer in LFM2]
        yield mixers, [False] * len(LFM2)
    yield LFM2, [layer >= 2 for layer in range(len(LFM2))]  # as in LFM2-8B-A1B
    for block in MIXERS.values():  # shallow, mostly of one kind, one attention at the end
        yield [block] * 9 + ["A8/4"], [False] * 10
    yield LFM2[::-1], [False] * len(LFM2)
    yield sorted(LFM2), [False] * len(LFM2)
    yield sorted(LFM2, reverse=True), [False] * len(LFM2)


def _random(rng: random.Random) -> tuple[list[str], list[bool]]:
    """Returns a stack of two or three kinds, repeated with a period or shuffled, with at least one full attention."""
    depth = rng.choice((8, 10, 12, 14, 16))
    kinds = rng.sample(list(MIXERS), rng.choice((1, 2, 2)))
    period = [MIXERS[kind] for kind in kinds for _ in range(rng.randint(1, 3))] + ["A8/4"]
    mixers = (period * depth)[:depth]
    if rng.random() < 0.4:
        rng.shuffle(mixers)
    if "A8/4" not in mixers:
        mixers[-1] = "A8/4"
    share = rng.choice((0.0, 0.0, 0.25, 0.5, 1.0))
    return mixers, [layer > 0 and rng.random() < share for layer in range(depth)]
