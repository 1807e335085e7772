"""Measures seconds and memory from a layout to its first measured number, by phase; JSON.

    python benchmarks/first_number.py [--runtime llama.cpp] [--layout ...] [--prompt 512] [--gen 32] > result.json

One repetition on this machine, along the path that a study's candidate takes, in three passes: `first` with empty
caches, `next` for another layout when the runner has been delivered, `again` for the first layout when its file has
been delivered too. Builds are there before (`nas runtime build`), and nothing else: with ExecuTorch `first` lowers
every block of the layout, `next` finds them lowered. Calibrating a new device, ten runs of the reference model, is not
part of it, nor is waiting for a free device.

Memory is the high-water mark of resident pages: of this process within each phase, and of each process that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import RawRun, Runner
from nas.core.workload import Workload
from nas.measure.devices.agent.run_plan import Observer, execute, prepare
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RandomWeights, Runtime

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.runs import DEADLINE_S, MIXED_350M, Files, built, layout_called, print_json, runtime_option, say

_POLL_S = 0.02


@dataclass
class Phases:
    """Seconds and this process's peak memory, by phase."""

    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the context."""
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now (proc(5))
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.rows[name] = {"seconds": seconds, "own_peak_mb": peak_mb(psutil.Process())}

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(row["seconds"] for row in self.rows.values())


def main() -> None:
    started = time.time() - psutil.Process().create_time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runtime_option(parser)
    parser.add_argument("--layout", default=MIXED_350M, help="published name or one-line layout")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=32)
    options = parser.parse_args()
    text = layout_called(options.layout).format()
    runtime = RUNTIMES[options.runtime]
    runtime_build = built(runtime, Layout.parse(text))
    workload = Workload(prompt=options.prompt, gen=options.gen)
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as folder:
        os.environ["NAS_CACHE"] = str(Path(folder) / "lowered")
        place = Place(Path(folder), runtime, runtime_build.runner, runtime_build.folder, workload)
        artifact, first = place.measure(text)
        _, after = place.measure(other(text))
        _, again = place.measure(text, artifact)
    passes = {"first": first, "next": after, "again": again}
    conditions = {
        "runtime": runtime.name,
        "layout": text,
        "patched": runtime_build.runner.patched,
        "workload": workload.key(),
    }
    print_json({**conditions, "start_s": started, **passes})


class Place:
    """A device with an empty cache, and what was delivered to it.

    Args:
        folder: for model files and the device's cache.
        runtime: whose models they are.
        runner: that measures.
        built: folder with the runner's files.
        workload: what is run.
    """

    def __init__(self, folder: Path, runtime: Runtime, runner: Runner, built: Path, workload: Workload) -> None:
        self._folder, self._runtime, self._runner, self._workload = folder, runtime, runner, workload
        self._transport = LocalTransport(folder / "cache")
        self._files = Files({file.sha256: built / name for name, file in runner.files.items()})

    def measure(self, text: str, artifact: Artifact | None = None) -> tuple[Artifact, dict[str, Any]]:
        """One pass."""
        phases = Phases()
        with phases.phase("layout and support"):
            layout = Layout.parse(text)
            self._runtime.supports(layout)
        if artifact is None:
            artifact = self._export(layout, phases)
        with phases.phase("plan"):
            plan = self._runtime.plan(artifact, self._runner, self._workload, DEADLINE_S)
        with phases.phase("delivery"):
            prepared = prepare(plan, self._transport, self._files, lambda runner: runner == self._runner)
        with watched() as processes, phases.phase("run"):
            raw = execute(prepared, self._transport, Observer(self._transport))
        with phases.phase("parse"):
            sample = self._runtime.parse(raw)
        say(f"{phases.seconds:.2f} s to the first number of {text}")
        return artifact, {
            "seconds": phases.seconds,
            "phases": phases.rows,
            "run": _run_parts(raw, sample),
            "processes_peak_mb": processes,
            "runner_peak_mb": {"total": sample.peak_rss_mb, "decode": sample.decode_rss_mb},
            "file_mb": artifact.size / 1e6,
        }

    def _export(self, layout: Layout, phases: Phases) -> Artifact:
        recipe = self._folder / f"{layout.id}.recipe"
        with phases.phase("export"):
            artifact = self._runtime.export(
                layout, self._runtime.quantisations[0], RandomWeights(), recipe, recipe=True
            )
        self._files.paths[artifact.stored.sha256] = recipe
        return artifact


def _run_parts(raw: RawRun, sample: Sample) -> dict[str, float]:
    """Seconds inside the runner; `process` is what starting, watching and ending it takes."""
    parts = {
        "load": sample.load_ms / 1e3,
        "warm-up": sample.info["warmup_ms"] / 1e3,
        "prefill": sample.ttft_ms / 1e3,
        "decode": sum(sample.decode_ns) / 1e9,
    }
    return parts | {"process": raw.wall_s - sum(parts.values())}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Peak resident memory in MB of every process started meanwhile, by name; filled in while the context is open."""
    peaks: dict[str, float] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(_POLL_S):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    name = process.name()
                    peaks[name] = max(peaks.get(name, 0.0), peak_mb(process))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()


def peak_mb(process: psutil.Process) -> float:
    """VmHWM in MB; 0 of a process that is gone but for its exit code."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def other(text: str) -> str:
    """Another layout of the same size: the first two layers that differ change places."""
    layout = Layout.parse(text)
    layers = list(layout.layers)
    index = next(index for index in range(1, len(layers)) if layers[index] != layers[0])
    layers[0], layers[index] = layers[index], layers[0]
    return replace(layout, layers=tuple(layers)).format()


if __name__ == "__main__":
    main()
