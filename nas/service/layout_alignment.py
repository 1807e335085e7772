"""Several layouts side by side: which layers of theirs stand for each other."""

from __future__ import annotations

from collections.abc import Sequence

from nas.core.layout import Layout

Row = tuple[int | None, ...]
"""For each layout the index of its layer, or None for a gap."""

_GAP = 2


def align(layouts: Sequence[Layout]) -> list[Row]:
    """Aligns every layout with the first, layer by layer, in order, at the least cost.

    Pairs cost 1 for another mixer and 1 for another feed-forward, gaps 2: Needleman and Wunsch (1970). On a tie,
    layers are paired as early as possible. What the first layout lacks stands between its layers, those of several
    layouts side by side.

    Args:
        layouts: one or more.
    """
    first, others = layouts[0], layouts[1:]
    matched = [_against(first, other) for other in others]
    rows: list[Row] = []
    for index in range(first.depth + 1):
        between = [gaps[index] for _, gaps in matched]
        for place in range(max((len(gap) for gap in between), default=0)):
            rows.append((None, *(gap[place] if place < len(gap) else None for gap in between)))
        if index < first.depth:
            rows.append((index, *(pairs[index] for pairs, _ in matched)))
    return rows


def differs(layouts: Sequence[Layout], row: Row) -> bool:
    """Whether a row's layers are not all the same: of another kind or shape, or missing in one."""
    return len({None if index is None else layout.own(index) for layout, index in zip(layouts, row, strict=True)}) > 1


def _against(first: Layout, other: Layout) -> tuple[list[int | None], list[list[int]]]:
    """For each layer of `first` its partner, and for each place between its layers those of `other` without one."""
    costs = _costs(first, other)
    pairs: list[int | None] = []
    gaps: list[list[int]] = [[]]
    i = j = 0
    while i < first.depth or j < other.depth:
        rest = costs[i][j]
        if i < first.depth and j < other.depth and rest == costs[i + 1][j + 1] + _cost(first, i, other, j):
            pairs.append(j)
            gaps.append([])
            i, j = i + 1, j + 1
        elif i < first.depth and rest == costs[i + 1][j] + _GAP:
            pairs.append(None)
            gaps.append([])
            i += 1
        else:
            gaps[-1].append(j)
            j += 1
    return pairs, gaps


def _costs(first: Layout, other: Layout) -> list[list[int]]:
    """[i][j]: the least cost of what follows layer `i` of `first` and layer `j` of `other`."""
    costs = [
        [_GAP * (first.depth - i + other.depth - j) for j in range(other.depth + 1)] for i in range(first.depth + 1)
    ]
    for i in reversed(range(first.depth)):
        for j in reversed(range(other.depth)):
            paired = costs[i + 1][j + 1] + _cost(first, i, other, j)
            costs[i][j] = min(paired, costs[i + 1][j] + _GAP, costs[i][j + 1] + _GAP)
    return costs


def _cost(first: Layout, i: int, other: Layout, j: int) -> int:
    a, b = first.own(i), other.own(j)
    return int(a.mixers != b.mixers) + int(a.ffn != b.ffn)
