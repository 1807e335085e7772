"""Proposers without a model: evolution by non-dominated rank, evolution as STAR does it, and random search."""

from __future__ import annotations

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.pareto import ranks
from nas.search.proposers.mutation import crossover, mutate
from nas.search.proposers.sampling import Rng, Sampler, pick
from nas.search.proposers.state import BaseProposer, Child, SearchState

Stock = list[tuple[int, Layout]]
"""Layouts with their ranks, 0 is best."""

_CROSSOVER = 0.3
_TOURNAMENT = 3
_RANDOM = 0.1
"""Share of children without parents, so that no part of the space is out of reach."""


class Evolution(BaseProposer):
    """A steady-state genetic search; infeasible layouts breed only until there are feasible ones to beat them."""

    engine = "evolution/2"

    def propose(self, rng: Rng) -> Child:
        if rng.random() < _RANDOM:
            return self.sampler.draw(rng), "random", ()
        return breed(self.parents(), self.sampler, rng)

    def parents(self) -> Stock:
        """Returns the layouts to breed from."""
        return stock(self.log, self.sampler)


def stock(log: SearchState, sampler: Sampler) -> Stock:
    """Returns the known layouts inside the space, with ranks."""
    return [(rank, layout) for rank, layout in log.parents() if sampler.admits(layout)]


def breed(parents: Stock, sampler: Sampler, rng: Rng) -> Child:
    """Returns a child of `parents`; a random layout where there are none."""
    if not parents:
        return sampler.draw(rng), "random", ()
    first = tournament(parents, rng)
    if len(parents) > 1 and rng.random() < _CROSSOVER:
        second = tournament(parents, rng)
        layout, operator = crossover(first, second, sampler, rng)
        return layout, operator, tuple(dict.fromkeys((first.id, second.id)))
    layout, operator = mutate(first, sampler, rng)
    return layout, operator, (first.id,)


def tournament(parents: Stock, rng: Rng) -> Layout:
    """Returns the best of a few picks; the first of them on a tie."""
    picks = [pick(parents, rng) for _ in range(_TOURNAMENT)]
    return min(picks, key=lambda pick: pick[0])[1]


class CacheEvolution(Evolution):
    """Evolution on quality and cache size alone, as STAR does (Thomas et al. 2024, arXiv 2411.17800), to compare with.

    Parents are ranked by quality and bytes kept between tokens at the space's longest context; figures of devices play
    no part.
    """

    engine = "cache-evolution/1"

    def __init__(self, sampler: Sampler, seed: int) -> None:
        super().__init__(sampler, seed)
        self._quality = [item.name for item in sampler.space.objectives if METRICS[item.metric].source == "proxy"]
        self._context = max(workload.window for workload in sampler.space.workloads.values())

    def parents(self) -> Stock:
        """Returns all layouts with a quality, within the budgets or not."""
        whole = set(self._quality)
        observations = [item for item in self.log.sorted_observations() if whole <= item.objectives.keys()]
        points = [
            [
                *(item.objectives[name] for name in self._quality),
                item.layout.kv_bytes(self._context) + item.layout.state_bytes(),
            ]
            for item in observations
        ]
        order = zip(ranks(points), observations, strict=True)
        return [(int(rank), item.layout) for rank, item in order if self.sampler.admits(item.layout)]


class RandomSearch(BaseProposer):
    """Draws of `Sampler.draw`; observations only keep it from proposing a layout twice."""

    engine = "random/1"

    def seeds(self) -> list[Layout]:
        """Returns none: the baseline has no heuristic start."""
        return []

    def propose(self, rng: Rng) -> Child:
        return self.sampler.draw(rng), "random", ()
