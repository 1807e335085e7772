"""The studies of a comparison, and the search space of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from nas.search.spaces import space_text

OURS = "ehvi"
ENGINES = (OURS, "optuna-nsga2", "random", "cache-evolution")
CALLED = {OURS: "ours", "optuna-nsga2": "NSGA-II", "random": "random", "cache-evolution": "STAR's way"}
"""Engine -> what the page calls it."""
ABLATED = "mamba2"
"""The state-space mixer, which one half of the ablation does without."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One study.

    Args:
        engine: proposer.
        seed: of the proposer.
        trials: layouts to propose, references not counted.
        ablated: without state-space blocks.
    """

    engine: str
    seed: int
    trials: int
    ablated: bool = False

    @property
    def study(self) -> str:
        """The study's name."""
        return f"{self.engine}{'-ablated' if self.ablated else ''}-{self.seed}"


def campaign(engines: Sequence[str], seeds: Sequence[int], trials: int) -> list[Terms]:
    """Returns all studies, seed by seed, so that a part of them is comparable too."""
    planned = []
    for seed in seeds:
        planned += [Terms(engine, seed, trials) for engine in engines]
        planned += [Terms(OURS, seed, trials, ablated=True)] if OURS in engines else []
    return planned


def space_of(base: str, terms: Terms) -> dict[str, Any]:
    """Returns the search space of a study as plain data: `base` (a name or a file) with its engine and seed.

    Without state-space blocks it has a name of its own: it is another space.
    """
    space: dict[str, Any] = yaml.safe_load(space_text(base))
    if terms.ablated:
        space["name"] = f"{space['name']}-ablated"
        space["mixers"] = {kind: knobs for kind, knobs in space["mixers"].items() if kind != ABLATED}
    search = {**space.get("search", {}), "proposer": terms.engine, "seed": terms.seed}
    return {**space, "search": search}
