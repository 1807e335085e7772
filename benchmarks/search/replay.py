"""A recorded study as a table: engines choose among its layouts, and are told what was measured.

Engines make layouts of their own; here, each becomes the recorded one that is most like it and was not asked for yet.
So this compares how engines choose, on real figures, not how they invent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from nas.core.hypervolume import hypervolume
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.search import Features, Observation, Sampler, make_proposer
from nas.search.draft import Draft
from nas.search.sampling import Rng


class TableSampler(Sampler):
    """A sampler that knows the layouts of a table only.

    Args:
        space: of the study.
        layouts: recorded ones.
    """

    def __init__(self, space: SearchSpace, layouts: list[Layout]) -> None:
        super().__init__(space)
        self._left = dict.fromkeys(layouts)
        self._features = Features(space)
        self._scale = np.maximum(self._features.matrix(layouts).std(axis=0), 1e-9)

    def drop(self, layout: Layout) -> None:
        """Takes out what was asked for."""
        del self._left[layout]

    def contains(self, layout: Layout) -> list[str]:
        return [] if layout in self._left else ["it is not in the table"]

    def admits(self, layout: Layout) -> bool:
        return not super().contains(layout)

    def draw(self, rng: Rng) -> Layout:
        return list(self._left)[int(rng.integers(len(self._left)))]

    def settle(self, draft: Draft, rng: Rng) -> Layout | None:
        wanted = super().settle(draft, rng)
        if wanted is None:
            return None
        left = list(self._left)
        away = (self._features.matrix(left) - self._features.vector(wanted)) / self._scale
        return left[int(np.argmin((away**2).sum(axis=1)))]


def replay(report: Mapping[str, Any], space: SearchSpace, engines: Mapping[str, str], seeds: int) -> dict[str, Any]:
    """Hypervolume over that of the whole table, after each tenth of it.

    Args:
        report: what `nas study export -f json` wrote; its complete trials are the table.
        space: of that study.
        engines: name in the result -> proposer.
        seeds: how often each is run.
    """
    told = {Layout.parse(row["layout"]): _observation(row, space) for row in report["ranking"]}
    point = report["reference_point"]
    corner = [point[objective.name] for objective in space.objectives]
    whole = _volume(list(told.values()), space, corner)
    marks = [round(len(told) * tenth / 10) for tenth in range(1, 10)]
    found = {}
    for name, proposer in engines.items():
        runs = [_run(told, space, proposer, seed, point) for seed in range(seeds)]
        shares = [[_volume(run[:mark], space, corner) / whole for run in runs] for mark in marks]
        found[name] = [round(statistics.fmean(share), 4) for share in shares]
    return {"study": report["study"], "layouts": len(told), "after": marks, "seeds": seeds, "fraction": found}


def _run(
    told: Mapping[Layout, Observation], space: SearchSpace, proposer_name: str, seed: int, point: Mapping[str, float]
) -> list[Observation]:
    sampler = TableSampler(space, list(told))
    proposer = make_proposer(sampler, proposer_name, seed)
    proposer.fix_reference_point(point)
    seen = []
    while len(seen) < len(told) and (asked := proposer.ask(1)):
        layout = asked[0].layout
        proposer.tell(told[layout])
        seen.append(told[layout])
        sampler.drop(layout)
    return seen


def _observation(row: Mapping[str, Any], space: SearchSpace) -> Observation:
    excess = {f"{check['budget']} on {'/'.join(check['place'])}": check["log_excess"] for check in row["budgets"]}
    known = {name: value for name, value in excess.items() if value is not None}
    top = len(space.quality.rungs) - 1
    return Observation(Layout.parse(row["layout"]), "complete", row["coordinates"], known, top, row["sd"])


def _volume(seen: list[Observation], space: SearchSpace, corner: list[float]) -> float:
    names = [objective.name for objective in space.objectives]
    return hypervolume([[each.objectives[name] for name in names] for each in seen], corner)
