"""Which sampled layouts of a space its runtimes carry, and why they refuse the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nas.core.layout import Layout
from nas.core.space import RuntimeSpace, SearchSpace
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Support
from nas.search.sampling import Sampler

SAMPLES = 200


@dataclass(frozen=True, slots=True)
class RuntimeSupport:
    """What a runtime makes of sampled layouts.

    Args:
        runtime: its name.
        sampled: number of layouts.
        stock: how many run on the runtime as its users install it.
        patched: how many more run on our patched build.
        admitted: how many the space admits, by its `build` key.
        refused_for: why layouts are refused -> how many.
        patched_for: why admitted ones need the patched build -> how many.
        blocks: block kind -> (layouts with it, how many of those are admitted).
    """

    runtime: str
    sampled: int
    stock: int
    patched: int
    admitted: int
    refused_for: dict[str, int]
    patched_for: dict[str, int]
    blocks: dict[str, tuple[int, int]]


def admits(wanted: RuntimeSpace, support: Support) -> bool:
    """Whether a space that says `wanted` admits a layout with this support."""
    return support.verdict == "stock" or (support.verdict == "patched" and wanted.build == "any")


def sampler(space: SearchSpace) -> Sampler:
    """Draws what a search would: layouts that every runtime of the space carries."""
    return Sampler(
        space, lambda layout: all(admits(wanted, RUNTIMES[wanted.name].supports(layout)) for wanted in space.runtimes)
    )


def survey(space: SearchSpace, seed: int = 0) -> list[RuntimeSupport]:
    """Each runtime of the space, over `SAMPLES` layouts that are drawn without regard to runtimes."""
    rng = np.random.default_rng(seed)
    free = Sampler(space)
    layouts = [free.draw(rng) for _ in range(SAMPLES)]
    return [_survey_one(wanted, layouts) for wanted in space.runtimes]


def _survey_one(wanted: RuntimeSpace, layouts: Sequence[Layout]) -> RuntimeSupport:
    supports = [RUNTIMES[wanted.name].supports(layout) for layout in layouts]
    kinds = [{block.kind for layer in layout.layers for block in layer.blocks} for layout in layouts]
    admitted = [admits(wanted, support) for support in supports]
    return RuntimeSupport(
        runtime=wanted.name,
        sampled=len(layouts),
        stock=sum(support.verdict == "stock" for support in supports),
        patched=sum(support.verdict == "patched" for support in supports),
        admitted=sum(admitted),
        refused_for=_reasons(support for support, ok in zip(supports, admitted, strict=True) if not ok),
        patched_for=_reasons(support for support, ok in zip(supports, admitted, strict=True) if ok),
        blocks={
            kind: (
                sum(kind in found for found in kinds),
                sum(ok for found, ok in zip(kinds, admitted, strict=True) if kind in found),
            )
            for kind in sorted(set().union(*kinds))
        },
    )


def _reasons(supports: Iterable[Support]) -> dict[str, int]:
    """Reasons, the commonest first -> how many layouts have it."""
    return dict(Counter(reason for support in supports for reason in support.reasons).most_common())
