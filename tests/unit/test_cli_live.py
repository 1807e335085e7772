"""How a running study is shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nas.cli.launch import draw, line, live_display
from nas.core.pareto import Ranked
from nas.core.units import show_duration
from nas.search.study.estimate import Estimate, Span
from nas.search.study.orchestrator import FrontRow, Snapshot

LAYOUT = "d512 v8192 ffn=swiglu:1536 [C3*2 A8/4 C3*2 A8/4 C3 A8/4]"

LEFT = Estimate(
    seconds=Span(low=90, typical=125, high=250), parts=[], based_on=["4 trainings"], depends_on=[], text="about 2 min"
)


def snapshot(**changes: object) -> Snapshot:
    row = FrontRow(3, LAYOUT, (1.04, 310.0, 51.2), Ranked(3, 0, 0.01, 0.9, ()))
    values: dict[str, object] = {
        "study": "demo",
        "states": {"training": 2, "infeasible": 1},
        "proposed": 5,
        "wanted": 16,
        "active": ("trial 4: training", "published reference: measuring"),
        "objectives": ("quality", "latency", "memory"),
        "hypervolume": 0.0123,
        "front": (row,),
        "elapsed_s": 65.0,
        "left": LEFT,
    }
    return Snapshot(**(values | changes))  # type: ignore[arg-type]


def test_line_has_counts_hypervolume_and_time_left() -> None:
    text = line(snapshot())
    for part in ("1 min 05 s", "5/16", "2 training", "1 infeasible", "0.0123", "trial 4: training", "about 2 min"):
        assert part in text
    assert "(90 s to 4 min) left" in text


def test_line_omits_unknown_values() -> None:
    text = line(snapshot(hypervolume=None, left=None, front=(), active=(), states={}))
    assert "hypervolume" not in text
    assert "left" not in text
    assert " |  | " not in text


@pytest.mark.parametrize("width", [60, 200])
def test_screen_shows_the_front_with_brackets_intact(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(draw(snapshot()))
    text = captured.get()
    assert "front so far" in text
    assert "1.04" in text
    assert ("[C3*2 A8/4" in text) == (width == 200)
    assert max(map(len, text.splitlines())) <= width


def test_lines_are_written_when_trials_move_and_not_for_every_look(capsys: pytest.CaptureFixture[str]) -> None:
    with live_display() as update:
        for _ in range(5):
            update(snapshot())
        update(snapshot(proposed=6))
    written = capsys.readouterr()
    assert written.out == ""
    assert [text.split(" | ")[1] for text in written.err.splitlines()] == ["5/16 proposed", "6/16 proposed"]


@pytest.mark.parametrize(("seconds", "text"), [(4.6, "5 s"), (60, "1 min 00 s"), (3725, "1 h 02 min")])
def test_duration(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text
