"""The groups of statistics, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from benchmarks.claims import fronts, headlines, noise, whole
from benchmarks.claims.rows import Row

Experiment = Callable[[np.random.Generator, int], Iterator[Row]]
EXPERIMENTS: Mapping[str, Experiment] = {
    "null": headlines.null_rows,
    "gains": headlines.gain_rows,
    "ordered": headlines.reliability_rows,
    "whole": whole.whole_rows,
    "figures": noise.figure_rows,
    "budgets": noise.budget_rows,
    "quality": noise.quality_rows,
    "recall": noise.recall_rows,
    "spreads": noise.spread_rows,
    "fronts": fronts.front_rows,
    "hypervolume": fronts.volume_rows,
    "reliability": fronts.reliability_rows,
    "effects": fronts.effect_rows,
    "ranks": fronts.rank_rows,
    "models": fronts.model_rows,
}


def rows_of(name: str, studies: int, seed: int = 0) -> list[Row]:
    """Returns the rows of one group; its noise does not depend on the other groups."""
    return list(EXPERIMENTS[name](np.random.default_rng([seed, *name.encode()]), studies))
