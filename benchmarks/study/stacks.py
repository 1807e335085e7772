"""Statistics of a set of layouts: mixers by height, feed-forwards, depth."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nas.core.layout import Layout

HEIGHTS = ("bottom", "middle", "top")
"""Thirds of a stack; the bottom is next to the embedding."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Averages over layouts, each of which counts the same.

    Args:
        layouts: their number.
        depth: mean number of layers.
        mixers: third of the stack -> kind of mixer -> share of the layers there.
        layers: kind of mixer -> mean number of layers that have it.
        having: kind of mixer -> share of the layouts that have it at all.
        experts: share of the layouts with a mixture of experts.
    """

    layouts: int
    depth: float
    mixers: dict[str, dict[str, float]]
    layers: dict[str, float]
    having: dict[str, float]
    experts: float

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


def built_of(layouts: Sequence[Layout]) -> Stacks:
    """Returns statistics of `layouts`; at least one."""
    counted = [_at_heights(layout) for layout in layouts]
    kinds = sorted({kind for heights in counted for counts in heights.values() for kind in counts})
    numbers = [Counter(kind for counts in heights.values() for kind in counts.elements()) for heights in counted]
    return Stacks(
        layouts=len(layouts),
        depth=statistics.fmean(layout.depth for layout in layouts),
        mixers={height: _shares([heights[height] for heights in counted], kinds) for height in HEIGHTS},
        layers={kind: statistics.fmean(number[kind] for number in numbers) for kind in kinds},
        having={kind: statistics.fmean(number[kind] > 0 for number in numbers) for kind in kinds},
        experts=statistics.fmean(
            any(layer.ffn is not None and layer.ffn.kind == "moe" for layer in layout.layers) for layout in layouts
        ),
    )


def _at_heights(layout: Layout) -> dict[str, Counter[str]]:
    counts = {height: Counter[str]() for height in HEIGHTS}
    for index in range(layout.depth):
        height = HEIGHTS[int((index + 0.5) / layout.depth * len(HEIGHTS))]
        counts[height].update(mixer.kind for mixer in layout.layer_at(index).mixers)
    return counts


def _shares(counted: Sequence[Counter[str]], kinds: Sequence[str]) -> dict[str, float]:
    """Returns kind -> mean share of the layers in a third, over the layouts with a layer in it."""
    counts = [count for count in counted if count.total()]
    return {
        kind: statistics.fmean(count[kind] / count.total() for count in counts) if counts else 0.0 for kind in kinds
    }
