"""Records raw runs of layouts on this machine, calm and with given work beside them.

    python -m benchmarks.noise.record [--folder benchmarks/noise/recorded] [--rounds 30] [--minutes M]

Twelve layouts of benchmarks/hardware/layouts.txt that both runtimes carry, each run a fresh process. One unit is ten
rounds of one condition with one runtime and one number of threads; in a round every layout runs once, in an order of
its own, with the runtime's reference model before every third of them. Units of all conditions alternate, so that slow
phases of the machine do not fall on one of them. Each unit is one file, so the script may be stopped and started again.

Where several threads share their cores with other work, they wait for each other: a run takes ten times as long and
more. Of these there is one unit each, the last, with three rounds: enough to show that their times say nothing.

Conditions: `calm` nothing else; `loop` one endless loop; `loops` one for each core; `bursts` loops that come and go, as
many as cores; `copy` a process that copies memory.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from nas.core.layout import Layout
from nas.core.plan import Plan
from nas.core.workload import Workload
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import RandomWeights, Runtime
from nas.testing.run_plan import run_plan

FOLDER = Path(__file__).parent / "recorded"
LAYOUTS_FILE = Path(__file__).parents[1] / "hardware" / "layouts.txt"
WORKLOAD = Workload(prompt=128, gen=48, context=512)
LAYOUTS = 12
REFERENCE = -1
"""Index of the runtime's reference model among layouts."""

REFERENCE_EVERY = 3
ROUNDS_A_UNIT = 10
THREADS = (1, 2)

# Each ends with the process that started it, however that ended.
_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10_000_000): pass
"""
_BURST = """
import os, random, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.monotonic() + random.expovariate(1 / 0.3)
    while time.monotonic() < end: pass
    time.sleep(random.expovariate(1 / 0.6))
"""
_COPY = """
import os
import numpy as np
parent = os.getppid()
a, b = np.zeros(64_000_000), np.zeros(64_000_000)
while os.getppid() == parent: b[:] = a
"""
_CORES = os.cpu_count() or 1
CONDITIONS: dict[str, Sequence[str]] = {
    "calm": (),
    "loop": (_LOOP,),
    "loops": (_LOOP,) * _CORES,
    "bursts": (_BURST,) * _CORES,
    "copy": (_COPY,),
}
CONTENDED = ("loop", "loops", "bursts", "copy")
CONTENDED_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no unit after this time")
    parser.add_argument("--lock", type=Path, action="append", default=[], help="files that are locked during a unit")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between units, for other work")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="hilnas-noise-") as scratch:
        with locked(options.lock):
            subjects = {name: Subjects(RUNTIMES[name], Path(scratch)) for name in ("llama.cpp", "executorch")}
        blocks = range(options.rounds // ROUNDS_A_UNIT)
        units = list(itertools.product(blocks, CONDITIONS, subjects, THREADS))
        contended = [unit for unit in units if unit[1] in CONTENDED and unit[3] > 1]
        for block, condition, runtime, threads in [
            *(unit for unit in units if unit not in contended),
            *(unit for unit in contended if unit[0] == 0),
        ]:
            rounds = CONTENDED_ROUNDS if condition in CONTENDED and threads > 1 else ROUNDS_A_UNIT
            path = options.folder / f"{condition}-{runtime}-{threads}-{block}.jsonl.gz"
            if path.exists():
                continue
            if time.monotonic() > ends:
                return
            with locked(options.lock), loaded(CONDITIONS[condition]):
                begun = time.monotonic()
                rows = list(subjects[runtime].unit(block, threads, rounds))
                print(f"{path.name}: {len(rows)} runs in {time.monotonic() - begun:.0f} s", flush=True)
            part = path.with_suffix(".part")
            # A fixed time stamp: the same rows give the same bytes.
            with part.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
                file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
            part.replace(path)
            time.sleep(options.rest)


class Subjects:
    """The layouts and the reference model, exported for one runtime.

    Args:
        runtime: which.
        scratch: folder for model files.
    """

    def __init__(self, runtime: Runtime, scratch: Path) -> None:
        self._runtime = runtime
        self._build = runtime.build(log=print, patched=runtime.name == "llama.cpp")
        self._files: dict[int, Path] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        drawn = [Layout.parse(line) for line in LAYOUTS_FILE.read_text().splitlines()[:LAYOUTS]]
        layouts = [runtime.reference_model(), *drawn]
        for index, layout in enumerate(layouts, start=REFERENCE):
            path = self._files[index] = scratch / f"{runtime.name}-{index}"
            artifact = runtime.export(layout, runtime.quantisations[0], RandomWeights(), path)
            for threads in THREADS:
                workload = WORKLOAD.model_copy(update={"threads": threads})
                self._plans[index, threads] = runtime.plan(artifact, self._build.runner, workload, 600.0)

    def unit(self, block: int, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
        """Runs the rounds of one unit and returns a row for each run."""
        order = random.Random(block)
        for round_ in range(block * ROUNDS_A_UNIT, block * ROUNDS_A_UNIT + rounds):
            layouts = order.sample(range(LAYOUTS), LAYOUTS)
            for position, layout in enumerate(layouts):
                if position % REFERENCE_EVERY == 0:
                    yield self._run(REFERENCE, threads, round_)
                yield self._run(layout, threads, round_)

    def _run(self, layout: int, threads: int, round_: int) -> dict[str, Any]:
        before, children_s, at = psutil.cpu_times(), _children_s(), time.time()
        run = run_plan(self._plans[layout, threads], self._build.folder, {"model": self._files[layout]})
        after, seconds = psutil.cpu_times(), time.time() - at
        sample = self._runtime.parse(run)
        busy = sum(b - a for name, a, b in zip(before._fields, before, after, strict=True) if name in _BUSY)
        assert sample.decode_cpu_ns is not None, "both runners report the time of their threads"
        return {
            "layout": layout,
            "round": round_,
            "at": round(at, 3),
            "seconds": round(seconds, 4),
            "ttft_us": round(sample.ttft_ms * 1e3),
            "ttft_cpu_us": round((sample.prefill_cpu_ms or 0.0) * 1e3),
            "decode_us": [round(ns / 1e3) for ns in sample.decode_ns],
            "decode_cpu_us": [round(ns / 1e3) for ns in sample.decode_cpu_ns],
            "rss_mb": sample.peak_rss_mb,
            "foreign_cpu": round((busy - (_children_s() - children_s)) / seconds, 3),
            "steal": round((getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / seconds, 3),
        }


_BUSY = ("user", "nice", "system", "irq", "softirq")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def loaded(programs: Sequence[str]) -> Iterator[None]:
    """Runs Python programs meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        time.sleep(1.5 if programs else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def locked(files: Sequence[Path]) -> Iterator[None]:
    """Holds exclusive locks of files, taken in order."""
    with contextlib.ExitStack() as stack:
        for path in files:
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
