"""The sentences that say what a study found."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_lab import LiveLab

from nas.analysis.headline import Headline, headline
from nas.analysis.snapshot import Snapshots


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
    assert read(lab).text == "No trial is complete yet."


def test_the_best_is_named_with_its_gain_and_how_sure_it_is(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    best = lab.complete(study, 1.0, 0.55, 0.71)
    lab.complete(study, 0.5, 0.5, 0.7)  # worse in quality: it beats nothing
    found = read(lab)
    assert (found.front, found.better, found.best) == (2, 1, best)
    assert found.text == (
        f"1 of 2 layouts on the front beat the published reference. Best: trial {best}, latency 45% lower,"
        " memory 29% lower, quality equal within the noise (sure to more than 99%)."
    )


def test_a_gain_within_the_noise_is_none(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    lab.complete(study, 1.005, 0.995, 0.999)
    found = read(lab)
    assert (found.front, found.better, found.best) == (1, 0, None)
    assert found.text == (
        "1 layout is on the front; none is better than the published reference without being worse somewhere, as far as"
        " the noise tells."
    )


def test_better_quality_is_given_in_its_unit(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    lab.complete(study, 1.2, 0.99, 1.0)
    assert "quality 1.20 instead of 1.00" in read(lab).text
