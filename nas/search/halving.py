"""Shares of each rung climb, whatever it costs.

Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning") with two
changes: candidates are compared by their place on the front (quality at that rung with their measured device figures),
and while more candidates are expected a rung rounds its share down, so the first arrival does not climb unopposed. A
rung that keeps a number of candidates waits for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nas.core.pareto import ranks
from nas.search.ladder import Decision, Ladder


class Shares:
    """Promotes the best `keep` of each rung."""

    def decide(self, ladder: Ladder, rung: int, last_call: bool) -> Decision | None:
        """See `Policy.decide`."""
        arrived = ladder.arrived[rung]
        trials = list(arrived)
        order = climbing_order([arrived[trial].coordinates for trial in trials])
        best = [trials[i] for i in order][: _places(ladder, rung, last_call)]
        for trial in best:
            if (trial, rung) not in ladder.decided:
                return Decision(trial, rung, "promote")
        if last_call:
            return Decision(ladder.waiting(rung)[0], rung, "stop", "others of the rung were better")
        return None


def climbing_order(points: Sequence[Sequence[float]]) -> list[int]:
    """Who should climb the ladder first: by non-dominated rank, then by the first coordinate (minus quality)."""
    if not points:
        return []
    rank = ranks(np.asarray(points, dtype=float))
    return sorted(range(len(points)), key=lambda i: (int(rank[i]), points[i][0], i))


def _places(ladder: Ladder, rung: int, last_call: bool) -> int:
    count, keep = len(ladder.arrived[rung]), ladder.rungs[rung].keep
    if last_call or keep is None:
        return ladder.rungs[rung].promoted(count)
    return 0 if isinstance(keep, int) else math.floor(keep * count)
