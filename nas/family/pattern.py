"""What the winners of a search have in common: which mixer stands how deep, and which of them stands for all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.block import Block
from nas.core.layout import Layout

DEPTHS = 8
"""Equal parts of a stack in which shares are told."""


@dataclass(frozen=True, slots=True)
class Winner:
    """A layout that a family may be built from.

    Args:
        layout: as searched or given.
        weight: how much it counts.
        trial: its number in the study, if it is of one.
        objectives: its values there.
    """

    layout: Layout
    weight: float = 1.0
    trial: int | None = None
    objectives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Pattern:
    """What a family is scaled from.

    Args:
        parent: the winner that is nearest to what all have in common.
        distance: share of its mixers and feed-forwards that would have to be others to have the common shares.
        shares: kind of mixer -> [DEPTHS] its share of the layers there, over the winners by their weights.
        winners: whom it was found in.
    """

    parent: Winner
    distance: float
    shares: dict[str, NDArray[np.float64]]
    winners: tuple[Winner, ...]


def find_pattern(winners: Sequence[Winner]) -> Pattern:
    """The shared pattern of at least one winner.

    Each winner's stack is cut into `DEPTHS` equal parts; the common share of a kind in a part is the mean over winners,
    by weight (where nobody has any, they count alike). The parent is the winner with the least total variation distance
    to the common shares, mixers and feed-forwards alike: a layout that was measured and trained, where a mixture of all
    would be none.
    """
    weights = np.array([winner.weight for winner in winners])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(winners), 1 / len(winners))
    mixers, ffns = (_profiles(winners, role) for role in ("mixer", "ffn"))
    common = [{kind: weights @ rows for kind, rows in profiles.items()} for profiles in (mixers, ffns)]
    distances = np.mean(
        [_distances(profiles, mean) for profiles, mean in zip((mixers, ffns), common, strict=True)], axis=0
    )
    best = min(range(len(winners)), key=lambda i: (round(float(distances[i]), 9), -weights[i], i))
    return Pattern(winners[best], float(distances[best]), common[0], tuple(winners))


def mixer_counts(layout: Layout) -> dict[str, int]:
    """Kind -> layers that have it, the commonest first."""
    counts = Counter(block.kind for i in range(layout.depth) for block in layout.own(i).mixers)
    return dict(counts.most_common())


def mixer_blocks(layout: Layout, *kinds: str) -> list[Block]:
    """The mixers, or those of some kinds, first to last, with what follows from the width filled in."""
    blocks = [block for i in range(layout.depth) for block in layout.own(i).mixers]
    return [block.resolve(layout.d_model) for block in blocks if not kinds or block.kind in kinds]


def ffn_ratio(layout: Layout) -> float:
    """Width of the feed-forward that one token passes through / d_model, mean over the layers that have one."""
    widths = [active_width(layer.ffn) for i in range(layout.depth) if (layer := layout.own(i)).ffn is not None]
    return math.fsum(widths) / len(widths) / layout.d_model if widths else 0.0


def active_width(ffn: Block | None) -> int:
    """Hidden width that one token passes through."""
    if ffn is None:
        return 0
    return ffn.int("width") * (ffn.int("top_k") if is_sparse(ffn) else 1)


def is_sparse(ffn: Block | None) -> bool:
    """Whether it is a mixture of experts."""
    return ffn is not None and any(arg.name == "experts" for arg in ffn.spec.args)


def _profiles(winners: Sequence[Winner], role: str) -> dict[str, NDArray[np.float64]]:
    """Kind -> [W, DEPTHS] its share of each part of each winner's stack."""
    found: dict[str, NDArray[np.float64]] = {}
    for row, winner in enumerate(winners):
        layout = winner.layout
        for index in range(layout.depth):
            layer = layout.own(index)
            blocks = layer.mixers if role == "mixer" else tuple(filter(None, (layer.ffn,)))
            for kind in [block.kind for block in blocks] or ["none"]:
                rows = found.setdefault(kind, np.zeros((len(winners), DEPTHS)))
                rows[row] += _overlap(index, layout.depth) / max(1, len(blocks))
    return found


def _overlap(index: int, depth: int) -> NDArray[np.float64]:
    """[DEPTHS] the share of each part of the stack that the layer at `index` takes up."""
    edges = np.linspace(0, 1, DEPTHS + 1)
    low, high = np.maximum(edges[:-1], index / depth), np.minimum(edges[1:], (index + 1) / depth)
    overlap: NDArray[np.float64] = np.clip(high - low, 0, None) * DEPTHS
    return overlap


def _distances(profiles: dict[str, NDArray[np.float64]], common: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """[W] total variation between each winner and the common shares, mean over depth."""
    found: NDArray[np.float64] = sum(np.abs(rows - common[kind]).mean(axis=1) for kind, rows in profiles.items())
    return found / 2
