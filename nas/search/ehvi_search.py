"""The default proposer: of many edits of good layouts, the one with the greatest expected gain in hypervolume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.search.api import Observation
from nas.search.ehvi import Improvement, chance_feasible, lowest
from nas.search.evolution import Stock, breed, stock
from nas.search.features import Features
from nas.search.gp import Array
from nas.search.kernels import Kernels
from nas.search.mutation import crossover, mutate
from nas.search.sampling import Rng, Sampler
from nas.search.state import BaseProposer, Child
from nas.search.surrogate import MIN_POINTS, Forecast, Surrogate, Tuned

_RANDOM = 0.15
"""Share of the first candidates that is drawn afresh, so that no part of the space is out of reach."""
_ROUNDS = 8
"""The pool is made in this many rounds: children of known layouts, then seven times edits of the best candidates."""
_CLIMBERS = 8
"""Candidates that each later round edits."""
_CROSSED, _EDITED_AGAIN = 0.2, 0.35
"""Share of the edits that are crossings instead; and of children that are edited once more, and so on."""
_BOLD, _BOLDNESS = 0.3, 2.5
"""Share of the proposals that take the model for this many times less sure: it knows only what it has been shown."""
_MOST_ROWS = 600
"""Observations that a surrogate is fitted to; beyond that, those that are best to breed from."""
_TUNE_ROWS = 192
"""Observations that hyperparameters are learned from at most."""
_TUNE_EVERY = 8
"""They are learned anew after this many more, from 128 observations on after an eighth to a sixteenth more."""


class EhviSearch(BaseProposer):
    """Expected hypervolume improvement x chance to keep the budgets, on Gaussian processes.

    Layouts that are still being measured or trained count as if they had reached what is predicted (kriging believer;
    Ginsbourger, Le Riche and Carraro 2010), so that parallel proposals spread. What has been measured counts with what
    the model makes of it, so that a lucky measurement does not hide what is as good. Until the reference point is fixed
    and a few layouts are finished, children of what is known are proposed without a model.
    """

    engine = "ehvi/3"
    screened = True

    def __init__(self, sampler: Sampler, seed: int) -> None:
        super().__init__(sampler, seed)
        space = sampler.space
        self._by_rung = frozenset(item.name for item in space.objectives if METRICS[item.metric].source == "proxy")
        self._top = len(space.quality.rungs) - 1
        self._features = Features(space)
        self._kernels: Kernels | None = None
        self.expected_gain: float | None = None
        """In hypervolume, of the layout proposed last; None where no model chose it."""
        self._fitted: tuple[tuple[int, int], Surrogate] | None = None
        self._tuned: tuple[list[Observation], Tuned] | None = None

    def propose(self, rng: Rng) -> Child:
        parents = stock(self.log, self.sampler)
        self.expected_gain = None
        if not self._ready():
            return breed(parents, self.sampler, rng)
        size = max(4, self.sampler.space.search.pool // _ROUNDS)
        pool = self._pool(parents, rng, size)
        if not pool:
            return self.sampler.draw(rng), "random", ()
        boldness = _BOLDNESS if rng.random() < _BOLD else 1.0
        acquisition = Acquisition(self, [layout for layout, _, _ in pool], boldness)
        scores = acquisition.scores
        for _ in range(_ROUNDS - 1):
            if more := self._climb(pool, scores, rng, size):
                pool += more
                scores = np.concatenate([scores, acquisition.of([layout for layout, _, _ in more])])
        self.expected_gain = float(scores.max())
        return pool[int(np.argmax(scores))]

    def score(self, layouts: Sequence[Layout]) -> Array:
        """[L] expected gain in hypervolume x chance to keep all budgets; needs the reference point."""
        return Acquisition(self, layouts).scores

    def _ready(self) -> bool:
        known = len(self.log.finished()) + len(self.log.prior())
        return self.log.reference_point is not None and known >= MIN_POINTS

    def surrogate(self) -> Surrogate:
        """Fitted to what has been told by now, and to what is expected of pending layouts."""
        stage = self.log.revision, len(self.log.proposals)
        if self._fitted is None or self._fitted[0] != stage:
            told = self.log.told()
            if len(told) > _MOST_ROWS:
                best = {layout.id for _, layout in self.log.parents()[:_MOST_ROWS]}
                told = [seen for seen in told if seen.layout.id in best]
            self._fitted = stage, self._fit(told, self._hyperparameters(), self.log.pending())
        return self._fitted[1]

    def _fit(
        self, observations: Sequence[Observation], tuned: Tuned | None = None, pending: Sequence[Layout] = ()
    ) -> Surrogate:
        if self._kernels is None:
            self._kernels = Kernels(self._features, self.sampler, self._top + 1)
        point = self.log.reference_point
        assert point is not None, "what no layout has shown yet is assumed to be as at the reference point"
        worst = dict(zip(self.log.objectives, point, strict=True))
        return Surrogate(self._kernels, observations, worst, self._by_rung, self._top, tuned, self.log.prior(), pending)

    def _hyperparameters(self) -> Tuned:
        """Learned from the first finished ones, up to the last multiple of a few: by the log alone, not too often."""
        final = self.log.finished()
        step = max(_TUNE_EVERY, 1 << max(0, len(final).bit_length() - 4))
        count = len(final) // step * step
        sample = sorted(final[:count], key=lambda seen: seen.layout.id)[:_TUNE_ROWS]
        if not sample:
            return {}
        if self._tuned is None or self._tuned[0] != sample:
            self._tuned = sample, self._fit(sample).tuned
        return self._tuned[1]

    def _pool(self, parents: Stock, rng: Rng, size: int) -> list[Child]:
        """New layouts, each once."""
        earlier = [seen.layout for seen in self.log.prior() if self.sampler.admits(seen.layout)]
        found: dict[str, Child] = {x.id: (x, "earlier study", ()) for x in earlier if not self.log.knows(x)}
        for _ in range(size):
            random = rng.random() < _RANDOM
            child: Child = (self.sampler.draw(rng), "random", ()) if random else breed(parents, self.sampler, rng)
            layout, operator, parent_ids = child
            if not random and rng.random() < _EDITED_AGAIN:
                layout, operator = mutate(layout, self.sampler, rng, _EDITED_AGAIN)
            if not self.log.knows(layout):
                found.setdefault(layout.id, (layout, operator, parent_ids))
        return list(found.values())

    def _climb(self, pool: list[Child], scores: Array, rng: Rng, size: int) -> list[Child]:
        """Edits and crossings of the pool's best, which keep the parents of what they were made from."""
        known = {layout.id for layout, _, _ in pool}
        best = np.argsort(-scores, kind="stable")[:_CLIMBERS]
        more: list[Child] = []
        for turn in range(size):
            layout, _, parents = pool[best[turn % len(best)]]
            if rng.random() < _CROSSED:
                child, operator = crossover(layout, pool[best[int(rng.integers(len(best)))]][0], self.sampler, rng)
            else:
                child, operator = mutate(layout, self.sampler, rng, _EDITED_AGAIN)
            if child.id not in known and not self.log.knows(child):
                known.add(child.id)
                more.append((child, operator, parents))
        return more


class Acquisition:
    """What candidates of one proposal are ranked by.

    Args:
        search: whose log and surrogate.
        layouts: the first candidates; they also say how far the integral reaches.
        boldness: times which the model is taken to be less sure of objectives than it says.

    Attributes:
        scores: [L] of these.
    """

    def __init__(self, search: EhviSearch, layouts: Sequence[Layout], boldness: float = 1.0) -> None:
        point = search.log.reference_point
        assert point is not None, "proposals by hypervolume need a reference point"
        self._surrogate, self._boldness = search.surrogate(), boldness
        forecasts = self._surrogate.predict(layouts)
        front = _reached(search, self._surrogate)
        self._improvement = Improvement(front, point, lowest(forecasts[0].mean, boldness * forecasts[0].sd))
        self.scores = self._score(*forecasts)

    def of(self, layouts: Sequence[Layout]) -> Array:
        """[L] scores of more candidates."""
        return self._score(*self._surrogate.predict(layouts))

    def _score(self, objectives: Forecast, constraints: Forecast) -> Array:
        gain = self._improvement.expected(objectives.mean, self._boldness * objectives.sd)
        return np.asarray(gain * chance_feasible(constraints.mean, constraints.sd))


def _reached(search: EhviSearch, surrogate: Surrogate) -> Array:
    """[P, M] coordinates that are reached already, or that pending layouts are expected to reach."""
    layouts = [seen.layout for seen in search.log.feasible()] + search.log.pending()
    if not layouts:
        return np.empty((0, len(search.log.objectives)))
    return surrogate.predict(layouts)[0].mean
