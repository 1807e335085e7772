"""Lines of a study's log: plain words, and the figures that are known by then."""

from __future__ import annotations

from typing import Any

import pytest

from nas.search.study.events import event_line

FIGURES = [
    {"name": "latency", "value": 2498.3, "low": 2497.0, "high": 2499.6, "unit": "ms"},
    {"name": "memory", "value": 279.04, "low": None, "high": None, "unit": "MB"},
]
QUALITY = {"value": 1.00412, "sd": 0.0012, "n_seeds": 2, "rung": "long"}
TTFT = "ttft@chat: 812 ms, limit 800 ms"


@pytest.mark.parametrize(
    ("kind", "payload", "text"),
    [
        ("proposed", {}, "proposed"),
        ("measuring", {}, "measuring"),
        ("borderline", {"reason": TTFT}, f"near a budget, measured again: {TTFT}"),
        ("gated_in", {"figures": FIGURES}, "within the budgets: latency 2498.3 ms, memory 279 MB"),
        ("gated_in", {}, "within the budgets"),
        (
            "gated_in",
            {"figures": [{"name": "speed", "value": 0.31, "low": None, "high": None, "unit": ""}, FIGURES[1]]},
            "within the budgets: speed 0.31, memory 279 MB",
        ),
        ("training", {"rung": 1, "name": "short"}, "training at rung short"),
        ("training", {"rung": 1}, "training at rung 1"),
        ("confirming", {}, "promoted to the end, measured again with more repetitions"),
        ("infeasible", {"reason": TTFT}, f"breaks a budget: {TTFT}"),
        ("stopped", {"rung": 0, "reason": "not promoted from rung short"}, "stopped: not promoted from rung short"),
        (
            "complete",
            {"quality": QUALITY, "figures": FIGURES},
            "complete: quality 1.004 ± 0.001 (rung long, 2 seeds), latency 2498.3 ms, memory 279 MB",
        ),
        ("complete", {}, "complete"),
        ("progress", {"what": "quality", "quality": QUALITY}, "quality 1.004 ± 0.001 (rung long, 2 seeds)"),
    ],
)
def test_a_line_has_plain_words_and_figures(kind: str, payload: dict[str, Any], text: str) -> None:
    assert event_line(7, kind, payload) == f"trial 7: {text}"


def test_what_tells_people_nothing_is_no_line() -> None:
    assert event_line(7, "progress", {"what": "expected", "gain": 1.0}) is None
