"""When a candidate is worth a further seed or measurement."""

from __future__ import annotations

import pytest

from nas.core.quality_config import QualityConfig
from nas.search.refining import Refinement, best_refinement, doubt

REFERENCE = [1.0, 1.0]
SEED = Refinement("seed", 10.0, [0.05, 0.01])
MEASURE = Refinement("measure", 1.0, [0.10, 0.005])
SD = [0.10, 0.01]


def best(point: list[float], front: list[list[float]], rate: float, *options: Refinement) -> str | None:
    found = best_refinement(point, SD, front, REFERENCE, options or (SEED, MEASURE), rate)
    return found and found.kind


def test_doubt_grows_with_noise_and_is_none_far_behind_the_front() -> None:
    assert doubt([0.5, 0.5], SD, [], REFERENCE) > doubt([0.5, 0.5], SEED.sd, [], REFERENCE) > 0
    assert doubt([0.9, 0.9], [0.01, 0.01], [[0.1, 0.1]], REFERENCE) == pytest.approx(0.0)


def test_what_is_cheap_enough_is_done() -> None:
    assert best([0.5, 0.5], [], 1e-5) == "seed"
    assert best([0.5, 0.5], [], 1.0) is None


def test_a_dear_seed_gives_way_to_a_cheap_measurement() -> None:
    noisy = Refinement("measure", 1.0, [0.09, 0.005])
    assert best([0.5, 0.5], [], 1e-3, Refinement("seed", 1e6, [0.05, 0.01]), noisy) == "measure"


def test_nothing_is_done_about_a_loser_or_without_options() -> None:
    assert best([0.99, 0.99], [[0.0, 0.0]], 1e-9) is None
    assert best_refinement([0.5, 0.5], SD, [], REFERENCE, [], 0.0) is None


def test_further_seeds_are_the_least_free_numbers() -> None:
    config = QualityConfig.model_validate(
        {"rungs": [{"name": "a", "lm_steps": 1}, {"name": "b", "lm_steps": 2, "seeds": [0, 2]}]}
    )
    assert config.with_seeds(0) == config
    assert config.with_seeds(2).rungs[-1].seeds == (0, 2, 1, 3)
