"""Tables and the last lines of a launch, as a terminal shows them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

import pytest

from nas.cli.output import Format, print_rows, print_table
from nas.cli.study_view import print_front, say_result

LAYOUT = "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]"
HEADS = ("trial", "quality", "layout")
ROWS = [("5", "1.00", LAYOUT), ("attention", "0.90", "d1024 v65536 ffn=swiglu:4832 [A16/8*16]"), ("6", "0.8", "")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table_text(
    columns: int, monkeypatch: pytest.MonkeyPatch, heads: Sequence[str] = HEADS, rows: Sequence[Sequence[str]] = ROWS
) -> str:
    """Returns a table as a terminal of so many columns shows it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.redirect_stdout(Terminal()) as out:
        print_table(heads, rows)
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


@pytest.mark.parametrize("columns", [0, 40, 80, 110])
def test_a_layout_is_never_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table_text(columns, monkeypatch).splitlines()
    assert f"5          {LAYOUT}" in lines and "trial      layout" in lines
    assert lines.count(f"attention  {ROWS[1][2]}") == 1 and not any(line.startswith("6 ") for line in lines)


def test_a_table_that_is_too_wide_breaks_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ("trial", "quality", "latency [ms]", "memory [MB]", "p_front", "ties", "beaten by", "weights", "layout")
    row = ("published", "1.000", "3460", "322.8", "", "14 25 37 19 23 11", "", "356.2M, 191.4M", LAYOUT)
    text = table_text(80, monkeypatch, heads, [row])
    words = {word for head, cell in zip(heads, row, strict=True) if cell for word in f"{head} {cell}".split()}
    assert "beaten" not in text, "nothing is in this column"
    assert words <= set(text.split()), words - set(text.split())
    assert max(map(len, text.splitlines()[:-2])) <= 80, text


def test_a_wide_terminal_has_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    text = table_text(160, monkeypatch)
    assert text.count("layout") == 1 and any("1.00" in line and LAYOUT in line for line in text.splitlines()), text


def test_a_name_in_csv_is_no_formula(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(Format.CSV, ("file",), [("x",)], [{"file": "=HYPERLINK(1).gguf", "change": -1.5}], numbers=0)
    assert capsys.readouterr().out == "file,change\n'=HYPERLINK(1).gguf,-1.5\n"


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


def test_a_front_has_intervals_and_says_how_it_is_sorted(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "trial": 5, "objectives": {"quality": 1.0042, "latency": 200.0},
        "value_sd": {"quality": 0.002, "latency": 0.02}, "p_front": 0.99, "ties": [], "dominated_by": [],
        "params": {"total": 356e6, "active": 191e6}, "layout": LAYOUT,
    }  # fmt: skip
    objectives = [
        {"name": name, "unit": "", "transform": kind} for name, kind in (("quality", "id"), ("latency", "log"))
    ]
    front = {"objectives": objectives, "references": [], "front": [row], "reliability": None}
    print_front(front)
    assert "\t1.004\t200\t" in capsys.readouterr().out
    print_front(front, wide=True)
    printed = capsys.readouterr()
    assert "\t1.004 (1.000 to 1.008)\t200 (192 to 208)\t" in printed.out and "356M, 191M" in printed.out
    assert printed.err == (
        "sorted by the hypervolume that each adds; in brackets 95 % intervals; of weights with experts, all and active"
        " ones\n"
    )
    print_front(front | {"front": [row | {"dominated_by": ["published"]}]})
    assert "p_front is among this study's own layouts" in capsys.readouterr().err
