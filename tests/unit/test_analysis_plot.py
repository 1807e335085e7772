"""The picture of a front."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from nas.search.analysis.plot import draw_front, front_svg

QUALITY = {"name": "quality", "metric": "quality", "workload": None, "unit": "", "direction": "max", "aggregate": None}
LATENCY = {
    "name": "latency",
    "metric": "latency",
    "workload": "chat",
    "unit": "ms",
    "direction": "min",
    "aggregate": None,
}
MEMORY = {
    "name": "memory",
    "metric": "peak_rss",
    "workload": "chat",
    "unit": "MB",
    "direction": "min",
    "aggregate": None,
}


def row(trial: int, quality: float, latency: float, memory: float) -> dict[str, Any]:
    objectives = {"quality": quality, "latency": latency, "memory": memory}
    return {"trial": trial, "objectives": objectives, "value_sd": dict.fromkeys(objectives, 0.01)}


def reference(name: str, **objectives: float | None) -> dict[str, Any]:
    return {"name": name, "objectives": objectives, "value_sd": dict.fromkeys(objectives, 0.01)}


@pytest.fixture
def report() -> dict[str, Any]:
    front = [row(71, 1.05, 300, 50), row(93, 1.0, 280, 48)]
    return {
        "study": "demo",
        "hypervolume": 0.0123,
        "headline": {"named": 93},
        "reliability": {"text": "reliability of quality 0.97 over 14 candidates, 0.41 in the top third; not re-scored"},
        "objectives": [QUALITY, LATENCY, MEMORY],
        "budgets": [{"metric": "peak_rss", "workload": "chat", "limit": 55.0}],
        "front": front,
        "ranking": [*front, row(3, 0.9, 400, 52)],
        "references": [reference("published", quality=1.0, latency=310, memory=51)],
    }


def words_of(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg)


def test_three_objectives_make_one_large_and_two_small_panels_with_everything_on_them(
    report: dict[str, Any], tmp_path: Path
) -> None:
    png, svg = draw_front(report, tmp_path / "new" / "folder")
    words = words_of(svg.read_text())
    assert {"front, with 95 % interval", "boundary of the front on these axes", "budget", "reference"} <= set(words)
    assert words.count("trial 93") == words.count("published") == 3, "the best and the reference are named everywhere"
    assert words.count("71") == 1, "other trials in the large panel"
    for label in ("quality \u2191", "latency at chat [ms] \u2193", "memory at chat [MB] \u2193"):
        assert words.count(label) == 2
    assert words.count("\u2196 better") == 2 and words.count("\u2199 better") == 1
    assert "reliability of quality 0.97 over 14 candidates, 0.41 in the top third; not re-scored" in words
    height, width, _ = imread(png).shape
    assert width > 1.5 * height
    assert sorted(path.name for path in png.parent.iterdir()) == ["front.png", "front.svg"]


def test_labels_that_would_overlap_are_left_out(report: dict[str, Any]) -> None:
    report["front"] += [row(trial, 1.04 + trial * 1e-6, 299, 50) for trial in range(400, 430)]
    report["ranking"] = report["front"]
    words = words_of(front_svg(report))
    assert words.count("trial 93") == 3
    assert 0 < sum(word in map(str, range(400, 430)) for word in words) < 15


def test_without_a_headline_the_first_of_the_front_is_named(report: dict[str, Any]) -> None:
    report["headline"] = None
    assert words_of(front_svg(report)).count("trial 71") == 3


def test_a_study_without_complete_trials_is_drawn_too(report: dict[str, Any]) -> None:
    report |= {"objectives": [QUALITY, LATENCY], "front": [], "ranking": [], "references": [], "budgets": []}
    report["hypervolume"] = None
    assert "</svg>" in front_svg(report)


def test_what_is_far_from_the_front_does_not_squeeze_it(report: dict[str, Any]) -> None:
    far = reference("attention", quality=0.2, latency=330, memory=90)
    report["references"].append(far)
    report["ranking"].append(row(4, 0.3, 300, 50))
    words = words_of(front_svg(report))
    assert {"attention \u2193 0.2", "attention \u2192 90 \u2193 0.2", "attention \u2191 90"} <= set(words)
    assert words.count("2 complete outside") == 2 and words.count("1 complete outside") == 1  # trial 3 is slow
    ticks = [float(word) for word in words if re.fullmatch(r"[01]\.\d+", word)]
    assert min(ticks) > 0.9


def test_a_reference_that_is_not_measured_yet_is_left_out(report: dict[str, Any]) -> None:
    report["references"].append(reference("attention", quality=None, latency=330, memory=60))
    named = [word for word in words_of(front_svg(report)) if "attention" in word]
    assert named == ["attention \u2191 60"], "on the panel of latency and memory"
    report["references"][1]["objectives"]["memory"] = None
    assert not any("attention" in word for word in words_of(front_svg(report)))


def test_budgets_are_not_drawn_on_axes_that_are_ratios(report: dict[str, Any]) -> None:
    report["objectives"] = [QUALITY, MEMORY | {"aggregate": "worst", "unit": "x"}]
    assert "budget" not in front_svg(report)


def test_budgets_are_drawn_on_axes_of_their_device_and_runtime(report: dict[str, Any]) -> None:
    report["objectives"] = [QUALITY, MEMORY | {"device": "phone", "runtime": "llama.cpp"}]
    budget = report["budgets"][0] | {"device": "phone", "runtime": "llama.cpp q4_0"}
    for change, drawn in (({}, True), ({"device": "local"}, False), ({"runtime": "executorch"}, False)):
        report["budgets"] = [budget | change]
        assert ("budget" in front_svg(report)) is drawn, change


def test_noise_that_is_not_known_has_no_interval(report: dict[str, Any]) -> None:
    report["front"][0]["value_sd"]["latency"] = report["references"][0]["value_sd"]["quality"] = None
    assert words_of(front_svg(report)).count("trial 93") == 3


def test_large_numbers_are_thousands(report: dict[str, Any]) -> None:
    for row in (*report["ranking"], *report["references"]):
        row["objectives"]["memory"] *= 1000
    assert {"48 k", "51 k"} <= set(words_of(front_svg(report)))


def test_dollars_make_no_formula(report: dict[str, Any]) -> None:
    report["objectives"][1] = LATENCY | {"workload": "$\\x$"}
    assert "latency at $\\x$ [ms] \u2193" in words_of(front_svg(report))


def test_equal_reports_give_equal_files(report: dict[str, Any], tmp_path: Path) -> None:
    report["objectives"] = [QUALITY, LATENCY]
    first, second = draw_front(report, tmp_path / "a"), draw_front(report, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[1].read_text() == front_svg(report)
