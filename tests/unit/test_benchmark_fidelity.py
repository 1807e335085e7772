"""Policies of the ladder against single fidelity: problems with rungs, and what the benchmark makes of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.fidelity import compare, summary, table
from benchmarks.search.problems import Problem
from benchmarks.search.rung_study import POLICIES, Study
from benchmarks.search.rungs import RUNGS, RungProblem
from nas.search.proposers import Sampler


def test_higher_rungs_say_more() -> None:
    instance = RungProblem(Problem("hybrid", 3))
    sampler, rng = Sampler(instance.problem.space), np.random.default_rng(0)
    layouts = [sampler.draw(rng) for _ in range(150)]
    truth = [instance.problem.truth(layout)["quality"] for layout in layouts]
    correlations = [
        np.corrcoef(truth, [instance.quality(layout, rung) for layout in layouts])[0, 1] for rung in range(len(RUNGS))
    ]
    assert 0.5 < correlations[0] < 0.85 < correlations[1] < correlations[2]
    assert instance.quality(layouts[0], 0) == instance.quality(layouts[0], 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_study_spends_its_seconds_and_no_more(policy: str) -> None:
    instance = RungProblem(Problem("periodic", 3))
    study = Study(instance, policy, "random", 16, workers=2).run(8 * instance.whole_s)
    assert 8 * instance.whole_s < study.spent < 9 * instance.whole_s
    assert all(spent <= 8 * instance.whole_s for spent, _ in study.points)
    assert study.reached["entered"] > study.reached["recall"] >= study.reached["complete"] > 0
    if policy == "single":
        assert study.reached["recall"] - study.reached["complete"] <= 4
    else:
        assert study.reached["complete"] < 0.8 * study.reached["recall"]


def test_a_campaign_goes_on_and_pairs_by_seed(tmp_path: Path) -> None:
    out, messages = tmp_path / "runs.jsonl", list[str]()

    def run(seeds: int, whole: int = 6) -> str:
        rows = compare(
            ["periodic"], range(seeds), "random", pool=16, whole=whole, longer=1.0, out=out, say=messages.append
        )  # fmt: skip
        return table(rows)

    run(1)
    text = run(2)
    assert len(messages) == 4
    assert "| `periodic` | halving |" in text
    run(1, whole=3)
    assert len(messages) == 6, "runs of another budget are others"


def test_gains_are_shares_of_single_fidelity() -> None:
    rows = [
        {"problem": "p", "seed": seed, "policy": policy, "reached": {"entered": 2}, "hypervolume": volume}
        for seed in (0, 1)
        for policy, factor in (("single", 1.0), ("halving", 1.5))
        for volume in [{"0.25": 0.0, "0.5": factor * (1 + seed), "1": factor * (2 + seed)}]
    ]
    (halving,) = (row for row in summary(rows) if row["policy"] == "halving")
    assert halving["gain@0.25"] is None
    assert halving["gain@1"]["mean"] == pytest.approx(0.5)
    assert halving["gain@1"]["n"] == 2
