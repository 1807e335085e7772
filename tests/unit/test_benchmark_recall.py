from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality.groups import SUITES, Suite
from benchmarks.quality.groups import report as report_of_groups
from benchmarks.quality.recall import GROUP, SEEDS, TASK, jobs, layouts, table
from nas.core.layout import Layout
from nas.search.spaces import load_space
from nas.search.study.check import support_filter

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


def rows(suite: Suite, name: str, of_layouts: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Trainings of a group by layout, each seed with the same scores."""
    return {
        job.key: {"seed": job.seed, "scores": scores, "cpu_seconds": 3.0}
        for layout, scores in of_layouts.items()
        for job in suite.jobs(name, layout)
    }


def test_the_price_of_recall_is_of_the_candidates_that_climb_and_its_scores_are_of_the_layouts_that_are_trained() -> (
    None
):
    suite = SUITES["lfm2"]
    assert suite.prices("automata, 300 x 8") == pytest.approx((1 + 0.25 * 2 * 600 / 450, 2.0))
    trained = {"published": {GROUP: 2.0}, "one, first": {GROUP: 1.0}, "two": {GROUP: 3.0}}
    text = report_of_groups(suite, rows(suite, "automata, 200 x 4", trained))
    (row,) = (line for line in text.splitlines() if line.startswith("| automata"))
    assert (
        row == "| automata, 200 x 4 | 2.00 | 1.79 | - | - | 1.50 | 0.50 | - | - | - | 0.50 | 0.00 | 1.22 | 1.33 | 3 |"
    )
    assert "Effective dimension: 1.0." in text


def test_each_domain_of_text_is_a_group_and_has_no_price() -> None:
    suite = SUITES["mixers"]
    scores = {
        layout: {"lm/code": 2.0 + number, "lm/prose": 2.0, "lm/code.rest": 9.0}
        for number, layout in enumerate(("published", "mLSTM"))
    }
    lines = report_of_groups(suite, rows(suite, "text", scores)).splitlines()
    assert [line.partition(" | ")[0] for line in lines[2:]] == ["| text: code", "| text: prose"]
    assert lines[2].endswith("| 1.50 | 0.35 | 0.00 | - | - | 3 |")


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_layouts_of_groups_run_on_the_runtime_and_each_training_is_another(suite: Suite) -> None:
    carried = support_filter(load_space(suite.base))
    assert all(carried(Layout.parse(layout)) for layout in suite.layouts.values())
    keys = [job.key for name in suite.groups for layout in suite.layouts for job in suite.jobs(name, layout)]
    assert len(set(keys)) == len(keys) == len(SEEDS) * len(suite.groups) * len(suite.layouts)
