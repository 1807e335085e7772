"""The picture of a front."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from nas.analysis.plot import draw_front

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
    return {"trial": trial, "objectives": {"quality": quality, "latency": latency, "memory": memory}}


@pytest.fixture
def report() -> dict[str, Any]:
    front = [row(71, 1.05, 300, 50), row(93, 1.0, 280, 48)]
    return {
        "study": "demo",
        "hypervolume": 0.0123,
        "objectives": [QUALITY, LATENCY, MEMORY],
        "budgets": [{"metric": "peak_rss", "workload": "chat", "limit": 55.0}],
        "front": front,
        "ranking": [*front, row(3, 0.9, 400, 52)],
        "noisy": [],
        "references": [{"name": "published", "objectives": {"quality": 1.0, "latency": 310, "memory": 51}}],
    }


def test_three_objectives_make_three_panels_with_everything_on_them(report: dict[str, Any], tmp_path: Path) -> None:
    png, svg = draw_front(report, tmp_path / "new" / "folder")
    text = svg.read_text()
    words = set(re.findall(r">([^<>]+)</text>", text))
    assert {"front", "complete", "budget", "published reference", "71", "93"} <= words
    assert text.count("quality, more is better") == 2
    assert text.count("latency at chat [ms], less is better") == 2
    assert text.count("memory at chat [MB], less is better") == 2
    height, width, _ = imread(png).shape
    assert width > 2 * height
    assert sorted(path.name for path in png.parent.iterdir()) == ["front.png", "front.svg"]


def test_a_study_without_complete_trials_is_drawn_too(report: dict[str, Any], tmp_path: Path) -> None:
    report |= {"objectives": [QUALITY, LATENCY], "front": [], "ranking": [], "references": [], "budgets": []}
    report["hypervolume"] = None
    png, _ = draw_front(report, tmp_path)
    assert png.stat().st_size > 0


def test_what_is_far_from_the_front_does_not_squeeze_it(report: dict[str, Any], tmp_path: Path) -> None:
    far = {"name": "attention", "objectives": {"quality": 0.2, "latency": 330, "memory": 90}}
    report["references"].append(far)
    report["ranking"].append(row(4, 0.3, 300, 50))
    words = re.findall(r">([^<>]+)</text>", draw_front(report, tmp_path)[1].read_text())
    assert {"attention \u2193 0.2", "attention \u2192 90 \u2193 0.2", "attention \u2191 90"} <= set(words)
    assert words.count("2 complete outside") == 2 and words.count("1 complete outside") == 1  # trial 3 is slow
    ticks = [float(word) for word in words if re.fullmatch(r"[01]\.\d+", word)]
    assert min(ticks) > 0.9


def test_a_reference_that_is_not_measured_yet_is_left_out(report: dict[str, Any], tmp_path: Path) -> None:
    report["references"].append({"name": "attention", "objectives": {"quality": None, "latency": 330, "memory": 60}})
    _, svg = draw_front(report, tmp_path)
    assert "attention reference" in svg.read_text()  # on the panel of latency and memory
    report["references"][1]["objectives"]["memory"] = None
    _, svg = draw_front(report, tmp_path)
    assert "attention reference" not in svg.read_text()


def test_budgets_are_not_drawn_on_axes_that_are_ratios(report: dict[str, Any], tmp_path: Path) -> None:
    report["objectives"] = [QUALITY, MEMORY | {"aggregate": "worst", "unit": "x"}]
    _, svg = draw_front(report, tmp_path)
    assert "budget" not in svg.read_text()


def test_noisy_trials_are_set_apart(report: dict[str, Any], tmp_path: Path) -> None:
    report |= {"objectives": [QUALITY, LATENCY], "noisy": [row(4, 1.2, 200, 40)]}
    _, svg = draw_front(report, tmp_path)
    assert ">noisy</text>" in svg.read_text()


def test_equal_reports_give_equal_files(report: dict[str, Any], tmp_path: Path) -> None:
    report["objectives"] = [QUALITY, LATENCY]
    first, second = draw_front(report, tmp_path / "a"), draw_front(report, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
