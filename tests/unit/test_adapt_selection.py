"""The selection is exact, and keeps limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from nas.train.adapt.selection import Option, Term, select, total

Places = dict[int, list[Option[int]]]
BASE = {"ms": 10.0, "mb": 5.0}


def random_places(seed: int, places: int = 5, options: int = 4) -> Places:
    rng = random.Random(seed)
    by_place: Places = {}
    for place in range(places):
        by_place[place] = [Option("0", 0.0, {"ms": 0.0, "mb": 0.0})]
        for i in range(1, options):
            costs = {"ms": -rng.random(), "mb": rng.uniform(-1, 0.2)}
            by_place[place].append(Option(str(i), rng.random(), costs, i == options - 1))
    return by_place


def random_terms(places: Places, seed: int) -> list[Term[int]]:
    """Returns a term of either sign for a third of the pairs of options in neighbouring places."""
    rng = random.Random(seed)
    pairs = ((a, x.name, y.name) for a in list(places)[1:] for x in places[a - 1] for y in places[a])
    return [Term(((a - 1, x), (a, y)), rng.uniform(-0.5, 0.5)) for a, x, y in pairs if rng.random() < 0.33]


def every_choice(places: Places) -> Iterator[dict[int, Option[int]]]:
    """Yields the choices that needs, excludes and the place that keeps something allow."""
    for options in itertools.product(*places.values()):
        chosen = dict(zip(places, options, strict=True))
        names = {(place, option.name) for place, option in chosen.items()}
        needed = all(option.needs in names for option in options if option.needs)
        excluded = any(option.excludes in names for option in options if option.excludes)
        if needed and not excluded and not all(option.empty for option in options):
            yield chosen


def least_loss(places: Places, limits: Mapping[str, float], terms: Sequence[Term[int]] = ()) -> float:
    sums = [total(chosen, BASE, terms) for chosen in every_choice(places)]
    return min(costs["loss"] for costs in sums if all(costs[name] <= limit + 1e-9 for name, limit in limits.items()))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_is_better(seed: int) -> None:
    places = random_places(seed)
    limits = {"ms": 10 - 0.25 * (seed + 1), "mb": 4.5}
    chosen = select(places, BASE, limits)
    assert chosen is not None
    assert total(chosen, BASE)["loss"] == pytest.approx(least_loss(places, limits))


@pytest.mark.parametrize("seed", range(6))
def test_terms_of_pairs_count(seed: int) -> None:
    places, limits = random_places(seed), {"ms": 8.5}
    terms = random_terms(places, seed)
    unknown = Term(((0, "none"), (1, "1")), -9.0)
    chosen, alone = select(places, BASE, limits, [*terms, unknown]), select(places, BASE, limits)
    assert chosen is not None and alone is not None
    best = least_loss(places, limits, terms)
    assert total(chosen, BASE, terms)["loss"] == pytest.approx(best)
    assert total(alone, BASE, terms)["loss"] >= best


def test_one_place_keeps_something() -> None:
    options = [Option[int]("own", 0.0, {"ms": 0.0}), Option[int]("-", 0.0, {"ms": -1.0}, empty=True)]
    places = dict.fromkeys(range(3), options)
    chosen = select(places, {"ms": 3.0}, {"ms": 1.0})
    assert chosen is not None
    assert sum(option.empty for option in chosen.values()) == 2
    assert select(places, {"ms": 3.0}, {"ms": 0.0}) is None


@pytest.mark.parametrize("seed", range(4))
def test_options_that_need_or_exclude_another_are_chosen_so(seed: int) -> None:
    places = random_places(seed, places=4)
    for mixer, ffn in ((0, 1), (2, 3)):
        pair = (ffn, places[ffn][-1].name)
        places[mixer][-1] = replace(places[mixer][-1], excludes=pair)
        places[mixer].append(Option("layer", 0.3, {"ms": -1.0, "mb": -0.5}, empty=True, needs=pair))
    limits = {"ms": 8.5, "mb": 5.0}
    chosen = select(places, BASE, limits)
    assert chosen is not None and chosen in list(every_choice(places))
    assert total(chosen, BASE)["loss"] == pytest.approx(least_loss(places, limits))


def test_what_is_missing_is_not_excluded() -> None:
    places = random_places(0, places=2)
    places[0][1] = replace(places[0][1], excludes=(1, "missing"))
    limits = {"ms": 9.5, "mb": 5.0}
    chosen = select(places, BASE, limits)
    assert chosen is not None and total(chosen, BASE)["loss"] == pytest.approx(least_loss(places, limits))
