"""The reference of hypervolume fractions: a long search on the noise-free truth. It is no optimum.

NSGA-II (Deb et al. 2002) with the edits and crossings of `nas.search.proposers`, which sees quality of infeasible
layouts never.
"""

from __future__ import annotations

import numpy as np

from benchmarks.search.problems import Problem
from nas.core.layout import Layout
from nas.core.pareto import front_mask, ranks
from nas.search.proposers import Sampler, crossover, mutate, seed_layouts

Member = tuple[Layout, tuple[float, ...]]
"""A layout within the budgets with its coordinates."""

_POPULATION = 80
_CROSSOVER = 0.4


def long_search(problem: Problem, evaluations: int) -> list[tuple[float, ...]]:
    """Returns the front of noise-free coordinates after `evaluations` layouts."""
    sampler, rng = Sampler(problem.space), np.random.default_rng([83, problem.seed])
    seen_ids: set[str] = set()
    members: list[Member] = []
    archive: list[tuple[float, ...]] = []
    fresh = seed_layouts(sampler, 10) + [sampler.draw(rng) for _ in range(4 * _POPULATION)]
    while len(seen_ids) < evaluations:
        points = []
        for layout in fresh:
            if layout.id not in seen_ids and len(seen_ids) < evaluations:
                seen_ids.add(layout.id)
                if (point := problem.point(layout)) is not None:
                    points.append((layout, tuple(point)))
        archive = _front(archive + [point for _, point in points])
        members = _survivors(members + points)
        fresh = [_child(members, sampler, rng) for _ in range(_POPULATION)]
    return archive


def _child(members: list[Member], sampler: Sampler, rng: np.random.Generator) -> Layout:
    if not members or rng.random() < 0.05:
        return sampler.draw(rng)
    first, second = (members[int(rng.integers(len(members)))][0] for _ in range(2))
    return crossover(first, second, sampler, rng)[0] if rng.random() < _CROSSOVER else mutate(first, sampler, rng)[0]


def _front(points: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    distinct = list(dict.fromkeys(points))
    return [point for point, best in zip(distinct, front_mask(distinct), strict=True) if best]


def _survivors(members: list[Member]) -> list[Member]:
    """Returns the best by rank, and of the last rank those with the largest crowding distance."""
    if len(members) <= _POPULATION:
        return members
    values = np.array([point for _, point in members])
    order = np.lexsort((-_crowding(values), ranks(values)))
    return [members[index] for index in order[:_POPULATION]]


def _crowding(values: np.ndarray) -> np.ndarray:
    """Returns the crowding distance within each rank (Deb et al. 2002, section III B)."""
    rank, distance = ranks(values), np.zeros(len(values))
    for level in np.unique(rank):
        inside = np.flatnonzero(rank == level)
        for axis in range(values.shape[1]):
            order = inside[np.argsort(values[inside, axis], kind="stable")]
            span = values[order[-1], axis] - values[order[0], axis] or 1.0
            distance[order[[0, -1]]] = np.inf
            distance[order[1:-1]] += (values[order[2:], axis] - values[order[:-2], axis]) / span
    return distance
