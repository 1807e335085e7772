"""Which weight counts a search space can reach: what makes an impossible budget an error and a tight one fast.

The layers of a frame cost what their blocks cost, so the least and greatest count at a depth follow from the cheapest
and dearest blocks, as many of each kind as the limits allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.frame import Frame, Frames
from nas.core.space import DENSE, Range, SearchSpace

MEASURES = ("total", "active", "non_embedding")
_SCAN = 50_000
"""Frames and depths looked at; in a larger space, a budget is not called impossible before sampling tries it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Least and greatest weight counts, each in the order of `MEASURES`."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    def __or__(self, other: Span) -> Span:
        low = tuple(map(min, self.low, other.low))
        return Span(low, tuple(map(max, self.high, other.high)))


@lru_cache(maxsize=1 << 16)
def block_cost(block: Block, d_model: int) -> tuple[int, int, int]:
    """Weights of a block with its pre-norm, in the order of `MEASURES`."""
    count = block.spec.count(block, d_model)
    return count.total + d_model, count.active + d_model, count.total + d_model


def frame_cost(frame: Frame, tied: bool) -> tuple[int, int, int]:
    """Weights outside the layers: tables and final norm, in the order of `MEASURES`."""
    tables = frame.d_model * frame.vocab * (1 if tied else 2)
    return frame.d_model + tables, frame.d_model + tables, frame.d_model


def span(frames: Frames, frame: Frame, depth: int) -> Span | None:
    """The weight counts that layouts of `frame` at `depth` lie between; None where there is no such layout.

    Exact for each count by itself unless the stack repeats or the feed-forward is chosen per layer; then it is wider
    than the truth.
    """
    space = frames.space
    costs = {
        block.kind: [block_cost(option, frame.d_model) for option in frames.blocks(frame, block.kind)]
        for block in space.mixers + space.ffn
    }
    limits = space.limits if frame.ffn is None else _counts(space, frame, frame.ffn, depth)
    if limits is None:
        return None
    mixers = _role_span({block.kind: costs[block.kind] for block in space.mixers}, space.limits, depth)
    kinds = limits if frame.ffn else [block.kind for block in space.ffn]
    ffn = _role_span({kind: costs[kind] for kind in kinds}, limits, depth)
    if mixers is None or ffn is None:
        return None
    base = frame_cost(frame, space.model.tied)
    low = tuple(map(sum, zip(base, mixers.low, ffn.low, strict=True)))
    return Span(low, tuple(map(sum, zip(base, mixers.high, ffn.high, strict=True))))


def depths(frames: Frames, frame: Frame) -> tuple[int, ...]:
    """The depths at which `frame` can meet the parameter budget."""
    found = ((int(depth), span(frames, frame, int(depth))) for depth in frames.space.model.depth.choices)
    return tuple(depth for depth, reach in found if reach is not None and _overlaps(frames.space, reach))


def check_reachable(space: SearchSpace) -> None:
    """Refuses a space that holds no layout, as far as counting can tell.

    Raises:
        InvalidInput: with the range of weights that the choices reach; `where` is the key in the space.
    """
    frames = Frames(space)
    reached: Span | None = None
    heights = space.model.depth.choices
    for frame, depth in itertools.islice(((f, d) for f in frames.all() for d in heights), _SCAN):
        reach = span(frames, frame, int(depth))
        if reach is not None and _overlaps(space, reach):
            return
        reached = reached | reach if reached and reach else reached or reach
    if frames.count * len(heights) <= _SCAN:
        raise _unreachable(space, reached)


def _unreachable(space: SearchSpace, reached: Span | None) -> InvalidInput:
    if reached is None:
        where = "limits" if space.limits else "model.depth"
        return InvalidInput("no layout meets the limits at any depth", where=where)
    spans = {name: (reached.low[i], reached.high[i]) for i, name in enumerate(MEASURES)}
    for name, (low, high) in spans.items():
        wanted = getattr(space.model.params, name)
        if low > (high if wanted.max is None else wanted.max) or high < wanted.min:
            text = f"impossible parameter budget: the choices reach {low:,} to {high:,} weights ({name})"
            return InvalidInput(text, where=f"model.params.{name}")
    text = "; ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in spans.items())
    message = f"impossible parameter budget: no one choice of depth and widths meets all of it; reached: {text}"
    return InvalidInput(message, where="model.params")


def _overlaps(space: SearchSpace, reach: Span) -> bool:
    budget = space.model.params
    wanted = (budget.total, budget.active, budget.non_embedding)
    return all(
        high >= want.min and (want.max is None or low <= want.max)
        for want, low, high in zip(wanted, reach.low, reach.high, strict=True)
    )


def _counts(space: SearchSpace, frame: Frame, ffn: str, depth: int) -> dict[str, Range] | None:
    """How often each feed-forward kind stands in a stack whose kind is chosen once; None: the limits forbid it."""
    lead = min(frame.leading_dense, depth) if ffn != DENSE else 0
    counts = {ffn: depth - lead} | ({DENSE: lead} if lead else {})
    for block in space.ffn:
        if not space.limits.get(block.kind, Range()).holds(counts.get(block.kind, 0)):
            return None
    return {kind: Range(min=count, max=count) for kind, count in counts.items()}


def _role_span(costs: Mapping[str, list[tuple[int, int, int]]], limits: Mapping[str, Range], depth: int) -> Span | None:
    if any(limits[kind].min for kind, found in costs.items() if not found and kind in limits):
        return None
    low, high = [], []
    for measure in range(len(MEASURES)):
        ranges = {kind: [cost[measure] for cost in found] for kind, found in costs.items() if found}
        least = _fill(((min(x), limits.get(kind, Range())) for kind, x in ranges.items()), depth)
        most = _fill(((-max(x), limits.get(kind, Range())) for kind, x in ranges.items()), depth)
        if least is None or most is None:
            return None
        low.append(least)
        high.append(-most)
    return Span(tuple(low), tuple(high))


def _fill(kinds: Iterable[tuple[int, Range]], depth: int) -> int | None:
    """The least sum of `depth` costs that takes each kind as often as its range allows; None where none does."""
    ordered = sorted(kinds, key=lambda kind: kind[0])
    left = depth - sum(limit.min for _, limit in ordered)
    total = sum(cost * limit.min for cost, limit in ordered)
    for cost, limit in ordered:
        if left <= 0:
            break
        take = left if limit.max is None else min(left, limit.max - limit.min)
        total, left = total + cost * take, left - take
    return total if left == 0 else None
