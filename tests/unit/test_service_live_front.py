"""The front as a page tells it: chances and ties as a report has them, and no more work than there is news."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_lab import LiveLab
from service_support import tiny_space

from nas.core.errors import UnknownName
from nas.core.pareto import dominates, front_mask
from nas.core.scoring import Axis
from nas.service import live_front, ranking
from nas.service.agreement import rank_correlation, spearman
from nas.service.live_course import LiveCourse
from nas.service.live_front import LiveFront, near_front, nearest
from nas.service.live_points import points, rounded
from nas.service.live_studies import LiveStudies
from nas.service.live_table import ORIGINS, LiveTable
from nas.service.ranking import rank_trials
from nas.store import studies
from nas.store.columns import Completion

GRID = st.integers(0, 6).map(lambda step: step / 4)
ROWS = st.lists(st.tuples(GRID, GRID, GRID), min_size=1, max_size=20)


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@given(ROWS, ROWS)
def test_who_dominates_is_told_for_all_pairs(these: list[tuple[float, ...]], those: list[tuple[float, ...]]) -> None:
    found = dominates(these, those)
    for i, a in enumerate(these):
        for j, b in enumerate(those):
            worse = any(x > y for x, y in zip(a, b, strict=True))
            assert found[i, j] == (not worse and a != b)


def test_what_noise_cannot_bring_to_the_front_is_left_out_and_changes_no_chance() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((300, 3))
    sd = np.full_like(points, 0.02)
    on = front_mask(points)
    near = nearest(*near_front(points, sd, on), 200)
    assert set(np.flatnonzero(on)) <= set(near.tolist()) and len(near) < 200
    axes = {i: [Axis(value=0.0, coordinate=x, sd=0.02) for x in row] for i, row in enumerate(points.tolist())}
    whole = {row.trial: row.p_front for row in rank_trials(axes, [2.0] * 3)}
    part = {row.trial: row.p_front for row in rank_trials({i: axes[i] for i in near.tolist()}, [2.0] * 3)}
    assert sum(chance for trial, chance in whole.items() if trial not in part) < 0.1
    # Two draws of a thousand differ by more than 0.1 in one of a million.
    assert all(abs(whole[trial] - chance) < 0.1 for trial, chance in part.items())


def test_of_too_many_near_ones_the_nearest_stay() -> None:
    points = np.column_stack([np.linspace(0, 1, 50), np.linspace(0, 1, 50)])
    near = nearest(*near_front(points, np.full_like(points, 1.0), front_mask(points)), 10)
    assert near.tolist() == list(range(10))
    exact = nearest(*near_front(points, np.zeros_like(points), front_mask(points)), 10)
    assert exact.tolist() == [0]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_near_is_kept_up_as_it_would_be_found_anew(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_front, "MOST_NEAR", 64)
    rng, space = np.random.default_rng(seed), tiny_space()
    table, course, kept = LiveTable(3, 0), LiveCourse([2.0] * 3), LiveFront(space, None)  # type: ignore[arg-type]
    for event in range(1, 400):
        new = event <= 200 or rng.random() < 0.3
        trial = len(table) if new else int(rng.choice(course.front if event % 2 else len(table)))
        table._make_room(len(table) + new)
        table.rows["origin"][trial] = ORIGINS.index("proposal")
        # What is on the front often stays there when it is known better.
        point = rng.random(3) + 0.3 if new or event % 2 == 0 else table.rows["axes"][trial, :, 1] + 0.1 * rng.random(3)
        table.rows["axes"][trial] = np.column_stack([point, point, rng.random(3) * 0.05])
        table.rows["changed"][trial] = event
        course.complete([Completion(event, trial, float(event))], table) if new else course.revise([trial], table)
        if rng.random() < 0.7:  # else nobody looks
            near = kept._find_near(table, course)
            kept._of = event
            anew = LiveFront(space, None)._find_near(table, course)  # type: ignore[arg-type]
            assert near.tolist() == anew.tolist()
    assert len(course.front) < min(64, len(kept._before.left)) and len(kept._before.left) < len(table)


def test_noise_is_drawn_anew_only_for_trials_that_count(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = ranking.front_chances

    def counted(points: object, axes: list[object], draws: int) -> object:
        drawn.append(draws)
        return real(points, axes, draws)  # type: ignore[arg-type]

    monkeypatch.setattr(live_front, "front_chances", counted)
    study = lab.study()
    first = lab.complete(study, 1.0, 0.8, 0.8)
    live = LiveStudies(lab.store)
    before = points(live.get("study"))
    points(live.get("study"))
    lab.propose(study)
    points(live.get("study"))
    assert drawn == [1000]
    lab.measure(study, first, 0.8, 0.8, n=9)
    lab.note_quality(study, first, 1.1)
    after = points(live.get("study"))
    assert drawn == [1000, 1000]
    assert (before.front[0].values["quality"], after.front[0].values["quality"]) == (1.0, 1.1)


def test_a_front_of_too_many_says_so(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_front, "ALL_DRAWS", 2)
    study = lab.study()
    for step in range(20):
        lab.complete(study, 1.0 + step / 10, 0.5 + step / 10, 0.5)
    live = LiveStudies(lab.store).get("study")
    told = points(live)
    assert len(told.front) == 20 and {entry.p_front for entry in told.front} == {None}
    assert live.volume() is None


def test_a_study_that_is_deleted_while_it_is_told_is_gone(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 0.5, 0.5)
    live = LiveStudies(lab.store).get("study")
    studies.delete(lab.store, study)
    with pytest.raises(UnknownName):
        points(live)


def test_trials_that_no_objective_tells_apart_are_told_with_the_front(lab: LiveLab) -> None:
    study = lab.study()
    best = lab.complete(study, 1.0, 0.5, 0.5)
    tied = lab.complete(study, 0.999, 0.501, 0.501)
    lab.complete(study, 0.5, 0.9, 0.9)
    told = points(LiveStudies(lab.store).get("study"))
    assert [(entry.trial, entry.on, entry.ties) for entry in told.front] == [
        (best, True, (tied,)), (tied, False, (best,))
    ]  # fmt: skip
    assert told.front[1].hv_contribution == 0 < told.front[0].hv_contribution
    chance = told.front[1].p_front
    assert chance is not None and 0 < chance < 1


@given(st.lists(st.floats(-1e12, 1e12) | st.just(float("nan")), max_size=20))
def test_numbers_keep_six_digits(numbers: list[float]) -> None:
    for exact, short in zip(numbers, rounded(np.array(numbers, float)).tolist(), strict=True):
        assert short == pytest.approx(exact, rel=1e-5, abs=1e-22, nan_ok=True)
        assert len(f"{short:.12g}".partition("e")[0].strip("-0.").replace(".", "")) <= 7


@given(st.lists(st.tuples(GRID, GRID), min_size=5, max_size=30))
def test_ranks_alone_give_the_same_rho(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    both, alone = rank_correlation(first, second), spearman(first, second)
    assert both.spearman == alone.spearman and both.reason == alone.reason
    if alone.spearman is not None:
        order = sorted(range(len(first)), key=first.__getitem__)
        ranks = [sum(x < y for x in first) + 0.5 * sum(x == y for x in first) for y in first]
        others = [sum(x < y for x in second) + 0.5 * sum(x == y for x in second) for y in second]
        assert order and alone.spearman.value == pytest.approx(np.corrcoef(ranks, others)[0, 1])
