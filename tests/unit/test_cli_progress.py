"""What long commands show on stderr."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from nas.cli import progress
from nas.cli.progress import activity
from nas.core.progress import Progress

PROGRAM = """
from nas.cli.progress import activity
from nas.core.progress import Progress
with activity("starting") as log:
    log("a line")
    for step in range(4):
        log(Progress("healing", step, 3, "loss 2.1"))
print('{"data": 1}')
"""


def test_a_line_of_a_file_is_read_again() -> None:
    line = Progress("healing", 1200, 4096, "loss 2.1, lr 1e-3")
    again = Progress.read(str(line))
    assert isinstance(again, Progress) and vars(again) == vars(line)
    assert type(Progress.read("stage 1 of 3: sft")) is str


def test_lines_come_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with activity("starting") as log:
        log("a line")
        for step in range(5, 101):
            log(Progress("healing", step, 100))
            now += 2.0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "so far" not in line][:2] == [
        "a line", "healing: 10 of 100, about 3 min left",
    ]  # fmt: skip
    assert lines[-1] == "healing: 100 of 100" and len(lines) < 12


def test_what_an_earlier_command_did_is_no_pace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with activity("starting") as log:
        for step in range(1, 91):
            log(Progress("measuring", step, 100))
            now += 0.001 if step < 80 else 60.0
    assert "measuring: 82 of 100, about 18 min left" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("closing", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_a_command_goes_on_without_stderr(closing: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{PROGRAM.replace(chr(39), chr(34) * 3)}' {closing}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == '{"data": 1}\n'


def test_bars_are_on_the_terminal_alone() -> None:
    terminal, side = pty.openpty()
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=side, text=True, check=True)
    os.close(side)
    assert done.stdout == '{"data": 1}\n'
    drawn = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert ("a line" in drawn and drawn.rstrip().endswith("\x1b[?25h")) or "\x1b[?25h" in drawn


def test_silence_is_about_the_last_piece_of_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SILENT_S", 0.5)
    with activity("starting") as log:
        log("a measurement")
        log(Progress("timed kinds of layers", 0, 1, "scores"))
        time.sleep(2.5)
    lines = [line for line in capsys.readouterr().err.splitlines() if "so far" in line]
    assert lines and all(line.startswith("timed kinds of layers: 0 of 1, scores: ") for line in lines)
