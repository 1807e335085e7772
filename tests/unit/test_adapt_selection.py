"""The selection is exact, and keeps limits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

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


@pytest.mark.parametrize("seed", range(4))
def test_options_that_need_or_exclude_another_are_chosen_so(seed: int) -> None:
    places = random_places(seed, places=4)
    for mixer, ffn in ((0, 1), (2, 3)):
        pair = (ffn, len(places[ffn]) - 1)
        places[mixer][-1] = replace(places[mixer][-1], excludes=pair)
        places[mixer].append(Option("layer", 0.3, {"ms": -1.0, "mb": -0.5}, empty=True, needs=pair))

    def kept(chosen: tuple[int, ...]) -> bool:
        picked = [place[index] for place, index in zip(places, chosen, strict=True)]
        needed = all(chosen[each.needs[0]] == each.needs[1] for each in picked if each.needs)
        excluded = any(chosen[each.excludes[0]] == each.excludes[1] for each in picked if each.excludes)
        return needed and not excluded and not all(each.empty for each in picked)

    base, limits = {"ms": 10.0, "mb": 5.0}, {"ms": 8.5, "mb": 5.0}
    every = filter(kept, itertools.product(*(range(len(place)) for place in places)))
    sums = [total(places, each, base) for each in every]
    chosen = select(places, base, limits)
    assert chosen is not None and kept(chosen)
    best = min(each["loss"] for each in sums if all(each[name] <= limit for name, limit in limits.items()))
    assert total(places, chosen, base)["loss"] == pytest.approx(best)
