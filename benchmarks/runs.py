"""Shared parts of the benchmarks of single models: a layout's model file, and fresh processes of the runner on it.

These use no device, no reference run and no verdict, so they need a calm machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import PlanFile
from nas.core.published import LFM2
from nas.core.workload import Workload
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, Build, RandomWeights, Runtime
from nas.testing.run_plan import run_plan

DEADLINE_S = 3600.0

MIXED_350M = (
    "d1024 v65536 ffn=swiglu:4096 "
    "[C3*2 M64 A16/8 C3*2 M64 W16/4@512 C3+moe:8x2:512 C3 M64 A16/8 C3+moe:8x2:512 C3 M64 A16/8]"
)
"""Every kind of mixer and feed-forward in 16 layers; 340M weights."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model file and the build that runs it."""

    runtime: Runtime
    layout: Layout
    artifact: Artifact
    file: Path
    build: Build

    def run(self, workload: Workload) -> Sample:
        """Runs one new process.

        Raises:
            NasError: the runner failed, or did not take the workload.
        """
        plan = self.runtime.plan(self.artifact, self.build.runner, workload, DEADLINE_S)
        return self.runtime.parse(run_plan(plan, self.build.folder, {"model": self.file}))


@dataclass
class Files:
    """What has been made, by content: the source that devices fetch from."""

    paths: dict[str, Path] = field(default_factory=dict)

    def fetch(self, file: PlanFile) -> Path:
        """See `nas.measure.devices.agent.run_plan.FileSource`."""
        return self.paths[file.sha256]

    def doubt(self, file: PlanFile) -> None:
        """Does nothing."""


def ended_or_killed(process: BaseProcess, moment: float, deadline_s: float) -> bool:
    """Starts `process`, kills it after `moment` seconds, and returns whether it ended before.

    Raises:
        RuntimeError: it failed, or had no moment (infinity) and did not end within `deadline_s`.
    """
    process.start()
    process.join(min(moment, deadline_s))
    if process.is_alive():
        process.kill()
        process.join(deadline_s)
        if math.isinf(moment):
            raise RuntimeError(f"the run did not end within {deadline_s:g} s")
        return False
    if process.exitcode:
        raise RuntimeError(f"the run ended with exit status {process.exitcode}")
    return True


def kill_campaign(
    process: Callable[[Path], BaseProcess],
    folder: Path,
    hashes: Callable[[Path], dict[str, str]],
    reached: Callable[[Path], str | int],
    *,
    kills: int,
    seed: int,
    share: float = 1.0,
) -> dict[str, Any]:
    """Returns `kills` SIGKILLs of a computation, and whether what it leaves equals that of an undisturbed one.

    A run is killed at a moment drawn from the first `share` of the time that the undisturbed one took, and started
    again, until it ends; then another series begins in an empty folder.

    Args:
        process: which computes in a folder, not started.
        folder: that gets one for each series.
        hashes: file -> SHA-256 of what a run left.
        reached: how far it came.
        kills: of all series together, 1 or more.
        seed: of the moments.
        share: of the time.

    Raises:
        RuntimeError: a run failed, or took longer than an hour.
    """
    began = time.monotonic()
    assert ended_or_killed(process(folder / "calm"), math.inf, DEADLINE_S)
    calm_s, calm = time.monotonic() - began, hashes(folder / "calm")
    rng, series = random.Random(seed), 0
    rows: list[dict[str, Any]] = []
    while (remaining := kills - sum(row["killed"] for row in rows)) or not rows[-1]["ended"]:
        moment, inside = rng.uniform(0, share * calm_s) if remaining else math.inf, folder / f"killed-{series}"
        has_ended = ended_or_killed(process(inside), moment, DEADLINE_S)
        row = {"series": series, "after_s": moment if remaining else None, "killed": not has_ended, "ended": has_ended}
        rows.append(row | {"reached": reached(inside), "equal": hashes(inside) == calm if has_ended else None})
        series += has_ended
        say(json.dumps(rows[-1]))
    equal = all(row["equal"] for row in rows if row["ended"])
    return {"seed": seed, "kills": kills, "calm_s": calm_s, "equal": equal, "files": calm, "runs": rows}


@contextmanager
def exported(layout: Layout, runtime: str = "llama.cpp", *, tools: bool = False) -> Iterator[Model]:
    """Yields `layout` exported with the runtime's default quantisation and random weights."""
    target = RUNTIMES[runtime]
    runtime_build = built(target, layout, tools=tools)
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as folder:
        file = Path(folder) / "model"
        yield Model(
            target, layout, target.export(layout, target.quantisations[0], RandomWeights(), file), file, runtime_build
        )


def built(runtime: Runtime, layout: Layout, *, tools: bool = False) -> Build:
    """Returns the build that `layout` needs; makes it where it is missing."""
    return runtime.build(log=say, patched=runtime.supports(layout).verdict == "patched", tools=tools)


def runtime_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--runtime`."""
    parser.add_argument("--runtime", default="llama.cpp", choices=list(RUNTIMES))


def layout_called(text: str) -> Layout:
    """Returns the layout of a published name or a one-line string."""
    return Layout.parse(LFM2.get(text, text))


def counts(text: str) -> list[int]:
    """Parses numbers separated by commas: the type of an option."""
    return [int(part) for part in text.split(",")]


def decode_ms(sample: Sample) -> list[float]:
    """Returns milliseconds per decoded token."""
    return [ns / 1e6 for ns in sample.decode_ns]


def say(line: str) -> None:
    """Prints progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(result: dict[str, Any]) -> None:
    """Prints the result to stdout."""
    json.dump(result, sys.stdout, indent=1)
    print()


def digits(value: float) -> float | None:
    """Rounds to three significant digits; None for a value that is not finite, which JSON cannot hold."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
