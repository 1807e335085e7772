"""Tables and the last lines of a launch, as a terminal shows them."""

from __future__ import annotations

import io

import pytest

from nas.cli.output import print_table
from nas.cli.study_view import say_result

LAYOUT = "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]"
ROWS = [("5", "1.00", LAYOUT), ("attention", "0.90", "d1024 v65536 ffn=swiglu:4832 [A16/8*16]"), ("6", "0.8", "")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "dumb")
    return out


@pytest.mark.parametrize("columns", [40, 80, 110])
def test_a_layout_is_never_cut(columns: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(("trial", "quality", "layout"), ROWS)
    lines = terminal.getvalue().splitlines()
    assert f"5          {LAYOUT}" in lines and "trial      layout" in lines
    assert lines.count(f"attention  {ROWS[1][2]}") == 1 and sum(line.startswith("6 ") for line in lines) == 0


def test_a_wide_terminal_has_one_table(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    print_table(("trial", "quality", "layout"), ROWS)
    text = terminal.getvalue()
    assert text.count("layout") == 1 and any("1.00" in line and LAYOUT in line for line in text.splitlines())


def test_a_launch_ends_with_its_result_and_why_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    noise = {"text": "measured beside nothing"}
    say_result(
        {"headline": {"text": "2 of 2 are better."}, "ended": {"message": "all 12 were proposed"}, "noise": noise}
    )
    assert capsys.readouterr().err.splitlines() == [
        "2 of 2 are better.", "the search ended: all 12 were proposed", "measured beside nothing"
    ]  # fmt: skip
    say_result({"headline": None, "ended": None})
    assert capsys.readouterr().err == ""
