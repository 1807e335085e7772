"""Made-up devices: what layouts of the demo space would take on them, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.search.proposers import Sampler
from nas.search.proposers.hardware import Costs, Measured
from nas.search.spaces import load_space

SPACE = load_space("lfm2-mixed-demo")
CHAT = SPACE.workloads["chat"]
SECONDS_PER_M = {"conv": 0.9, "gqa": 1.0, "swa": 1.1, "mamba2": 1.6, "swiglu": 0.8, "moe": 1.4}
"""Per million weights that a token passes through."""


def costs(space: SearchSpace = SPACE, unit: str = "ms") -> Costs:
    return Costs(CHAT, [block.kind for block in space.mixers + space.ffn], unit)


def draw(count: int, seed: int = 0) -> list[Layout]:
    sampler, rng = Sampler(SPACE), np.random.default_rng(seed)
    layouts: dict[str, Layout] = {}
    while len(layouts) < count:
        layout = sampler.draw(rng)
        layouts[layout.id] = layout
    return list(layouts.values())


def time_ms(layout: Layout, *, fast: float = 1.0, attention: float = 1.0) -> float:
    """The sum over blocks; those of layers with full attention take 10 % longer, as if the cache were cold."""
    total = 0.4
    for index in range(layout.depth):
        blocks = layout.layer_at(index).blocks
        cold = 1.1 if any(block.kind == "gqa" for block in blocks) else 1.0
        for block in blocks:
            factor = attention if block.kind in ("gqa", "swa") else 1.0
            active = block.spec.count(block, layout.d_model).active
            total += factor * cold * (0.02 + SECONDS_PER_M[block.kind] * active / 1e6)
    return total / fast


def measured(layouts: Sequence[Layout], noise: float = 0.01, seed: int = 0, **device: float) -> Measured:
    rng = np.random.default_rng(seed)
    logs = np.array([math.log(time_ms(layout, **device)) for layout in layouts])
    return Measured(layouts, logs + noise * rng.standard_normal(len(layouts)), np.full(len(layouts), noise))
