"""What other families of mixers add to convolutions and attention: the spaces, and losses beside those of chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import yaml

from benchmarks.mixers import CHANCE, Fronts, report, space
from benchmarks.real_study import TABLE
from benchmarks.search.recorded import Recorded, load
from nas.search.spaces import parse_space, space_text


@pytest.mark.parametrize(("name", "kinds"), [("all", 8), ("plain", 2)])
def test_both_spaces_are_valid_and_differ_by_mixers_alone(name: str, kinds: int) -> None:
    base = yaml.safe_load(space_text("lfm2-full"))
    content = space(base, name)
    assert len(content["mixers"]) == kinds
    assert {key for key in base if content[key] != base[key]} <= {"name", "mixers", "quality"}
    assert parse_space(yaml.safe_dump(content), name).quality.anchors is None


def sides(plain: Sequence[str], *every: str) -> list[Recorded]:
    """Recorded studies of engines, as those of either side."""
    studies = {study["engine"]: study for study in load(TABLE)}
    named = [("plain", engine) for engine in plain] + [("all", engine) for engine in every]
    return [{**studies[engine], "side": side} for side, engine in named]


def test_losses_are_of_hypervolume_and_chance_loses_nothing_on_average() -> None:
    losses = Fronts(sides(["random", "optuna-nsga2"], "ehvi")).losses(200)
    assert 0.2 < np.median(losses["plain, to all"]) < 0.5
    assert np.median(losses["plain, one seed to the other"]) < 0  # NSGA-II found less than random search
    assert abs(np.median(losses[CHANCE])) < 0.05
    same = Fronts(sides(["ehvi"], "ehvi")).losses(20)
    assert not same["plain, to all"].any()
    assert not same[CHANCE].any()


def test_the_report_has_searches_losses_and_who_is_on_the_front() -> None:
    text = report(sides(["random", "optuna-nsga2"], "ehvi"))
    assert "| all | 0 | 60 | 31 | 0.6 |" in text
    assert f"| {CHANCE} |" in text
    assert "| mamba2 |" in text
