from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality import recall_price
from benchmarks.quality.recall import GROUP, SEEDS, TASK, jobs, layouts, table

PUBLISHED, ATTENTION = "d64 v256 ffn=swiglu:64 [C3 A4/2]", "d64 v256 ffn=swiglu:64 [A4/2*2]"
FRONT = ["d64 v256 ffn=swiglu:64 [C3*2 A4/2]", "d64 v256 ffn=swiglu:96 [C3 A4/2]", "d64 v256 ffn=swiglu:64 [A4/2 C3]"]
STEPS = 2


def report() -> dict[str, Any]:
    def row(layout: str, quality: float, **more: object) -> dict[str, Any]:
        return {"layout": layout, "coordinates": {"quality": -quality}, **more}

    references = [row(ATTENTION, 0.8, name="attention"), row(PUBLISHED, 1.0, name="published")]
    return {"references": references, "front": [row(text, 0.9 + 0.1 * n, trial=n) for n, text in enumerate(FRONT)]}


def trained(scores: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {
        job.key: {"scores": {GROUP: score + 0.1 * job.seed}}
        for layout, score in scores.items()
        for job in jobs(layout, STEPS)
    }


def test_a_training_is_of_the_task_alone_with_every_seed() -> None:
    assert [(job.run.name, job.seed, job.steps) for job in jobs(PUBLISHED, STEPS)] == [
        (TASK, seed, 2) for seed in SEEDS
    ]


def test_recall_is_relative_to_the_published_reference_seed_by_seed() -> None:
    assert next(iter(layouts(report()))) == "published"
    text = table(
        report(), STEPS, trained({PUBLISHED: 1.0, ATTENTION: 0.5, **dict(zip(FRONT, (1.5, 1.6, 2.0), strict=True))})
    )
    assert "| published | 1.00 | 1.00, 1.00 |" in text
    assert "| attention | 0.52 | 0.50, 0.55 |" in text
    assert "| 2 | 1.95 | 2.00, 1.91 |" in text and "5 of 5 layouts" in text


def test_without_the_published_reference_there_is_no_table() -> None:
    assert "not trained yet" in table(report(), STEPS, trained(dict.fromkeys(FRONT, 1.0)))


def test_the_price_of_recall_is_of_the_candidates_that_climb_and_its_scores_are_of_the_layouts_that_are_trained() -> (
    None
):
    assert recall_price.prices("automata, 300 x 8") == pytest.approx((1 + 0.25 * 2 * 600 / 450, 2.0))
    rows = {
        job.key: {"seed": job.seed, "scores": {GROUP: score}}
        for layout, score in (("published", 2.0), ("one, first", 1.0), ("two", 3.0))
        for job in recall_price.jobs("automata, 200 x 4", layout)
    }
    (row,) = (line for line in recall_price.report(rows).splitlines() if line.startswith("| automata"))
    assert row == "| automata, 200 x 4 | 2.00 | - | - | 1.50 | 0.50 | - | - | - | 0.50 | 0.00 | 1.22 | 1.33 |"
