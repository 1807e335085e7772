"""Measures random layouts on both runtimes with one and two threads: the table that hardware models are judged on.

    python benchmarks/hardware_layouts.py [--layouts 60] [--minutes 10]

Layouts are drawn from lfm2-mixed-demo, those that both runtimes carry, and kept in benchmarks/hardware/layouts.txt;
runs are added to benchmarks/hardware/runs.csv. A layout's runs are interleaved: in each of three rounds, every
runtime with every number of threads in an order of its own, through the same code as on a farm's device, each next to a
run of the runtime's reference model with as many threads. A run during which other processes took more of a core than
allowed is repeated. A layout's rows are written when it has all of them, so the script may be stopped at any time and
started again; `--minutes` begins no layout after that time. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from nas.core import paths
from nas.core.clock import SystemClock
from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.plan import Plan, Round
from nas.core.stats import quantile
from nas.core.workload import Workload
from nas.measure.devices.agent.run_plan import Observer, run_round
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.protocol.repetitions import judge
from nas.measure.runtimes.base import RandomWeights, Runtime
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.search.proposers import Sampler
from nas.search.spaces import load_space
from nas.search.study.check import support_filter

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.runs import DEADLINE_S, Files, say

SPACE = "lfm2-mixed-demo"
FOLDER = Path(__file__).parent / "hardware"
RUNTIMES: tuple[Runtime, ...] = (LLAMA_CPP, EXECUTORCH)
THREADS = (1, 2)
WORKLOAD = Workload(prompt=256, gen=100, context=4096)
ROUNDS = 3
Plans = dict[tuple[str, int], Plan]
"""By runtime and threads."""
_TRIES = 8
"""Of one run, before the machine is too busy."""


@dataclass(frozen=True)
class Row:
    """One run next to a run of the reference model."""

    layout: int
    """Line of layouts.txt, from 0."""
    runtime: str
    threads: int
    round: int
    ttft_ms: float
    decode_p50_ms: float
    decode_p95_ms: float
    peak_rss_mb: float
    reference_ms: float
    """Timed work of the reference run."""
    foreign_cpu: float
    """Of other processes, in cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=60, help="only in an empty folder: how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--export-only", action="store_true", help="lower all shapes now; measure later")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    layouts = _layouts(options.folder, options.layouts, options.seed)
    done = {row.layout for row in read_rows(options.folder)}
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as scratch:
        bench = Bench(Path(scratch))
        for index, layout in enumerate(layouts):
            if index in done or time.monotonic() > ends:
                continue
            say(f"{index + 1} of {len(layouts)}: {layout}")
            plans = bench.export(layout, f"{index}")
            if not options.export_only:
                append_rows(options.folder, list(bench.rows(index, plans)))
            bench.drop(f"{index}")


class Bench:
    """This machine, with both runtimes.

    Args:
        scratch: folder for models.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._transport = LocalTransport(paths.cache() / "hardware-benchmark")
        self._files = Files()
        self._builds = {runtime.name: runtime.build(log=say, patched=runtime is LLAMA_CPP) for runtime in RUNTIMES}
        for build in self._builds.values():
            for name, file in build.runner.files.items():
                self._files.paths[file.sha256] = build.folder / name
        self._references = {
            key: plan
            for runtime in RUNTIMES
            for key, plan in self._plans(runtime, runtime.reference_models()[0], "reference", WORKLOAD).items()
        }

    def export(self, layout: Layout, name: str) -> Plans:
        """Exports a layout for every runtime, as files that begin with `name`; returns the plans."""
        return {key: plan for runtime in RUNTIMES for key, plan in self._plans(runtime, layout, name, WORKLOAD).items()}

    def drop(self, name: str) -> None:
        """Deletes the files of a layout."""
        for path in self._scratch.glob(f"{name}-*"):
            path.unlink()

    def rows(self, index: int, plans: Plans) -> Iterator[Row]:
        """Returns all runs of one layout."""
        order = random.Random(index)
        for round_ in range(ROUNDS):
            for runtime, threads in order.sample(sorted(plans), len(plans)):
                yield self._run(index, round_, runtime, threads, plans[runtime, threads])

    def _run(self, index: int, round_: int, runtime: str, threads: int, plan: Plan) -> Row:
        parse = next(runtime_class.parse for runtime_class in RUNTIMES if runtime_class.name == runtime)
        batch = Round(candidate=plan, reference=self._references[runtime, threads], repetitions=1)
        why: str | None = None
        for _ in range(_TRIES):
            observer = Observer(self._transport)
            result = run_round(
                batch, self._transport, self._files, lambda runner: True, observer=observer, clock=SystemClock()
            )
            (pair,) = result.pairs
            rep, fault = judge(pair, parse, None, 0)
            if fault is not None:
                raise fault
            if rep.valid and rep.sample is not None and rep.reference is not None:
                sample = rep.sample
                tokens = [ns / 1e6 for ns in sample.decode_ns]
                p95 = quantile(tokens, 0.95)
                assert p95 is not None
                assert sample.peak_rss_mb is not None, "the runner reports its own peak"
                reference_ms = rep.reference.ttft_ms + sum(rep.reference.decode_ns) / 1e6
                figures = (sample.ttft_ms, statistics.median(tokens), p95, sample.peak_rss_mb, reference_ms)
                numbers = (round(figure, 4) for figure in (*figures, pair.foreign_cpu or 0.0))
                return Row(index, runtime, threads, round_, *numbers)
            why = rep.reason
        raise InfrastructureFailed(f"{_TRIES} runs failed, the last one because {why}")

    def _plans(self, runtime: Runtime, layout: Layout, name: str, workload: Workload) -> Plans:
        path = self._scratch / f"{name}-{runtime.name}"
        artifact = runtime.export(layout, runtime.quantisations[0], RandomWeights(), path)
        self._files.paths[artifact.sha256] = path
        runner = self._builds[runtime.name].runner
        return {
            (runtime.name, threads): runtime.plan(
                artifact, runner, workload.model_copy(update={"threads": threads}), DEADLINE_S
            )
            for threads in THREADS
        }


def _layouts(folder: Path, count: int, seed: int) -> list[Layout]:
    """Returns the layouts of the folder; draws them where it has none."""
    path = folder / "layouts.txt"
    if not path.exists():
        space = load_space(SPACE)
        carried = support_filter(space)
        sampler = Sampler(space, lambda layout: carried(layout) and bool(EXECUTORCH.supports(layout)))
        rng = np.random.default_rng(seed)
        drawn: dict[str, Layout] = {}
        while len(drawn) < count:
            layout = sampler.draw(rng)
            drawn[layout.id] = layout
        path.write_text("".join(f"{layout}\n" for layout in drawn.values()))
    return read_layouts(folder)


def read_layouts(folder: Path = FOLDER) -> list[Layout]:
    """Returns the layouts of a table."""
    return [Layout.parse(line) for line in (folder / "layouts.txt").read_text().splitlines()]


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """Returns the runs of a table."""
    path = folder / "runs.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [
            Row(
                int(row["layout"]),
                row["runtime"],
                int(row["threads"]),
                int(row["round"]),
                *(float(row[field.name]) for field in fields(Row)[4:]),
            )
            for row in csv.DictReader(file)
        ]
    return rows


def append_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Adds a layout's runs atomically."""
    path = folder / "runs.csv"
    before = path.read_text() if path.exists() else ",".join(field.name for field in fields(Row)) + "\n"
    added = "".join(",".join(map(str, asdict(row).values())) + "\n" for row in rows)
    write_durably(path, (before + added).encode())


if __name__ == "__main__":
    main()
