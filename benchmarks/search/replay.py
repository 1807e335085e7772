"""Replays recorded studies: proposers choose among the layouts of a table.

Each proposed layout is replaced by the most similar recorded one that was not proposed yet. So this compares how
proposers choose, on real figures, not how they construct layouts. Layouts that broke a budget, failed or were
not promoted are in the table, too, and cost what others cost: a trial.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.search.recorded import Table
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.pareto import hypervolume
from nas.core.space import SearchSpace
from nas.search.proposers import Features, Observation, Sampler, make_proposer
from nas.search.proposers.editable_layout import Draft
from nas.search.proposers.sampling import Rng


class TableSampler(Sampler):
    """A sampler whose space has only the layouts of a table.

    Args:
        space: of the study.
        layouts: recorded ones.
    """

    def __init__(self, space: SearchSpace, layouts: list[Layout]) -> None:
        super().__init__(space)
        self._index = {layout: index for index, layout in enumerate(layouts)}
        self._layouts = layouts
        self._remaining_mask = np.ones(len(layouts), dtype=bool)
        self._features = Features(space)
        features = self._features.matrix(layouts)
        self._scale = np.maximum(features.std(axis=0), 1e-9)
        self._scaled_features = features / self._scale
        self._lengths = (self._scaled_features**2).sum(axis=1)

    def drop(self, layout: Layout) -> None:
        """Removes a proposed layout."""
        self._remaining_mask[self._index[layout]] = False

    def contains(self, layout: Layout) -> list[str]:
        index = self._index.get(layout)
        return [] if index is not None and self._remaining_mask[index] else ["it is not in the table"]

    def admits(self, layout: Layout) -> bool:
        return not super().contains(layout)

    def draw(self, rng: Rng, until: float = math.inf) -> Layout:
        remaining = np.flatnonzero(self._remaining_mask)
        return self._layouts[int(remaining[int(rng.integers(len(remaining)))])]

    def settle(self, draft: Draft, rng: Rng) -> Layout | None:
        settled = super().settle(draft, rng)
        if settled is None:
            return None
        # The squared distance but for what is the same for all.
        away = self._lengths - 2 * (self._scaled_features @ (self._features.vector(settled) / self._scale))
        return self._layouts[int(np.argmin(np.where(self._remaining_mask, away, np.inf)))]


def replay(
    table: Table, space: SearchSpace, engines: Mapping[str, str], seeds: int, evaluations: int = 100
) -> dict[str, Any]:
    """Returns hypervolume over that of the whole table, after each tenth of the evaluations.

    Raises:
        InvalidInput: no layout of the table is better than the reference point on every axis.
    """
    corner = [table.reference_point[objective.name] for objective in space.objectives]
    whole = _volume(list(table.observations.values()), space, corner)
    if not whole:
        raise InvalidInput("no layout of the table beats the reference point on every axis: there is nothing to find")
    count = min(evaluations, len(table.observations))
    marks = sorted({max(1, round(count * tenth / 10)) for tenth in range(1, 11)})
    results = {}
    for name, proposer in engines.items():
        runs = [_run(table, space, proposer, seed, count) for seed in range(seeds)]
        shares = [[_volume(run[:mark], space, corner) / whole for run in runs] for mark in marks]
        results[name] = [round(statistics.fmean(share), 4) for share in shares]
    counts = Counter(observation.status for observation in table.observations.values())
    return {
        "studies": list(table.studies),
        "layouts": len(table.observations),
        "ended": dict(sorted(counts.items())),
        "hypervolume": whole,
        "after": marks,
        "seeds": seeds,
        "fraction": results,
    }


def _run(table: Table, space: SearchSpace, proposer_name: str, seed: int, count: int) -> list[Observation]:
    sampler = TableSampler(space, list(table.observations))
    proposer = make_proposer(sampler, proposer_name, seed)
    for reference in table.references:
        proposer.tell(reference)
    proposer.fix_reference_point(table.reference_point)
    observations: list[Observation] = []
    while len(observations) < count and (proposals := proposer.ask(1)):
        layout = proposals[0].layout
        proposer.tell(table.observations[layout])
        observations.append(table.observations[layout])
        sampler.drop(layout)
    return observations


def _volume(observations: Sequence[Observation], space: SearchSpace, corner: list[float]) -> float:
    names = [objective.name for objective in space.objectives]
    complete = [observation.objectives for observation in observations if observation.status == "complete"]
    return hypervolume([[point[name] for name in names] for point in complete], corner)
