"""The picture of a front."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nas.service.picture import draw_front

QUALITY = {"name": "quality", "metric": "quality", "workload": None, "unit": "", "direction": "max"}
LATENCY = {"name": "latency", "metric": "latency", "workload": "chat", "unit": "ms", "direction": "min"}
MEMORY = {"name": "memory", "metric": "peak_rss", "workload": "chat", "unit": "MB", "direction": "min"}


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
    with Image.open(png) as image:
        assert image.width > 2 * image.height
    assert sorted(path.name for path in png.parent.iterdir()) == ["front.png", "front.svg"]


def test_a_study_without_complete_trials_is_drawn_too(report: dict[str, Any], tmp_path: Path) -> None:
    report |= {"front": [], "ranking": [], "references": [], "budgets": [], "hypervolume": None}
    png, _ = draw_front(report, tmp_path)
    assert png.stat().st_size > 0


def test_missing_figures_leave_the_point_out(report: dict[str, Any], tmp_path: Path) -> None:
    report["front"] = [
        row(71, 1.05, 300, 50),
        {"trial": 93, "objectives": {"quality": 1.0, "latency": None, "memory": 48}},
    ]
    _, svg = draw_front(report, tmp_path)
    words = re.findall(r">([^<>]+)</text>", svg.read_text())
    assert words.count("71") == 3
    assert words.count("93") == 1


def test_equal_reports_give_equal_files(report: dict[str, Any], tmp_path: Path) -> None:
    first, second = draw_front(report, tmp_path / "a"), draw_front(report, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
