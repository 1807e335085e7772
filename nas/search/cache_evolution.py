"""Evolution on quality and cache size alone, as STAR does (Thomas et al. 2024, arXiv 2411.17800): to compare with.

What a device would measure plays no part in the choice of parents; what is found is scored on it afterwards.
"""

from __future__ import annotations

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.pareto import ranks
from nas.search.evolution import Evolution, Stock
from nas.search.sampling import Sampler


class CacheEvolution(Evolution):
    """Parents by non-dominated rank on quality and bytes kept between tokens, at the space's longest context."""

    engine = "cache-evolution/1"
    screened = True

    def __init__(self, sampler: Sampler, seed: int) -> None:
        super().__init__(sampler, seed)
        self._quality = [item.name for item in sampler.space.objectives if METRICS[item.metric].source == "proxy"]
        self._context = max(workload.window for workload in sampler.space.workloads.values())

    def parents(self) -> Stock:
        """Whatever has a quality, within the budgets or not."""
        whole = set(self._quality)
        seen = [item for item in self.log.told() if whole <= item.objectives.keys()]
        points = [[*(item.objectives[name] for name in self._quality), self._kept(item.layout)] for item in seen]
        order = zip(ranks(points), seen, strict=True)
        return [(int(rank), item.layout) for rank, item in order if self.sampler.admits(item.layout)]

    def _kept(self, layout: Layout) -> float:
        return layout.kv_bytes(self._context) + layout.state_bytes()
