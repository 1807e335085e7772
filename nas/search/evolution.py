"""Evolution without a model: parents by non-dominated rank, then crossover or an edit."""

from __future__ import annotations

from nas.core.layout import Layout
from nas.search.mutation import crossover, mutate
from nas.search.sampling import Rng, Sampler
from nas.search.state import BaseProposer, Child, SearchState

Stock = list[tuple[int, Layout]]
"""Layouts with their ranks, 0 is best."""

_CROSSOVER = 0.3
_TOURNAMENT = 3
_RANDOM = 0.1
"""Share of children without parents, so that no part of the space is out of reach."""


class Evolution(BaseProposer):
    """A steady-state genetic search; infeasible layouts breed only until there are feasible ones to beat them."""

    engine = "evolution/2"
    screened = True

    def propose(self, rng: Rng) -> Child:
        if rng.random() < _RANDOM:
            return self.sampler.draw(rng), "random", ()
        return breed(self.parents(), self.sampler, rng)

    def parents(self) -> Stock:
        """What is bred from."""
        return stock(self.log, self.sampler)


def stock(log: SearchState, sampler: Sampler) -> Stock:
    """What can be bred from, with ranks: what is known and inside the space."""
    return [(rank, layout) for rank, layout in log.parents() if sampler.admits(layout)]


def breed(parents: Stock, sampler: Sampler, rng: Rng) -> Child:
    """A child of `parents`; a random layout where there are none."""
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
    """The best of a few picks; the first of them on a tie."""
    picks = [parents[int(rng.integers(len(parents)))] for _ in range(_TOURNAMENT)]
    return min(picks, key=lambda pick: pick[0])[1]
