"""The front as a page tells it: chances and ties as a report has them, and no more work than there is news."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_lab import LiveLab
from numpy.typing import NDArray

from nas.core import pareto
from nas.core.pareto import TrialAxes, dominates, front_chances, front_mask, near_front
from nas.core.scoring import Axis
from nas.search.analysis import snapshot
from nas.search.analysis.snapshot import Snapshots, rounded
from nas.serve.views.study import points

GRID = st.integers(0, 6).map(lambda step: step / 4)
ROWS = st.lists(st.tuples(GRID, GRID, GRID), min_size=1, max_size=20)


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@given(ROWS, ROWS)
def test_who_dominates_is_told_for_all_pairs(these: list[tuple[float, ...]], those: list[tuple[float, ...]]) -> None:
    dominance = dominates(these, those)
    for i, a in enumerate(these):
        for j, b in enumerate(those):
            worse = any(x > y for x, y in zip(a, b, strict=True))
            assert dominance[i, j] == (not worse and a != b)


def scored(points: NDArray[np.float64], sd: float) -> dict[int, list[Axis]]:
    return {
        i: [Axis(value=0.0, coordinate=coordinate, sd=sd) for coordinate in row]
        for i, row in enumerate(points.tolist())
    }


def test_what_noise_cannot_bring_to_the_front_is_left_out_and_changes_no_chance() -> None:
    points = np.random.default_rng(0).random((300, 3))
    axes = scored(points, 0.02)
    near = near_front(axes, 200)
    assert set(np.flatnonzero(front_mask(points)).tolist()) <= set(near) and len(near) < 200
    whole = front_chances(axes)
    part = front_chances({trial: axes[trial] for trial in near})
    assert sum(chance or 0.0 for trial, chance in whole.items() if trial not in part) < 0.1
    # Two draws of a thousand differ by more than 0.1 in one of a million.
    assert all(abs((whole[trial] or 0.0) - (chance or 0.0)) < 0.1 for trial, chance in part.items())
    assert near_front(axes, 200, front=np.flatnonzero(front_mask(points)).tolist()) == near


def test_of_too_many_near_ones_the_nearest_stay() -> None:
    points = np.column_stack([np.linspace(0, 1, 50), np.linspace(0, 1, 50)])
    assert near_front(scored(points, 1.0), 10) == list(range(10))
    assert near_front(scored(points, 0.0), 10) == [0]
    assert near_front(scored(points, 0.0), 50) == list(range(50))


def test_noise_is_drawn_anew_only_for_trials_that_count(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = pareto.front_chances

    def counted(axes: TrialAxes) -> object:
        drawn.append(len(axes))
        return real(axes)

    monkeypatch.setattr(snapshot, "front_chances", counted)
    study = lab.study()
    first = lab.complete(study, 1.0, 0.8, 0.8)
    snapshots = Snapshots(lab.store)
    before = points(snapshots.get("study"))
    points(snapshots.get("study"))
    lab.propose(study)
    points(snapshots.get("study"))
    assert drawn == [1]
    lab.measure(study, first, 0.8, 0.8, n=9)
    lab.note_quality(study, first, 1.1)
    after = points(snapshots.get("study"))
    assert drawn == [1, 1]
    assert (before.front[0].values["quality"], after.front[0].values["quality"]) == (1.0, 1.1)


def test_a_front_of_too_many_says_so(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "MOST_NEAR", 2)
    study = lab.study()
    for step in range(20):
        lab.complete(study, 1.0 + step / 10, 0.5 + step / 10, 0.5)
    study_now = Snapshots(lab.store).get("study")
    page = points(study_now)
    assert len(page.front) == 20 and {entry.p_front for entry in page.front} == {None}
    assert study_now.volume is None


def test_trials_that_no_objective_tells_apart_are_told_with_the_front(lab: LiveLab) -> None:
    study = lab.study()
    best = lab.complete(study, 1.0, 0.5, 0.5)
    tied = lab.complete(study, 0.999, 0.501, 0.501)
    lab.complete(study, 0.5, 0.9, 0.9)
    page = points(Snapshots(lab.store).get("study"))
    assert [(entry.trial, entry.on, entry.ties) for entry in page.front] == [
        (best, True, (tied,)), (tied, False, (best,))
    ]  # fmt: skip
    assert page.front[1].hv_contribution == 0 < page.front[0].hv_contribution
    chance = page.front[1].p_front
    assert chance is not None and 0 < chance < 1


@given(st.lists(st.floats(-1e12, 1e12) | st.just(float("nan")), max_size=20))
def test_numbers_keep_six_digits(numbers: list[float]) -> None:
    for exact, short in zip(numbers, rounded(np.array(numbers, float)).tolist(), strict=True):
        assert short == pytest.approx(exact, rel=1e-5, abs=1e-22, nan_ok=True)
        assert len(f"{short:.12g}".partition("e")[0].strip("-0.").replace(".", "")) <= 7
