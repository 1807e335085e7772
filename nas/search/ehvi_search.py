"""The default proposer: of many edits of good layouts, the one with the greatest expected gain in hypervolume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.search.ehvi import chance_feasible, expected_improvement
from nas.search.evolution import breed, stock
from nas.search.features import Features
from nas.search.mutation import mutate
from nas.search.ridge import Array
from nas.search.sampling import Rng, Sampler
from nas.search.state import BaseProposer, Child
from nas.search.surrogate import MIN_POINTS, Surrogate

_RANDOM = 0.2
"""Share of the pool that is drawn afresh, so that no part of the space is out of reach."""
_CLIMBERS = 8
_STEPS = 2


class EhviSearch(BaseProposer):
    """Expected hypervolume improvement x chance to keep the budgets, on a blend of ridge and trees.

    Layouts that are still being measured or trained count as if they had reached what is predicted (kriging believer;
    Ginsbourger, Le Riche and Carraro 2010), so that parallel proposals spread. Until the reference point is fixed and
    each objective has a few values, children of what is known are proposed without a model.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        super().__init__(sampler, seed)
        space = sampler.space
        self._features = Features(space)
        self._by_rung = frozenset(item.name for item in space.objectives if METRICS[item.metric].source == "proxy")
        self._top = len(space.quality.rungs) - 1
        self._fitted: tuple[int, Surrogate] | None = None

    def propose(self, rng: Rng) -> Child | None:
        if not self._ready():
            return breed(stock(self.log, self.sampler), self.sampler, rng)
        pool = self._pool(rng, self.sampler.space.search.pool)
        if not pool:
            return None
        scores = self.score([layout for layout, _, _ in pool])
        for _ in range(_STEPS):
            if more := self._climb(pool, scores, rng):
                pool += more
                scores = np.concatenate([scores, self.score([layout for layout, _, _ in more])])
        return pool[int(np.argmax(scores))]

    def _ready(self) -> bool:
        told = self.log.told()
        counts = [sum(name in seen.objectives for seen in told) for name in self.log.objectives]
        return self.log.reference_point is not None and min(counts) >= MIN_POINTS

    def _surrogate(self) -> Surrogate:
        if self._fitted is None or self._fitted[0] != self.log.revision:
            told, names = self.log.told(), self.log.objectives
            model = Surrogate(self._features, told, names, self._by_rung, self._top, self.log.seed)
            self._fitted = self.log.revision, model
        return self._fitted[1]

    def _pool(self, rng: Rng, size: int) -> list[Child]:
        """New layouts, each once."""
        parents = stock(self.log, self.sampler)
        found: dict[str, Child] = {}
        for _ in range(size):
            random = rng.random() < _RANDOM
            child: Child = (self.sampler.draw(rng), "random", ()) if random else breed(parents, self.sampler, rng)
            if not self.log.knows(child[0]):
                found.setdefault(child[0].id, child)
        return list(found.values())

    def _climb(self, pool: list[Child], scores: Array, rng: Rng) -> list[Child]:
        """Edits of the pool's best, which keep the parents of what they were edited from."""
        known = {layout.id for layout, _, _ in pool}
        more: list[Child] = []
        for index in np.argsort(-scores, kind="stable")[:_CLIMBERS]:
            layout, _, parents = pool[index]
            for _ in range(_CLIMBERS // 2):
                child, operator = mutate(layout, self.sampler, rng)
                if child.id not in known and not self.log.knows(child):
                    known.add(child.id)
                    more.append((child, operator, parents))
        return more

    def score(self, layouts: Sequence[Layout]) -> Array:
        """[L] expected gain in hypervolume x chance to keep all budgets; needs the reference point."""
        assert self.log.reference_point is not None, "proposals by hypervolume need a reference point"
        surrogate = self._surrogate()
        objectives, constraints = surrogate.predict(layouts)
        front = np.vstack([self.log.points(self.log.feasible()), self._believed(surrogate)])
        gain = expected_improvement(objectives.mean, objectives.sd, front, self.log.reference_point)
        return gain * chance_feasible(constraints.mean, constraints.sd)

    def _believed(self, surrogate: Surrogate) -> Array:
        """[P, M] what pending layouts are expected to reach: coordinates known by now, else their means."""
        pending: list[Layout] = self.log.pending()
        if not pending:
            return np.empty((0, len(self.log.objectives)))
        points = surrogate.predict(pending)[0].mean.copy()
        for row, layout in enumerate(pending):
            seen = self.log.observations.get(layout.id)
            for column, name in enumerate(self.log.objectives):
                if seen is not None and name in seen.objectives and name not in self._by_rung:
                    points[row, column] = seen.objectives[name]
        return points
