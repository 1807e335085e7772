"""The sentences that say what a study found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from live_lab import LiveLab
from study_support import figure

from nas.core.trial import EventKind
from nas.infra.store import events, studies, trials
from nas.infra.store.rows import StudyState
from nas.search.analysis.headline import Headline, headline
from nas.search.analysis.snapshot import Snapshots
from nas.search.proxy.quality import Quality
from nas.search.study.events import Named, Remeasured, Rescored, SecondFigures


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


def study_and_reference(lab: LiveLab) -> tuple[int, int]:
    """A study, and the trial of its published reference."""
    study = lab.study()
    return study, lab.complete(study, 1.0, 1.0, 1.0, origin="reference")


def read(lab: LiveLab) -> Headline:
    result = headline(Snapshots(lab.store).get("study"))
    assert result is not None
    return result


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
    study, _ = study_and_reference(lab)
    first = lab.complete(study, 0.8, 0.5, 1.0)
    result = read(lab)
    assert result.best is None
    assert result.text == (
        "1 layout on the front, none shown to be better than the published reference (measured once); nearest, trial"
        f" {first}: quality at least 0.17 lower, latency at least 49 % lower, memory 3.4 % lower to 3.5 % higher."
        " Too few layouts have a quality (1) to tell how far it orders them."
    )


def test_small_real_changes_are_not_rounded_away(lab: LiveLab) -> None:
    study, _ = study_and_reference(lab)
    lab.complete(study, 1.5, 0.96, 1.0)
    assert "latency at least 2.3 % lower" in read(lab).text


def test_the_best_is_named_with_its_gain_and_how_sure_it_is(lab: LiveLab) -> None:
    study, _ = study_and_reference(lab)
    best = lab.complete(study, 1.0, 0.55, 0.71)
    lab.complete(study, 0.5, 0.5, 0.7)  # worse in quality: it beats nothing
    result = read(lab)
    assert (result.front, result.better, result.best) == (2, 1, best)
    assert result.text == (
        "1 of 2 layouts on the front is better than the published reference (measured once, with bounds that hold for"
        f" any of 2); trial {best}: quality 0.037 lower to 0.037 higher, latency at least 44 % lower, memory at least"
        " 26 % lower. Too few layouts have a quality (2) to tell how far it orders them."
    )
    assert (result.second, result.confidence) == (False, 0.95)
    assert [(gain.objective, gain.low is None, gain.high is None, gain.change) for gain in result.gains] == [
        ("quality", False, False, None),
        ("latency", True, False, None),
        ("memory", True, False, None),
    ]


@pytest.mark.parametrize(
    ("qualities", "sentence"),
    [
        ([1 + 0.001 * step for step in range(9)],
         "Differences in quality between the layouts may be mostly noise (reliability 0.00);"),
        ([1 + 0.2 * step for step in range(9)],
         "Quality orders the layouts (reliability 1.00), the best third too (1.00);"),
        ([*(0.2 * step for step in range(6)), 1.200, 1.201, 1.202],
         "Quality tells good layouts from bad (reliability 1.00); that it orders the best third is not shown (0.01);"),
        ([1 + 0.2 * step for step in range(8)],
         "Too few layouts have a quality (8) to tell how far it orders them."),
    ],
)  # fmt: skip
def test_how_far_qualities_order_this_front_is_part_of_it(
    lab: LiveLab, qualities: Sequence[float], sentence: str
) -> None:
    study, _ = study_and_reference(lab)
    for step, quality in enumerate(qualities):
        lab.complete(study, quality, 0.5 + 0.05 * step, 0.7)
    text = read(lab).text
    assert sentence in text
    assert text.endswith(" of the front's members are there by noise.") == sentence.endswith(";")


def test_a_gain_within_the_noise_is_none(lab: LiveLab) -> None:
    study, _ = study_and_reference(lab)
    lab.complete(study, 1.005, 0.995, 0.999)
    result = read(lab)
    assert (result.front, result.better, result.best) == (1, 0, None)
    assert result.text == (
        "1 layout on the front, none shown to be better than the published reference (measured once); nearest, trial 1:"
        " quality 0.029 lower to 0.039 higher, latency 2.2 % lower to 1.2 % higher, memory 3.5 % lower to 3.4 % higher."
        " Too few layouts have a quality (1) to tell how far it orders them."
    )


def test_better_quality_is_given_in_its_unit(lab: LiveLab) -> None:
    study, _ = study_and_reference(lab)
    lab.complete(study, 1.2, 0.99, 1.0)
    assert "quality at least 0.17 higher" in read(lab).text


STEADY = [(1.0, 1.0), (1.04, 1.0)]
"""Latency and memory of the published reference in two rounds: the device was slower in the second."""


def again(lab: LiveLab, study: int, trial: int, rounds: Sequence[tuple[float, float]]) -> None:
    """The trial was measured again: latency and memory of each round."""
    for round_, (latency, memory) in enumerate(rounds):
        figures = {"latency": figure(latency), "peak_rss": figure(memory, unit="MB")}
        row = SecondFigures("local", "fake", "chat", result="0" * 64, figures=figures)
        trials.add_event(lab.store, study, trial, EventKind.PROGRESS, Remeasured(round_, (row,)).to_json())


def rescored(lab: LiveLab, study: int, trial: int, per_seed: Sequence[float]) -> None:
    """The trial was trained on fresh seeds."""
    value = sum(per_seed) / len(per_seed)
    quality = Quality(rung="first", value=value, per_group={}, sd=0.01, n_seeds=len(per_seed))
    note = Rescored(quality, {100 + place: seed for place, seed in enumerate(per_seed)})
    trials.add_event(lab.store, study, trial, EventKind.PROGRESS, note.to_json())


def second(lab: LiveLab, study: int, reference: int, rounds: Mapping[int, Sequence[tuple[float, float]]]) -> None:
    """Trials were named, in their order, and measured again beside the reference."""
    events.append(lab.store, study, Named(tuple(rounds)).to_json())
    again(lab, study, reference, STEADY)
    for trial, figures in rounds.items():
        again(lab, study, trial, figures)


def test_what_is_said_is_of_the_second_measurement_alone(lab: LiveLab) -> None:
    study, reference = study_and_reference(lab)
    lucky = lab.complete(study, 1.3, 0.3, 0.5)
    second(lab, study, reference, {lucky: [(0.9, 0.8), (0.936, 0.8)]})
    rescored(lab, study, reference, [1.0, 1.02, 0.98, 1.0])
    rescored(lab, study, lucky, [1.01, 1.04, 0.98, 1.01])
    result = read(lab)
    assert (result.second, result.best, result.better, result.confidence) == (True, lucky, 1, 0.95)
    assert result.text.startswith(
        f"Trial {lucky} is better than the published reference: quality 1.010 (0.990 to 1.030), latency 10 % lower,"
        " memory 20 % lower; by a second measurement, with 95 % intervals."
    )
    changes = {gain.objective: gain.change for gain in result.gains}
    assert changes == pytest.approx({"quality": 0.01, "latency": -0.1, "memory": -0.2})


def test_luck_that_does_not_come_back_is_no_win(lab: LiveLab) -> None:
    study, reference = study_and_reference(lab)
    lucky = lab.complete(study, 1.0, 0.5, 1.0)
    second(lab, study, reference, {lucky: [(0.97, 1.0), (1.07, 1.0)]})
    result = read(lab)
    assert (result.best, result.better, result.named) == (None, 0, lucky)
    assert result.text.startswith(
        f"No layout is shown to be better than the published reference. Trial {lucky}, nearest before, cannot be told"
        " apart from it: quality was not measured again, latency"
    )


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([(1.2, 1.0), (1.25, 1.0)], "is worse"),
        ([(0.8, 1.2), (0.833, 1.2)], "is better in part and worse in part"),
    ],
)
def test_what_is_worse_is_said(lab: LiveLab, rounds: list[tuple[float, float]], verdict: str) -> None:
    study, reference = study_and_reference(lab)
    trial = lab.complete(study, 1.0, 0.5, 1.0)
    second(lab, study, reference, {trial: rounds})
    assert read(lab).text.startswith(
        f"No layout is shown to be better than the published reference. Trial {trial}, nearest before, {verdict}: "
    )


def test_others_that_are_better_are_named_and_one_that_broke_a_budget_is_not(lab: LiveLab) -> None:
    study, reference = study_and_reference(lab)
    broken, first, other, third = (lab.complete(study, 1.0, 0.5 + step / 100, 1 - step / 100) for step in range(4))
    latencies = {broken: 0.5, first: 0.7, other: 0.8, third: 1.0}
    second(lab, study, reference, {trial: [(time, 1.0), (time * 1.041, 1.0)] for trial, time in latencies.items()})
    trials.add_event(lab.store, study, broken, EventKind.INFEASIBLE, {"reason": "on fresh seeds"})
    result = read(lab)
    assert (result.best, result.better) == (first, 2)
    assert f"Better, too: trial {other}." in result.text


def test_a_loser_is_not_named_as_the_winner_where_others_are_better(lab: LiveLab) -> None:
    study, reference = study_and_reference(lab)
    loser, first, other = (lab.complete(study, 1.0, 0.5 + step / 100, 1 - step / 100) for step in range(3))
    latencies = {loser: 1.2, first: 0.7, other: 0.8}
    second(lab, study, reference, {trial: [(time, 1.0), (time * 1.041, 1.0)] for trial, time in latencies.items()})
    result = read(lab)
    assert (result.best, result.better, result.named) == (None, 2, loser)
    assert result.text.startswith(
        f"Trials {first} and {other} are better than the published reference. Trial {loser}, first before, is worse: "
    )


def test_before_all_rounds_are_done_nothing_is_said_of_them(lab: LiveLab) -> None:
    study, reference = study_and_reference(lab)
    trial = lab.complete(study, 1.0, 0.5, 1.0)
    events.append(lab.store, study, Named((trial,)).to_json())
    again(lab, study, reference, STEADY[:1])
    again(lab, study, trial, [(0.5, 1.0)])
    assert not read(lab).second


def test_bounds_of_one_measurement_widen_with_the_layouts_that_were_proposed(lab: LiveLab) -> None:
    study, _ = study_and_reference(lab)
    lab.complete(study, 1.0, 0.976, 1.0)
    assert read(lab).better == 1
    for _ in range(40):
        lab.propose(study)
    assert read(lab).better == 0, "the best of so many is that much faster by luck"
