"""Records raw runs of models on this machine, calm and with given work beside them.

    python -m benchmarks.noise.record [--folder FOLDER] [--runtime llama.cpp] [--threads 1] [--conditions idle loop]
                                      [--subjects moe-30M]

Each process is a fresh one. Of every subject, processes in which it takes turns with the reference model of its size
alternate with processes of the subject alone and of the reference alone. One file a condition, so the script may be
stopped and started again. `idle` is recorded first and, as `idle2`, last: their difference is what this machine does by
itself.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.thread_waits import LOOP
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import Plan
from nas.core.workload import Workload
from nas.measure.protocol.reference import reference_layout
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RandomWeights, Runtime
from nas.testing.run_plan import run_plan

FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Subject:
    """A layout with its workload.

    Args:
        layout: of the candidate.
        workload: of candidate and reference.
        pairs: processes of both.
        alone: processes of each alone.
    """

    layout: str
    workload: Workload
    pairs: int
    alone: int


SUBJECTS = {
    "moe-30M": Subject("d512 v8192 ffn=moe:8x2:384 [C4 C4 A8/4 C4 C4 A8/4 C4]", Workload(prompt=256, gen=100), 12, 6),
    "350M": Subject(
        "d1024 v65536 ffn=swiglu:5632 [C3*7 A16/4 C3*2 A16/8]", Workload(prompt=128, gen=48, context=512), 8, 3
    ),
}
_FULL = os.cpu_count() or 1

# Each ends with the process that started it, as `LOOP` does.
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
_COMPILE = """
import os, pathlib, sysconfig
parent = os.getppid()
files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
while os.getppid() == parent:
    for file in files: compile(file.read_bytes(), str(file), "exec", optimize=2)
"""
CONDITIONS: dict[str, Sequence[str]] = {
    "idle": (),
    "loop": (LOOP,),
    "loops": (LOOP,) * _FULL,
    "loops4": (LOOP,) * 4,
    "loops12": (LOOP,) * 12,
    "bursts": (_BURST,) * _FULL,
    "hog": (_COPY,),
    "hogs": (_COPY,) * _FULL,
    "compile": (_COMPILE,) * _FULL,
    "idle2": (),
}
"""Condition -> Python programs that run meanwhile: endless loops, loops that come and go, memory copies, compilers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--runtime", choices=("llama.cpp", "executorch"), default="llama.cpp")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hilnas-noise-") as scratch:
        machine = Machine(RUNTIMES[options.runtime], options.threads, options.subjects, Path(scratch))
        for condition in options.conditions:
            path = options.folder / f"{options.runtime}-{options.threads}-{condition}.jsonl.gz"
            if path.exists():
                continue
            start = time.monotonic()
            with loaded(CONDITIONS[condition]):
                rows = list(machine.rows())
            print(f"{path.name}: {len(rows)} processes in {time.monotonic() - start:.0f} s", flush=True)
            # A fixed time stamp: the same rows give the same bytes.
            with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
                file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())


class Machine:
    """Runs subjects with one runtime and number of threads.

    Args:
        runtime: which.
        threads: of every process.
        subjects: names of SUBJECTS.
        scratch: folder for model files.
    """

    def __init__(self, runtime: Runtime, threads: int, subjects: Sequence[str], scratch: Path) -> None:
        self._runtime, self._subjects, self._scratch = runtime, subjects, scratch
        self._build = runtime.build(log=print, patched=runtime.name == "llama.cpp")
        self._plans: dict[tuple[str, str], tuple[Plan, dict[str, Path]]] = {}
        for name in subjects:
            subject = SUBJECTS[name]
            layout = Layout.parse(subject.layout)
            workload = subject.workload.model_copy(update={"threads": threads})
            model = self._export(layout, f"{name}-model")
            reference = self._export(reference_layout(runtime, layout.params.active), f"{name}-reference")
            for kind, first, second in (
                ("pair", model, reference),
                ("model", model, None),
                ("reference", reference, None),
            ):
                plan = runtime.plan(first[0], self._build.runner, workload, 600.0, second and second[0])
                paths = {"model": first[1]} | ({"reference": second[1]} if second else {})
                self._plans[name, kind] = plan, paths

    def rows(self) -> Iterator[dict[str, Any]]:
        """Runs every subject's processes; a row for each."""
        for name in self._subjects:
            subject = SUBJECTS[name]
            alone = iter(itertools.chain.from_iterable([("model", "reference")] * subject.alone))
            for _ in range(subject.pairs):
                yield self._row(name, "pair")
                if (kind := next(alone, None)) is not None:
                    yield self._row(name, kind)
            for kind in alone:
                yield self._row(name, kind)

    def _export(self, layout: Layout, name: str) -> tuple[Artifact, Path]:
        path = self._scratch / name
        return self._runtime.export(layout, self._runtime.quantisations[0], RandomWeights(), path), path

    def _row(self, name: str, kind: str) -> dict[str, Any]:
        plan, paths = self._plans[name, kind]
        start, load = time.time(), os.getloadavg()[0]
        steal = getattr(psutil.cpu_times(), "steal", 0.0)
        sample = self._runtime.parse(run_plan(plan, self._build.folder, paths))
        reference, sample = sample.reference, sample.model_copy(update={"reference": None})
        return {
            "subject": name,
            "kind": kind,
            "at": round(start, 1),
            "seconds": round(time.time() - start, 2),
            "load": load,
            "steal": round(getattr(psutil.cpu_times(), "steal", 0.0) - steal, 2),
            "sample": _compact(sample),
            "beside": None if reference is None else _compact(reference),
        }


def _compact(sample: Sample) -> dict[str, Any]:
    """Returns a sample's times in microseconds."""
    arrays = ("prefill_ns", "prefill_cpu_ns", "decode_ns", "decode_cpu_ns")
    times = {name: [round(ns / 1e3) for ns in getattr(sample, name) or ()] for name in arrays}
    return {**times, "turns": sample.turns}


def sample_of(row: dict[str, Any]) -> Sample:
    """Returns the sample that `_compact` wrote."""
    ns = {name: [us * 1000 for us in row[name]] for name in row if name != "turns"}
    return Sample(
        load_ms=1.0,
        ttft_ms=ns["prefill_ns"][0] / 1e6,
        prefill_cpu_ms=ns["prefill_cpu_ns"][0] / 1e6,
        turns=row["turns"],
        **ns,
    )


@contextmanager
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


if __name__ == "__main__":
    main()
