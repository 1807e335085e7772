"""Simulates a device: time and memory of a layout, layer by layer.

Each block takes the longer of its arithmetic and its traffic (the roofline model; Williams, Waterman and Patterson
2009), at an efficiency of its kind, plus a fixed overhead. Caches that outgrow the last-level cache cost more per byte,
and so does a change of kind between neighbours. Peak memory counts the largest activation, not the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from benchmarks.search.spaces import CONTEXT, PROMPT
from nas.core.block import Block
from nas.core.layout import Layout

_WEIGHT_BYTES = 0.5625
_COMPUTE, _BANDWIDTH = 4.0e10, 1.2e10
"""Multiply-adds x 2, and bytes, per second."""


class SimulatedDevice:
    """One device of the family.

    Args:
        kinds: block kinds that layouts may use.
        rng: draws its efficiencies, overheads, cache size and costs between neighbours.
    """

    def __init__(self, kinds: Sequence[str], rng: np.random.Generator) -> None:
        self._compute = {kind: _COMPUTE * float(rng.uniform(0.5, 1.0)) for kind in kinds}
        self._traffic = {kind: _BANDWIDTH * float(rng.uniform(0.6, 1.0)) for kind in kinds}
        self._overhead = {kind: float(rng.uniform(5e-6, 6e-5)) for kind in kinds}
        self._hop = {pair: float(rng.uniform(0, 0.25)) for pair in itertools.product(kinds, kinds)}
        self._cache = float(rng.uniform(1.0, 4.0)) * 1e6
        self._spill = float(rng.uniform(1.2, 1.8))

    def figures(self, layout: Layout) -> dict[str, float]:
        """Returns ttft and decode in seconds, memory and size in bytes."""
        table = _WEIGHT_BYTES * layout.d_model * layout.vocab
        ttft, decode, size, cache, activation = 0.0, table / _BANDWIDTH, table, 0.0, 0.0
        before = None
        for layer in layout.layers:
            for block in layer.blocks:
                total, active, stored_bytes, work, width = _arithmetic(block, layout.d_model)
                hop = 1.0 + (self._hop[before, block.kind] if before else 0.0)
                read = (
                    _WEIGHT_BYTES * active + stored_bytes * (self._spill if stored_bytes > self._cache else 1.0)
                ) * hop
                overhead = self._overhead[block.kind]
                decode += max(read / self._traffic[block.kind], work / self._compute[block.kind]) + overhead
                ttft += max(read / self._traffic[block.kind], PROMPT * work * hop / self._compute[block.kind])
                size += _WEIGHT_BYTES * total
                cache += stored_bytes
                activation = max(activation, 8.0 * PROMPT * width)
                before = block.kind
        return {"ttft": ttft, "decode": decode, "memory": size + cache + activation + 8e6, "size": size}


@lru_cache(maxsize=1 << 14)
def _arithmetic(block: Block, d_model: int) -> tuple[float, float, float, float, float]:
    """Returns weights, active weights, bytes kept between tokens, multiply-adds x 2 per token, widest activation."""
    spec = block.spec
    count = spec.count(block, d_model)
    stored_bytes = spec.kv_bytes(block, d_model, CONTEXT, 2.0) + spec.state_bytes(block, d_model)
    arguments = dict(block.args)
    width = float(arguments.get("width") or d_model) * float(arguments.get("top_k") or 1)
    return count.total, count.active, stored_bytes, spec.flops(block, d_model, PROMPT), width
