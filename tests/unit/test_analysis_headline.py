"""The sentences that say what a study found."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_lab import LiveLab

from nas.core.trial import EventKind
from nas.infra.store import studies, trials
from nas.infra.store.rows import StudyState
from nas.search.analysis.headline import Headline, headline
from nas.search.analysis.snapshot import Snapshots


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


def read(lab: LiveLab) -> Headline:
    found = headline(Snapshots(lab.store).get("study"))
    assert found is not None
    return found


def test_before_the_references_there_is_none(lab: LiveLab) -> None:
    lab.study(judged=False)
    assert headline(Snapshots(lab.store).get("study")) is None


def test_without_a_front_it_says_so(lab: LiveLab) -> None:
    lab.study()
    assert read(lab).text == "Nothing has won yet: no trial has ended."


def test_a_study_without_a_front_says_what_became_of_its_trials(lab: LiveLab) -> None:
    study = lab.study()
    broken = lab.propose(study)
    for kind in (EventKind.EXPORTED, EventKind.MEASURING, EventKind.INFEASIBLE):
        trials.add_event(lab.store, study, broken, kind, {})
    lab.propose(study)
    became = "Of 2 trials: 1 with a broken budget."
    assert read(lab).text == f"Nothing has won yet. {became}"
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert read(lab).text == f"Nothing has won. {became}"


def test_where_nothing_beats_the_reference_the_first_exchange_is_named(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    first = lab.complete(study, 0.8, 0.5, 1.0)
    found = read(lab)
    assert found.best is None
    assert found.text.endswith(
        f"The one that adds most hypervolume: trial {first}, latency 50 % lower, quality 0.80 instead of 1.00, memory"
        " equal within the noise (sure to more than 99 %)."
    )


def test_small_real_changes_are_not_rounded_away(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    lab.complete(study, 1.5, 0.982, 1.0)
    assert "latency 1.8 % lower" in read(lab).text


def test_the_best_is_named_with_its_gain_and_how_sure_it_is(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    best = lab.complete(study, 1.0, 0.55, 0.71)
    lab.complete(study, 0.5, 0.5, 0.7)  # worse in quality: it beats nothing
    found = read(lab)
    assert (found.front, found.better, found.best) == (2, 1, best)
    assert found.text == (
        "1 of 2 layouts on the front is better than the published reference in something and, within the noise, worse"
        f" in nothing. The one that adds most hypervolume: trial {best}, latency 45 % lower, memory 29 % lower, quality"
        " equal within the noise (sure to more than 99 %)."
    )


@pytest.mark.parametrize(
    ("apart", "told"),
    [(0.001, "Differences in quality between the layouts are mostly noise (reliability 0.00)."),
     (0.2, "Reliability of quality: 1.00.")],
)  # fmt: skip
def test_how_reliable_qualities_are_is_part_of_it(lab: LiveLab, apart: float, told: str) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    for step in range(4):
        lab.complete(study, 1.0 + apart * step, 0.5 + 0.1 * step, 0.7)
    assert read(lab).text.endswith(told)


def test_a_gain_within_the_noise_is_none(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    lab.complete(study, 1.005, 0.995, 0.999)
    found = read(lab)
    assert (found.front, found.better, found.best) == (1, 0, None)
    assert found.text == (
        "1 layout is on the front; none is better than the published reference without being worse somewhere, as far as"
        " the noise tells. The one that adds most hypervolume: trial 1, quality, latency and memory equal within"
        " the noise."
    )


def test_better_quality_is_given_in_its_unit(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    lab.complete(study, 1.2, 0.99, 1.0)
    assert "quality 1.20 instead of 1.00" in read(lab).text
