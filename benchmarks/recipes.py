"""Compares recipe and file: the same bytes, the same numbers, and what is saved. Prints JSON.

    python benchmarks/recipes.py [--layouts LFM2-350M LFM2-1.2B] [--pairs 3]

A device that has neither gets the model in two ways: as a file (export, then push) and as a recipe (export, push, and
the runner makes the file). The device is this machine, where a push is a link: what a cable or a network adds to the
way of the file is its bytes over their speed. Then both are measured in turn, in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nas.core.layout import Layout
from nas.core.plan import Plan, PlanFile
from nas.core.published import LFM2
from nas.core.workload import Workload
from nas.measure.devices.agent.run_plan import Observer, Prepared, execute, prepare
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.runtimes.base import Artifact, RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

WORKLOAD = Workload(prompt=256, gen=32)


class Folder:
    """Plan files by hash."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def fetch(self, file: PlanFile) -> Path:
        """See `nas.measure.devices.agent.run_plan.FileSource`."""
        return self.paths[file.sha256]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layouts", nargs="+", default=["LFM2-350M", "LFM2-1.2B"], choices=list(LFM2))
    arguments.add_argument("--pairs", type=int, default=3)
    options = arguments.parse_args()
    rows = []
    for name in options.layouts:
        print(name, file=sys.stderr)
        with tempfile.TemporaryDirectory() as scratch:
            rows.append({"layout": name} | _compare(Layout.parse(LFM2[name]), Path(scratch), options.pairs))
    print(json.dumps({"workload": WORKLOAD.key(), "layouts": rows}, indent=1))


def _compare(layout: Layout, scratch: Path, pairs: int) -> dict[str, Any]:
    ways = {way: _Way(layout, scratch / way, recipe=way == "recipe") for way in ("file", "recipe")}
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(pairs):
        for name, way in ways.items():
            samples[name].append(way.measure())
    sizes = {name: way.artifact.stored.size for name, way in ways.items()}
    medians = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
        for name, runs in samples.items()
    }
    return {
        "same_hash": len({way.artifact.sha256 for way in ways.values()}) == 1,
        "bytes_stored_and_sent": sizes,
        "bytes_saved": sizes["file"] - sizes["recipe"],
        "seconds": {name: way.seconds for name, way in ways.items()},
        "seconds_saved": sum(ways["file"].seconds.values()) - sum(ways["recipe"].seconds.values()),
        "medians": medians,
        "ratio": {figure: medians["recipe"][figure] / medians["file"][figure] for figure in medians["file"]},
    }


class _Way:
    """One way to deliver a model to the device, with the seconds of its steps."""

    artifact: Artifact

    def __init__(self, layout: Layout, folder: Path, *, recipe: bool) -> None:
        folder.mkdir()
        files, runner = Folder(), LLAMA_CPP.build(log=_say)
        self._transport = LocalTransport(folder / "device")
        files.paths = {file.sha256: runner.folder / name for name, file in runner.runner.files.items()}
        begun = time.perf_counter()
        self.artifact = LLAMA_CPP.export(layout, "q4_0", RandomWeights(), folder / "model", recipe=recipe)
        exported = time.perf_counter()
        files.paths[self.artifact.stored.sha256] = folder / "model"
        plan: Plan = LLAMA_CPP.plan(self.artifact, runner.runner, WORKLOAD, deadline_s=600)
        self._prepared: Prepared = prepare(plan, self._transport, files, lambda runner: True)
        self.seconds = {"export": exported - begun, "deliver": time.perf_counter() - exported}

    def measure(self) -> dict[str, float]:
        """One repetition."""
        sample = LLAMA_CPP.parse(execute(self._prepared, self._transport, Observer(self._transport)))
        assert sample.peak_rss_mb is not None
        decode = statistics.median(sample.decode_ns) / 1e6
        return {"ttft_ms": sample.ttft_ms, "decode_p50_ms": decode, "peak_rss_mb": sample.peak_rss_mb}


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
