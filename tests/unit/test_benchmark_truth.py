"""The truth tests' list of orderings, and the arithmetic of their verdicts."""

from __future__ import annotations

import math

import pytest

from benchmarks.quality.truth import (
    ORDERINGS,
    PROTOCOL,
    Ordering,
    Suite,
    Verdict,
    judge,
    judged_by_recall,
    pooled_deviation,
    score_of_shown_values,
    variant,
)
from nas.core.layout import Layout
from nas.model.text.corpus import CorpusRef

CORPUS = CorpusRef(source="default", hash="0" * 64)


def outside_embedding(layout: Layout) -> tuple[int, int]:
    table = layout.d_model * layout.vocab
    return layout.params.total - table, layout.params.active - table


@pytest.mark.parametrize("ordering", ORDERINGS, ids=lambda ordering: ordering.name)
def test_an_ordering_compares_what_it_says(ordering: Ordering) -> None:
    better, worse = Layout.parse(ordering.better), Layout.parse(ordering.worse)
    assert len({job.key for _, job in Suite(CORPUS, 1).jobs_for(ordering)}) >= 2, "the two have different proxies"
    if ordering.equal:
        index = ["total", "active"].index(ordering.equal)
        assert outside_embedding(better)[index] == pytest.approx(outside_embedding(worse)[index], rel=0.01)


def test_names_differ() -> None:
    assert len({ordering.name for ordering in ORDERINGS}) == len(ORDERINGS) >= 15


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.2, 0.3, 0.25], "right"),
        ([-0.2, -0.3, -0.25], "wrong"),
        ([0.2, -0.3, 0.25], "undecided"),
        ([0.2], "undecided"),
        ([0.0, 0.0], "undecided"),  # two layouts with one proxy
    ],
)
def test_a_verdict_needs_two_standard_errors(differences: list[float], word: str) -> None:
    assert Verdict(differences).word == word


def test_differences_are_paired_by_seed() -> None:
    ordering = Ordering("n", "c", "s", ORDERINGS[0].better, ORDERINGS[0].worse, ("task/mqar",))
    scores = {ordering.better: [1.0, 5.0], ordering.worse: [0.5, 4.0]}
    trained = {
        job.key: {"scores": {"task/mqar": scores[layout][job.seed]}}
        for layout in scores
        for job in Suite(CORPUS, 2).jobs_of(layout)
        if job.run.name == "mqar"
    }
    verdict = judge(ordering, Suite(CORPUS, 2), trained)
    assert verdict is not None and verdict.differences == pytest.approx([0.5, 1.0])
    trained.popitem()
    verdict = judge(ordering, Suite(CORPUS, 2), trained)
    assert verdict is not None
    assert verdict.differences == pytest.approx([0.5]), "a seed that lacks a training does not count"


def test_parts_of_a_domain_do_not_count_twice() -> None:
    ordering = Ordering("n", "c", "s", ORDERINGS[0].better, ORDERINGS[0].worse, ("lm",))
    trained = {
        job.key: {"scores": {"lm/code": score, "lm/code.recall": 9 * score, "lm/prose": 3 * score}}
        for layout, score in ((ordering.better, 1.0), (ordering.worse, 0.5))
        for job in Suite(CORPUS, 1).jobs_of(layout)
        if job.run.name == "lm"
    }
    verdict = judge(ordering, Suite(CORPUS, 1), trained)
    assert verdict is not None and verdict.differences == pytest.approx([1.0])


def test_the_pooled_deviation_is_about_each_mean() -> None:
    verdicts = [Verdict([1.0, 3.0]), None, Verdict([10.0, 10.0]), Verdict([7.0])]
    assert pooled_deviation(verdicts) == pytest.approx(1.0)
    assert pooled_deviation([Verdict([7.0])]) is None


def test_a_variant_changes_tasks_alone() -> None:
    assert variant(PROTOCOL.task_lr, 1) == PROTOCOL
    before, after = (
        Suite(CORPUS, 1, protocol).jobs_of(ORDERINGS[0].better) for protocol in (PROTOCOL, variant(0.01, 3))
    )
    for job, other in zip(before, after, strict=True):
        changed = (1, job.lr) if job.run.kind == "lm" else (3, 0.01)
        assert (other.steps / job.steps, other.lr) == changed


def test_claims_about_short_convolutions_stay_with_mqar() -> None:
    tasks = {ordering.name: judged_by_recall(ordering).groups for ordering in ORDERINGS}
    assert tasks["window-recall"] == ("task/recall",)
    assert tasks["canon-recall"] == ("task/mqar",)
    assert tasks["induction"] == ("task/induction",)


def test_the_score_of_knowing_the_shown_values() -> None:
    assert score_of_shown_values(1, 16) == pytest.approx(math.log(16)), "one pair: its value is known"
    # Two draws of two values: equal ones half of the time, which are known then.
    assert score_of_shown_values(2, 2) == pytest.approx(math.log(2) / 2)
