"""A stack of another depth or width in the same pattern: which layer stands where, and how wide its blocks are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from nas.blocks.attention import AttentionKind, divisors
from nas.blocks.mamba2 import Mamba2
from nas.core.block import Block
from nas.core.layout import Layer

Caches = Literal["heads", "ratio"]
"""What attention keeps as the width grows: its key-value heads, and so the cache of a token, or its ratio of heads."""

MAX_GROUP = 8
"""Query heads to a key-value head up to which `heads` keeps the number of these: as in Llama 3 70B."""


def stretched(layers: Sequence[Layer], depth: int) -> tuple[int, ...]:
    """For each of `depth` layers, which of `layers` it is made after.

    Layers with the same kinds of blocks form a class. Each class keeps its share of the layers (largest remainders, at
    least one each) and its density along the stack: positions are quantiles of where the class stands now, so that
    attention that grows denser towards the end goes on to do so, and nothing comes in pairs where it stood alone.

    Raises:
        ValueError: there are more classes than layers.
    """
    if depth == len(layers):
        return tuple(range(depth))
    classes: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        classes[(*(block.kind for block in layer.mixers), "+" if layer.ffn else "-")].append(index)
    counts = apportion([len(members) for members in classes.values()], depth)
    placed: list[tuple[float, int]] = []
    for members, count in zip(classes.values(), counts, strict=True):
        for rank in range(count):
            share = (rank + 0.5) / count
            after = members[min(len(members) - 1, int(share * len(members)))]
            placed.append((_quantile(members, len(layers), share), after))
    return tuple(after for _, after in sorted(placed))


def apportion(counts: Sequence[int], seats: int) -> list[int]:
    """`seats` shared out as `counts` are, at least one each (largest remainders, Hamilton).

    Raises:
        ValueError: fewer seats than counts.
    """
    if seats < len(counts):
        raise ValueError(f"{len(counts)} kinds of layers do not fit into {seats} layers")
    exact = [count * seats / sum(counts) for count in counts]
    given = [max(1, math.floor(share)) for share in exact]
    while sum(given) != seats:
        short = sum(given) < seats
        movable = [i for i in range(len(given)) if short or given[i] > 1]
        pick = max(movable, key=lambda i: (exact[i] - given[i]) * (1 if short else -1))
        given[pick] += 1 if short else -1
    return given


def _quantile(members: Sequence[int], depth: int, share: float) -> float:
    """Relative depth below which `share` of a class stands, each member spread evenly to halfway to its neighbours.

    One that stands alone is spread to halfway to the ends: what was near the end stays there, without coming in pairs.
    """
    middle = (np.array(members) + 0.5) / depth
    between = (middle[1:] + middle[:-1]) / 2
    first = max(0.0, 2 * middle[0] - between[0]) if len(between) else middle[0] / 2
    last = min(1.0, 2 * middle[-1] - between[-1]) if len(between) else (middle[-1] + 1) / 2
    edges = np.concatenate([[first], between, [last]])
    return float(np.interp(share, np.linspace(0, 1, len(edges)), edges))


def width_step(blocks: Sequence[Block]) -> int:
    """Widths that the heads of `blocks` (resolved) fit into, as multiples of the quantisers' 32."""
    sizes = {block.int("head_dim") for block in blocks if isinstance(block.spec, AttentionKind)}
    return math.lcm(32, *sizes)


def strain(block: Block, scaled: Block, caches: Caches) -> float:
    """How far attention is from what it should keep, as a logarithm; 0 for other kinds. Both blocks are resolved."""
    if not isinstance(block.spec, AttentionKind):
        return 0.0
    if caches == "heads" and scaled.int("heads") > block.int("heads"):
        return abs(math.log(scaled.int("kv_heads") / block.int("kv_heads")))
    before, now = (each.int("heads") / each.int("kv_heads") for each in (block, scaled))
    return abs(math.log(now / before))


def scaled_mixer(block: Block, d_model: int, to: int, caches: Caches) -> Block:
    """The mixer at width `to`: heads keep their size, so that their number changes; other kinds scale as in proxies.

    Raises:
        InvalidInput: the kind has no such block.
    """
    follows = isinstance(block.spec, Mamba2) and "heads" not in dict(block.given)
    if to == d_model or follows:
        return block
    if not isinstance(block.spec, AttentionKind):
        return block.spec.narrow(block, d_model, to)
    full = block.resolve(d_model)
    heads, kv_heads, size = full.int("heads"), full.int("kv_heads"), full.int("head_dim")
    group = heads // kv_heads
    wanted = max(1, round(heads * to / d_model))
    groups = divisors(wanted)
    if caches == "heads" and to > d_model:
        allowed = [each for each in groups if each <= max(MAX_GROUP, group)]
        group = min(allowed, key=lambda each: abs(math.log(wanted / each / kv_heads)))
    else:
        group = min(groups, key=lambda each: (abs(math.log(each / group)), -each))
    return block.replace(heads=wanted, kv_heads=wanted // group, head_dim=size)
