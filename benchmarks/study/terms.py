"""The studies of a comparison, and the search space of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from nas.search.spaces import space_text

EHVI = "ehvi"
ENGINES = (EHVI, "optuna-nsga2", "random", "cache-evolution")
CALLED = {EHVI: "ours", "optuna-nsga2": "NSGA-II", "random": "random", "cache-evolution": "STAR's way"}
"""Engine -> what the page calls it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One study.

    Args:
        engine: proposer.
        seed: of the proposer.
        trials: layouts to propose, references not counted.
        side: which of several spaces; "" where there is one.
    """

    engine: str
    seed: int
    trials: int
    side: str = ""

    @property
    def study(self) -> str:
        """The study's name."""
        return f"{f'{self.side}-' * bool(self.side)}{self.engine}-{self.seed}"


def campaign(engines: Sequence[str], seeds: Sequence[int], trials: int) -> list[Terms]:
    """Returns all studies, seed by seed, so that a part of them is comparable too."""
    return [Terms(engine, seed, trials) for seed in seeds for engine in engines]


def space_of(base: str, terms: Terms) -> dict[str, Any]:
    """Returns the search space of a study as plain data: `base` (a name or a file) with its engine and seed."""
    space: dict[str, Any] = yaml.safe_load(space_text(base))
    search = {**space.get("search", {}), "proposer": terms.engine, "seed": terms.seed}
    return {**space, "search": search}
