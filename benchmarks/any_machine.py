"""Runs the demo, and a study on two runtimes, idle and beside other work, and tabulates how far the answers agree.

    python -m benchmarks.any_machine run [--runs 3] [--only demo-loops ...] [--folder benchmarks/recorded/any_machine]
                                         [--archives FOLDER]
    python -m benchmarks.any_machine table [--folder ...] [--page docs/measured/any-machine.md]

`demo` is `nas launch --space lfm2-demo`, `two-runtimes` a study of 20 layouts of lfm2-two-runtimes-demo. Conditions:
`idle`; `loop`, one endless loop; `loops`, one for each core; `later`, the same from the first figure on, when the
reference model was calibrated on an idle machine; `setup`, `make setup` of another clone with empty caches,
again and again until the launch ends. Every run has an empty folder of studies and its own database, so that nothing
measured before is reused; runtime builds come from the usual cache. One file for each run: a run that has its file is
skipped, so the script may be stopped and started again. Needs the machine for hours; put nothing else on it.
`--archives` keeps the studies themselves, too: archives for `nas study import`.

Agreement is with each idle run of the same study, the mean of them: of the layouts that both tried, how many are
feasible in both or neither; of the idle front's layouts that both tried, how many are on the other front, too; and the
rank correlation (Spearman) of the objectives that both know of a layout, complete or not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks import page
from benchmarks.runs import say
from benchmarks.thread_waits import LOOP
from nas.core.durable import write_durably
from nas.search.analysis.agreement import rank_correlation

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).parent / "recorded" / "any_machine"
STUDIES: Mapping[str, tuple[str, ...]] = {
    "demo": ("--space", "lfm2-demo"),
    "two-runtimes": ("--space", "lfm2-two-runtimes-demo", "--trials", "20"),
}
PLAN = (
    ("demo", "idle"),
    ("demo", "loops"),
    ("demo", "later"),
    ("demo", "setup"),
    ("two-runtimes", "idle"),
    ("two-runtimes", "loop"),
)
FEASIBLE = ("complete", "stopped")
"""States of trials that kept the budgets."""

NAS = (str(Path(sys.executable).parent / "nas"),)

_DEADLINE_S = 7200.0
_HEAD = (
    "study, beside", "run", "s", "first figure, s", "exit", "front", "hypervolume (95 %)", "other processes, cores",
    "layouts in common", "feasible alike", "front in common", "rank correlation",
)  # fmt: skip
_LOOP = (sys.executable, "-c", LOOP)


def main() -> None:
    """Runs what is missing, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=int, default=3, help="of the demo in each condition; the study runs once")
    parser.add_argument("--only", action="append", help="STUDY-CONDITION; repeatable")
    parser.add_argument("--archives", type=Path, help="folder for archives of the studies")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    options = parser.parse_args()
    if options.what == "run":
        run_missing(options.folder, options.runs, options.only, options.archives)
    page.write_part(options.page, "any machine", table(read_results(options.folder)))


def run_missing(folder: Path, runs: int, only: Sequence[str] | None, archives: Path | None = None) -> None:
    """Runs each study in each condition unless its file is there; conditions take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(runs):
        for study, condition in PLAN:
            path = folder / f"{study}-{condition}-{number}.json"
            unwanted = only is not None and f"{study}-{condition}" not in only
            if path.exists() or unwanted or (study != "demo" and number > 0):
                continue
            say(f"{path.name}: running")
            archive = None if archives is None else archives.resolve() / f"{path.stem}.jsonl.gz"
            launched = launch(STUDIES[study], condition, archive=archive)
            result = {"study": study, "condition": condition, "run": number} | launched
            write_durably(path, (json.dumps(result, indent=1) + "\n").encode())


def launch(arguments: Sequence[str], condition: str, nas: Sequence[str] = NAS, archive: Path | None = None) -> Json:
    """Launches one study beside other work, writes its archive if asked to, and returns time, exit code and summary."""
    with tempfile.TemporaryDirectory(prefix="hilnas-any-", ignore_cleanup_errors=True) as scratch:
        env = os.environ | {"NAS_HOME": f"{scratch}/home"}
        command = [*nas, "launch", *arguments, "--study", "any", "--yes"]
        begin = threading.Event()
        with beside(condition, Path(scratch), begin):
            start = time.monotonic()
            process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            first, lines = None, []
            watchdog = threading.Timer(_DEADLINE_S, process.kill)
            watchdog.start()
            with process:
                for line in process.stderr:
                    lines.append(line.rstrip())
                    if first is None and " reference, " in line:
                        first = time.monotonic() - start
                        begin.set()
            exit_code = process.returncode
            watchdog.cancel()
            seconds = time.monotonic() - start
        show = [*nas, "study", "show", "any", "--json"]
        result = subprocess.run(show, cwd=ROOT, env=env, capture_output=True, text=True)
        if archive is not None:
            archive.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*nas, "study", "export", "any", "-o", str(archive)], cwd=ROOT, env=env, check=True)
    summary = summarised(json.loads(result.stdout)) if result.returncode == 0 else {"error": result.stderr[-500:]}
    took = {"seconds": round(seconds, 1), "first_figure_s": None if first is None else round(first, 1)}
    last = [line.replace(scratch, "SCRATCH") for line in lines[-8:]]
    return {"exit_code": exit_code, **took, **summary, "last_lines": last}


def summarised(report: Mapping[str, Any]) -> Json:
    """Returns what is kept of `nas study show --json`; layouts as text."""
    volume = report["hypervolume_ci95"] or {}
    return {
        "trials": report["trials"],
        "hypervolume": report["hypervolume"],
        "hypervolume_ci95": [volume.get("low"), volume.get("high")],
        "noise": report["noise"],
        "front": [row["layout"] for row in report["front"]],
        "objectives": {row["layout"]: row["objectives"] for row in report["ranking"]},
        "measured": {row["layout"]: row["objectives"] for row in report["told"]},
        "states": {row["layout"]: row["status"] for row in report["told"]},
    }


@contextlib.contextmanager
def beside(condition: str, scratch: Path, begin: threading.Event) -> Iterator[None]:
    """Keeps the work of a condition running, that of `later` from `begin` on."""
    cores = os.cpu_count() or 1
    count = {"idle": 0, "loop": 1, "loops": cores, "later": cores, "setup": 1}[condition]
    end = threading.Event()
    if condition != "later":
        begin.set()
    make = partial(_setup, scratch) if condition == "setup" else _loop
    threads = [threading.Thread(target=_keep_running, args=(make, begin, end)) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        begin.set()
        for thread in threads:
            thread.join()


def _keep_running(make: Callable[[int], subprocess.Popen[bytes]], begin: threading.Event, end: threading.Event) -> None:
    turn = 0
    begin.wait()
    while not end.is_set():
        process = make(turn)
        turn += 1
        while process.poll() is None and not end.wait(0.2):
            pass
        # Builds are in process groups of their own.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()


def _loop(turn: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_LOOP)


def _setup(scratch: Path, turn: int) -> subprocess.Popen[bytes]:
    clone = scratch / f"clone-{turn}"
    env = os.environ | {"NAS_CACHE": str(clone / "cache"), "NAS_HOME": str(clone / "home")}
    script = f"git clone -q {ROOT} {clone} && make -C {clone} setup"
    return subprocess.Popen(("sh", "-c", script), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# The table.


@dataclass(frozen=True)
class Agreement:
    """How far a run agrees with idle ones; see the module. None: nothing to compare."""

    layouts: float
    feasible: float | None
    front: float | None
    correlation: Mapping[str, float]


def read_results(folder: Path) -> list[Json]:
    """Returns the results, by study, condition and run."""
    order = {place: index for index, place in enumerate(PLAN)}
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(results, key=lambda result: (order[result["study"], result["condition"]], result["run"]))


def agreement(result: Json, idle: Sequence[Json]) -> Agreement | None:
    """Returns the mean agreement with each of `idle`; None if there is none."""
    pairs = [(one, result) for one in idle if "states" in one and "states" in result]
    if not pairs:
        return None
    common = [sorted(one["states"].keys() & other["states"].keys()) for one, other in pairs]
    feasible, front = [], []
    correlations: dict[str, list[float]] = {}
    for (one, other), layouts in zip(pairs, common, strict=True):
        same = [(one["states"][layout] in FEASIBLE) == (other["states"][layout] in FEASIBLE) for layout in layouts]
        feasible += [fmean(same)] if same else []
        best = [layout for layout in one["front"] if layout in other["states"]]
        front += [fmean(layout in other["front"] for layout in best)] if best else []
        # Files of before have the figures of complete trials alone.
        kind = "measured" if "measured" in one and "measured" in other else "objectives"
        both = sorted(one[kind].keys() & other[kind].keys())
        for name in next(iter(one["objectives"].values()), {}):
            values = [[result[kind][layout].get(name) for layout in both] for result in (one, other)]
            complete = [pair for pair in zip(*values, strict=True) if None not in pair]
            if len(complete) > 2:
                rho = rank_correlation(*zip(*complete, strict=True), kendall=False).spearman
                correlations.setdefault(name, []).extend([] if rho is None else [rho.value])
    correlation = {name: fmean(values) for name, values in correlations.items() if values}
    return Agreement(fmean(map(len, common)), _mean(feasible), _mean(front), correlation)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def table(results: Sequence[Json]) -> str:
    """Returns the table in Markdown."""
    lines = []
    for result in results:
        idle = [
            other
            for other in results
            if other["study"] == result["study"] and other["condition"] == "idle" and other is not result
        ]
        agreed = agreement(result, idle)
        low, high = result.get("hypervolume_ci95") or (None, None)
        noise = result.get("noise") or {}
        alike = [""] * 4
        if agreed:
            alike = [f"{agreed.layouts:.0f}", _number(agreed.feasible, ".0%"), _number(agreed.front, ".0%")]
            alike.append(", ".join(f"{name} {rho:.2f}" for name, rho in agreed.correlation.items()))
        lines.append(
            [
                f"{result['study']}, {result['condition']}",
                result["run"],
                f"{result['seconds']:.0f}",
                _number(result["first_figure_s"], ".0f"),
                result["exit_code"],
                len(result.get("front", ())),
                f"{_number(result.get('hypervolume'))} ({_number(low)} to {_number(high)})",
                _number(noise.get("foreign_cpu"), ".1f"),
                *alike,
            ]
        )
    return page.table(_HEAD, lines)


def _number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()
