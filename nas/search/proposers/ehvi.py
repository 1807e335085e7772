"""Proposes by expected hypervolume improvement x chance to keep all budgets. Everything is minimised.

The improvement of a point y over a front is the volume of what y dominates and the front does not. Its expectation is
an integral over that volume of the probability that a candidate dominates z (Emmerich, Giannakoglou and Naujoks 2006,
with the order of integrals changed), which for independent normal coordinates is a product of normal distribution
functions. Along the first axis the integral has a closed form: above each point of the other axes, the volume reaches
up to the least first coordinate of the front below it. The other axes are summed over one fixed set of points. So the
estimate is vectorised, deterministic, works for any number of objectives, and its small error is the same for all.

    E[I] = integral over z_2..z_M of E[(roof(z) - Y_1)+] prod_m P(Y_m <= z_m)

| symbol | shape | name here | meaning |
| --- | --- | --- | --- |
| Y | N, M | `mean`, `sd` | forecasts of N candidates: independent normal coordinates, minimised |
| F | F, M | `front` | coordinates reached |
| r | M | `reference` | reference point: the worst coordinates that count |
| z | P, M - 1 | `Improvement._points` | points over the axes but the first |
| roof | P | `Improvement._roof` | least first coordinate of the front that is at least as good as z elsewhere, or r_1 |
| c | N, C | `constraints` | forecasts of log(figure / limit); a budget is kept where it is at most 0 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.scoring import PROXY, check_name
from nas.search.proposers.api import Observation
from nas.search.proposers.evolution import Stock, breed, stock
from nas.search.proposers.features import Features
from nas.search.proposers.figure_costs import costs_by_name, of_proxy
from nas.search.proposers.gp import Array
from nas.search.proposers.hardware import Costs
from nas.search.proposers.mutation import crossover, mutate
from nas.search.proposers.sampling import Rng, Sampler
from nas.search.proposers.state import BaseProposer, Child
from nas.search.proposers.surrogate import MIN_POINTS, Forecast, Kernels, Surrogate, Tuned

_POINTS_LOG2 = {1: 8}
"""Number of axes beside the first -> binary logarithm of the number of points over them."""
_MANY_POINTS_LOG2 = 10
"""The same for more axes."""
_WIDE = 3.0
"""Standard deviations below the best mean that the integral reaches."""
_LEAST_GAIN = 1e-250
"""Expected gain at or below which layouts are ordered by the chance that they are better than the reference point."""
_RANDOM = 0.15
"""Share of the first candidates that is drawn at random, so that no part of the space is out of reach."""
_ROUNDS = 8
"""The pool is made in this many rounds: first children of known layouts, then edits of the best candidates. Where the
space lists its layouts and no more are left than the pool holds, the pool is all of them."""
_EDITED = 8
"""Best candidates that each later round edits."""
_CROSSED = 0.2
"""Share of the edits that are crossovers instead."""
_EDITED_AGAIN = 0.35
"""Share of children that are edited once more, and so on."""
_BOLD = 0.3
"""Share of the proposals for which the model's standard deviations are multiplied by `_BOLDNESS`, to explore."""
_BOLDNESS = 2.5
"""Factor on the standard deviations of objectives for bold proposals."""
_MOST_ROWS = 600
"""Observations that a surrogate is fitted to at most: the best to breed from, and a third of them of all the others."""
_TUNE_ROWS = 192
"""Observations that hyperparameters are learned from at most."""
_TUNE_EVERY = 16
"""They are fitted again after this many more; from 256 observations on, after an eighth to a sixteenth more."""


class Improvement:
    """The expected improvement over one front.

    Args:
        front: [F, M] coordinates reached, F >= 0, M >= 2.
        reference: [M] the reference point.
        lowest: [M] lower bounds of the integral.
    """

    def __init__(self, front: Array, reference: Sequence[float], lowest: Array) -> None:
        worst = np.asarray(reference, dtype=np.float64)
        low = np.minimum(lowest, worst)[1:]
        points = low + _unit_points(len(worst) - 1) * (worst[1:] - low)
        roof = np.full(len(points), worst[0])
        for reached in front:
            below = (reached[1:] <= points).all(axis=1)
            roof[below] = np.minimum(roof[below], reached[0])
        self._points, self._roof = points, roof
        self._share = float(np.prod(worst[1:] - low)) / len(points)

    def expected(self, mean: Array, sd: Array) -> Array:
        """Returns [N] expected gains of [N, M] forecasts with standard deviations above 0."""
        from scipy.special import ndtr  # type: ignore[import-untyped]

        roofs, where = np.unique(self._roof, return_inverse=True)
        away = (roofs - mean[:, :1]) / sd[:, :1]
        depth = sd[:, :1] * (away * ndtr(away) + np.exp(-0.5 * away**2) / np.sqrt(2 * np.pi))
        gain = depth[:, where]
        for axis in range(1, mean.shape[1]):
            gain *= ndtr((self._points[None, :, axis - 1] - mean[:, axis, None]) / sd[:, axis, None])
        return np.asarray(gain.sum(axis=1) * self._share, dtype=np.float64)


def lowest(mean: Array, sd: Array) -> Array:
    """Returns [M] lower bounds that none of [N, M] forecasts is likely to pass."""
    return np.asarray((mean - _WIDE * sd).min(axis=0))


def log_chance_feasible(mean: Array, sd: Array) -> Array:
    """Returns [N] log chances that every excess is at most 0, for [N, C] forecasts; 0 where there is no constraint."""
    from scipy.special import log_ndtr

    return np.asarray(log_ndtr(-mean / sd).sum(axis=1), dtype=np.float64)


@lru_cache
def _unit_points(dimensions: int) -> Array:
    """Returns [P, M] a fixed low-discrepancy set in the unit cube (Sobol 1967)."""
    from scipy.stats import qmc  # type: ignore[import-untyped]

    count = _POINTS_LOG2.get(dimensions, _MANY_POINTS_LOG2)
    return np.asarray(qmc.Sobol(dimensions, scramble=False).random_base2(count), dtype=np.float64)


class EhviSearch(BaseProposer):
    """Expected hypervolume improvement x chance to keep the budgets, on Gaussian processes.

    Layouts that are still being measured or trained count as if they had reached their prediction (kriging believer;
    Ginsbourger, Le Riche and Carraro 2010), so that parallel proposals spread. Measured layouts count with the model's
    prediction too, so that a lucky measurement does not hide equals. Until the reference point is fixed and a few
    layouts are finished, children of known layouts are proposed without a model.
    """

    engine = "ehvi/6"

    def __init__(self, sampler: Sampler, seed: int) -> None:
        super().__init__(sampler, seed)
        space = sampler.space
        of_quality = [check_name(item.name, PROXY) for item in space.budgets if METRICS[item.metric].source == "proxy"]
        of_quality += [item.name for item in space.objectives if METRICS[item.metric].source == "proxy"]
        self._by_rung = frozenset(of_quality)
        self._top = len(space.quality.rungs) - 1
        self._features = Features(space, strings=True)
        self._costs: dict[str, Costs] = {}
        self._kernels: Kernels | None = None
        self.expected_gain: float | None = None
        """Expected gain in hypervolume of the latest proposal; None where no model chose it."""
        self._fitted: tuple[tuple[int, int], Surrogate] | None = None
        self._tuned: tuple[list[Observation], Tuned] | None = None

    def propose(self, rng: Rng) -> Child:
        parents = stock(self.log, self.sampler)
        self.expected_gain = None
        count = len(self.log.prior())
        count += sum(bool(observation.objectives) for observation in self.log.sorted_observations())
        if self.log.reference_point is None or count < MIN_POINTS:
            return breed(parents, self.sampler, rng)
        most = self.sampler.space.search.pool
        untried, size, rounds = self.untried(), max(4, most // _ROUNDS), _ROUNDS
        if untried is not None and len(untried) <= most:
            pool: list[Child] = [(layout, "listed", ()) for layout in untried]
            rounds = 1
        else:
            pool = self._pool(parents, rng, size)
        if not pool:
            return self.sampler.draw(rng), "random", ()
        boldness = _BOLDNESS if rng.random() < _BOLD else 1.0
        acquisition = Acquisition(self, [layout for layout, _, _ in pool], boldness)
        scores = acquisition.scores
        for _ in range(rounds - 1):
            if more := self._edit_best(pool, scores, rng, size):
                pool += more
                scores = np.concatenate([scores, acquisition.of([layout for layout, _, _ in more])])
        self.expected_gain = math.exp(scores.max())
        return pool[int(np.argmax(scores))]

    def score(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L] expected gain in hypervolume x chance to keep all budgets; needs the reference point."""
        return np.asarray(np.exp(Acquisition(self, layouts).scores))

    def surrogate(self) -> Surrogate:
        """Returns the surrogate fitted to all observations and to predictions of layouts that are under way."""
        stage = self.log.revision, len(self.log.proposals)
        if self._fitted is None or self._fitted[0] != stage:
            observations = self.log.sorted_observations()
            if len(observations) > _MOST_ROWS:
                ranked = [layout.id for _, layout in sorted(self.log.parents(), key=lambda parent: parent[0])]
                best = 2 * _MOST_ROWS // 3
                rest = ranked[best :: max(1, -(-(len(ranked) - best) // (_MOST_ROWS - best)))]
                ids = {*ranked[:best], *rest}
                observations = [observation for observation in observations if observation.layout.id in ids]
            self._fitted = stage, self._fit(observations, self._hyperparameters(), self.log.underway())
        return self._fitted[1]

    def _fit(
        self, observations: Sequence[Observation], tuned: Tuned | None = None, pending: Sequence[Layout] = ()
    ) -> Surrogate:
        if self._kernels is None:
            self._kernels = Kernels(self._features, self.sampler, self._top + 1)
        point = self.log.reference_point
        assert point is not None, "objectives without a value are assumed to be as at the reference point"
        worst = dict(zip(self.log.objectives, point, strict=True))
        costs = self._known_costs(observations)
        return Surrogate(
            self._kernels, observations, worst, self._by_rung, self._top, costs, tuned, self.log.prior(), pending
        )

    def _known_costs(self, observations: Sequence[Observation]) -> dict[str, Costs]:
        """Returns the amounts of work and memory of each figure of a device, by name; kept, as they are cached."""
        names = {name for observation in observations for name in observation.constraints}
        constraints = {name for name in names if not of_proxy(self.sampler.space, name)}
        if not self._costs or not constraints <= self._costs.keys():
            self._costs = costs_by_name(self.sampler.space, constraints)
        return self._costs

    def _hyperparameters(self) -> Tuned:
        """Returns hyperparameters fitted to the first finished layouts, up to a multiple of a few, to refit rarely."""
        final = self.log.finished()
        step = max(_TUNE_EVERY, 1 << max(0, len(final).bit_length() - 4))
        count = len(final) // step * step
        sample = sorted(final[:count], key=lambda observation: observation.layout.id)[:_TUNE_ROWS]
        if not sample:
            return {}
        if self._tuned is None or self._tuned[0] != sample:
            self._tuned = sample, self._fit(sample).tuned
        return self._tuned[1]

    def _pool(self, parents: Stock, rng: Rng, size: int) -> list[Child]:
        """Returns new layouts, each once."""
        earlier = [observation.layout for observation in self.log.prior() if self.sampler.admits(observation.layout)]
        children: dict[str, Child] = {x.id: (x, "earlier study", ()) for x in earlier if not self.log.knows(x)}
        for _ in range(size):
            random = rng.random() < _RANDOM
            child: Child = (self.sampler.draw(rng), "random", ()) if random else breed(parents, self.sampler, rng)
            layout, operator, parent_ids = child
            if not random and rng.random() < _EDITED_AGAIN:
                layout, operator = mutate(layout, self.sampler, rng, _EDITED_AGAIN)
            if not self.log.knows(layout):
                children.setdefault(layout.id, (layout, operator, parent_ids))
        return list(children.values())

    def _edit_best(self, pool: list[Child], scores: Array, rng: Rng, size: int) -> list[Child]:
        """Returns edits and crossovers of the pool's best, which inherit their parents."""
        ids = {layout.id for layout, _, _ in pool}
        best = np.argsort(-scores, kind="stable")[:_EDITED]
        more: list[Child] = []
        for turn in range(size):
            layout, _, parents = pool[best[turn % len(best)]]
            if rng.random() < _CROSSED:
                child, operator = crossover(layout, pool[best[int(rng.integers(len(best)))]][0], self.sampler, rng)
            else:
                child, operator = mutate(layout, self.sampler, rng, _EDITED_AGAIN)
            if child.id not in ids and not self.log.knows(child):
                ids.add(child.id)
                more.append((child, operator, parents))
        return more


class Acquisition:
    """Scores the candidates of one proposal.

    Args:
        search: the proposer, for its log and surrogate.
        layouts: the first candidates; they also bound the integral.
        boldness: factor on the standard deviations of objectives.

    Attributes:
        scores: [L] logarithms for `layouts` of expected gain x chance to keep all budgets, which may be below the least
            number.
    """

    def __init__(self, search: EhviSearch, layouts: Sequence[Layout], boldness: float = 1.0) -> None:
        point = search.log.reference_point
        assert point is not None, "proposals by hypervolume need a reference point"
        self._surrogate, self._boldness, self._point = search.surrogate(), boldness, np.array(point)
        forecasts = self._surrogate.predict(layouts)
        front = _reached(search, self._surrogate)
        self._improvement = Improvement(front, point, lowest(forecasts[0].mean, boldness * forecasts[0].sd))
        self.scores = self._score(*forecasts)

    def of(self, layouts: Sequence[Layout]) -> Array:
        """Returns [L] scores of more candidates."""
        return self._score(*self._surrogate.predict(layouts))

    def _score(self, objectives: Forecast, constraints: Forecast) -> Array:
        from scipy.special import log_ndtr

        sd = self._boldness * objectives.sd
        gain = np.maximum(self._improvement.expected(objectives.mean, sd), _LEAST_GAIN)
        inside = log_ndtr((self._point - objectives.mean) / sd).sum(axis=1)
        gains = np.log(gain) + np.where(gain > _LEAST_GAIN, 0.0, inside)
        return np.asarray(gains + log_chance_feasible(constraints.mean, constraints.sd))


def _reached(search: EhviSearch, surrogate: Surrogate) -> Array:
    """Returns [P, M] predicted coordinates of feasible layouts and those under way.

    Layouts that wait at a lower rung are not among them: most of them are stopped in the end.
    """
    layouts = [observation.layout for observation in search.log.feasible()] + search.log.underway()
    if not layouts:
        return np.empty((0, len(search.log.objectives)))
    return surrogate.predict(layouts)[0].mean
