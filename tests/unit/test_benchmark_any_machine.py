"""The plumbing of the benchmark of launches beside other work, on a command that stands for `nas`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import any_machine
from benchmarks.any_machine import agreement, beside, launch, read_results, run_missing, table
from tests.support.waiting import until

REPORT = {
    "trials": {"complete": 2},
    "hypervolume": 0.5,
    "hypervolume_ci95": {"low": 0.4, "high": 0.6},
    "noise": {"foreign_cpu": 1.0},
    "front": [{"layout": "A"}],
    "ranking": [{"layout": "A", "objectives": {"ttft@chat": 2.0}}],
    "told": [
        {"layout": "A", "status": "complete", "objectives": {"ttft@chat": 0.7}},
        {"layout": "B", "status": "infeasible", "objectives": {}},
    ],
}
PROGRAM = """
import json, sys
if sys.argv[1] == "study":
    print(REPORT)
else:
    print("published reference, chat on local (fake): ttft 5 ms", file=sys.stderr)
    sys.exit(3)
""".replace("REPORT", repr(json.dumps(REPORT)))


@pytest.fixture
def nas(tmp_path: Path) -> tuple[str, ...]:
    program = tmp_path / "nas.py"
    program.write_text(PROGRAM)
    return sys.executable, "-I", "-S", str(program)


def test_a_launch_beside_loops_keeps_its_time_exit_code_and_summary(nas: tuple[str, ...]) -> None:
    result = launch(("--space", "any"), "loop", nas)
    assert (result["exit_code"], result["front"], result["states"]) == (3, ["A"], {"A": "complete", "B": "infeasible"})
    assert result["hypervolume_ci95"] == [0.4, 0.6]
    assert result["measured"] == {"A": {"ttft@chat": 0.7}, "B": {}}
    assert 0 <= result["first_figure_s"] <= result["seconds"]


def test_a_launch_that_left_no_study_says_so(tmp_path: Path) -> None:
    result = launch((), "idle", (sys.executable, "-I", "-S", "-c", "import sys; sys.exit('no such study')"))
    assert (result["exit_code"], result["first_figure_s"], "no such study" in result["error"]) == (1, None, True)
    assert "| demo, idle | 0 |" in table([{"study": "demo", "condition": "idle", "run": 0} | result])


def test_other_work_ends_with_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import os, time; open('{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(60)"
    monkeypatch.setattr(any_machine, "_LOOP", (sys.executable, "-I", "-S", "-c", program))
    with beside("loop", tmp_path, threading.Event()):
        until(lambda: any(tmp_path.iterdir()))
    (loop,) = tmp_path.iterdir()
    assert not Path(f"/proc/{loop.name}").exists()


def test_a_loop_ends_with_the_process_that_started_it_however_that_ended() -> None:
    start = f"import subprocess; print(subprocess.Popen({any_machine._LOOP}, stdout=2).pid, flush=True); input()"
    with subprocess.Popen((sys.executable, "-c", start), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        loop = psutil.Process(int(starter.stdout.readline()))
        until(lambda: loop.cpu_times().user > 0.2)
        starter.kill()

    def has_ended() -> bool:
        try:
            return loop.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    try:
        until(has_ended)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            loop.kill()


def test_a_run_that_has_its_file_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    archives: list[Path | None] = []

    def fake(arguments: Any, condition: str, archive: Path | None) -> dict[str, Any]:
        done.append((arguments[1], condition))
        archives.append(archive)
        return {"exit_code": 0, "seconds": 1.0, "first_figure_s": None}

    monkeypatch.setattr(any_machine, "launch", fake)
    run_missing(tmp_path, 2, None)
    assert done.count(("lfm2-demo", "idle")) == 2 and done.count(("lfm2-two-runtimes-demo", "loop")) == 1
    count = len(done)
    (tmp_path / "demo-loops-1.json").unlink()
    run_missing(tmp_path, 2, None, tmp_path / "studies")
    assert done[count:] == [("lfm2-demo", "loops")]
    assert archives == [None] * count + [tmp_path / "studies" / "demo-loops-1.jsonl.gz"]
    assert [(result["condition"], result["run"]) for result in read_results(tmp_path)[:2]] == [("idle", 0), ("idle", 1)]


def result_of(states: dict[str, str], front: list[str], objectives: dict[str, float]) -> dict[str, Any]:
    named = {layout: {"ttft": value} for layout, value in objectives.items()}
    return {"states": states, "front": front, "objectives": named}


def test_agreement_is_of_layouts_that_both_tried() -> None:
    order = dict(zip("ABCDEF", range(6), strict=True))
    idle = result_of(dict.fromkeys("ABCDEFG", "complete"), ["A", "G"], {**order, "G": 9.0})
    busy = result_of({**dict.fromkeys("ABCDEF", "complete"), "F": "infeasible"}, ["B"], order)
    agreed = agreement(busy, [idle])
    assert agreed is not None
    assert (agreed.layouts, agreed.feasible, agreed.front) == (6, pytest.approx(5 / 6), 0.0)
    assert agreed.correlation == {"ttft": pytest.approx(1.0)}
    rising, falling = ({name: {"ttft": sign * place} for name, place in order.items()} for sign in (1, -1))
    of_all = agreement({**busy, "measured": falling}, [{**idle, "measured": rising}])
    assert of_all is not None and of_all.correlation == {"ttft": pytest.approx(-1.0)}
    assert agreement(busy, []) is None
