"""SMART: which layers keep attention."""

from __future__ import annotations

import itertools
import random
from math import ceil, floor
from pathlib import Path

import pytest
import torch
from adapt_lab import LAYOUT, SETTINGS, alone, sources, write_lab

from benchmarks.adapt_smart import sensitivities, smart_layers
from nas.core.block import Block
from nas.core.replacement import Slot
from nas.train.adapt.library import Library, TrainedTeacher


def by_enumeration(sensitivity: list[float], count: int) -> tuple[int, ...]:
    """The paper's three steps, with every set of layers in between."""
    layers, size = len(sensitivity), len(sensitivity) // count
    first = max(range(size), key=sensitivity.__getitem__)
    last = max(range(layers - size, layers), key=sensitivity.__getitem__)
    gap = (last - first - count + 1) / (count - 1)
    best: tuple[float, tuple[int, ...]] = (-1.0, ())
    for between in itertools.combinations(range(first + 1, last), count - 2):
        whole = (first, *between, last)
        if all(floor(gap) <= b - a - 1 <= ceil(gap) for a, b in itertools.pairwise(whole)):
            best = max(best, (sum(sensitivity[i] for i in whole), whole))
    return best[1]


@pytest.mark.parametrize(("layers", "count"), [(8, 3), (9, 4), (12, 5), (16, 6), (16, 8), (7, 7), (5, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_layers_are_the_best_that_the_rules_allow(layers: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    sensitivity = [rng.random() for _ in range(layers)]
    assert smart_layers(sensitivity, count) == by_enumeration(sensitivity, count)


def test_the_paper_s_examples_are_repeated() -> None:
    """Appendix B: its sensitivities are highest at the ends, and at early layers of the middle."""
    sensitivity = [900.0, *(float(500 - i) for i in range(1, 14)), 800.0, 700.0]
    assert smart_layers(sensitivity, 6) == (0, 2, 5, 8, 11, 14)
    assert smart_layers(sensitivity, 8) == (0, 2, 4, 6, 8, 10, 12, 14)


def test_few_and_all_layers() -> None:
    assert smart_layers([0.1, 0.5, 0.2], 0) == ()
    assert smart_layers([0.1, 0.5, 0.2], 1) == (1,)
    assert smart_layers([0.1, 0.5, 0.2], 3) == (0, 1, 2)


def test_sensitivities_are_gains_where_all_others_are_cheap(tmp_path: Path) -> None:
    lab = write_lab(tmp_path / "lab")
    teacher = TrainedTeacher.load(lab / "teacher.safetensors", torch.device("cpu"))
    library = Library(tmp_path / "library", teacher, sources(lab), SETTINGS.library, alone())
    assert LAYOUT.depth == 3
    cheap: dict[Slot, Block | None] = {Slot(depth, "mixer"): None for depth in (0, 1)}
    scores = library.scores({slot: (None,) for slot in cheap})
    both = library.divergence(library.mix(cheap))
    gains = [both - scores[Slot(1, "mixer"), None].text, both - scores[Slot(0, "mixer"), None].text]
    assert sensitivities(library, cheap) == pytest.approx(gains, rel=1e-4)
