"""The selection is exact, and keeps limits."""

from __future__ import annotations

import itertools
import random

import pytest

from nas.adapt.selection import Option, select, total


def random_places(seed: int, places: int = 5, options: int = 4) -> list[list[Option]]:
    rng = random.Random(seed)
    made = []
    for place in range(places):
        own = [Option(f"{place}.0", 0.0, {"ms": 0.0, "mb": 0.0})]
        others = [
            Option(f"{place}.{i}", rng.random(), {"ms": -rng.random(), "mb": rng.uniform(-1, 0.2)}, i == options - 1)
            for i in range(1, options)
        ]
        made.append(own + others)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_is_better(seed: int) -> None:
    places = random_places(seed)
    base, limits = {"ms": 10.0, "mb": 5.0}, {"ms": 10 - 0.25 * (seed + 1), "mb": 4.5}
    chosen = select(places, base, limits)
    kept = []
    for each in itertools.product(*(range(len(place)) for place in places)):
        sums = total(places, each, base)
        left = any(not place[index].empty for place, index in zip(places, each, strict=True))
        if left and all(sums[name] <= limit + 1e-9 for name, limit in limits.items()):
            kept.append(sums["loss"])
    assert chosen is not None
    assert total(places, chosen, base)["loss"] == pytest.approx(min(kept))


def test_one_place_keeps_something() -> None:
    places = [[Option("own", 0.0, {"ms": 0.0}), Option("-", 0.0, {"ms": -1.0}, empty=True)] for _ in range(3)]
    chosen = select(places, {"ms": 3.0}, {"ms": 1.0})
    assert chosen is not None
    assert sum(chosen) == 2
    assert select(places, {"ms": 3.0}, {"ms": 0.0}) is None
