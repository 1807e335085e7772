"""Measures ExecuTorch exports in a search: CPU seconds and memory per candidate, and how often programs are cached.

    python benchmarks/executorch_export_cost.py [--space lfm2-mixed] [--layouts 30] [--seed 0] > result.json

Layouts are drawn from the space as a search draws them and exported in turn by one worker process, as a study's Ray
worker does it: torch and ExecuTorch are loaded by the first candidate that needs a program nobody has lowered, and
stay.
`first` begins with no program at all; `again` is a new worker that finds all of them, a second study of the space. CPU
seconds are the worker's own, all threads; its memory is the high-water mark of resident pages while that candidate was
exported. `order` is the mean number of new programs by place in the search: what is left of the cost later on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from runs import print_json, say

from nas.core.layout import Layout
from nas.core.stats import quantile
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.search.proposers import Sampler
from nas.search.spaces import load_space
from nas.search.study.check import support_filter

QUANTISATION = "8da4w"
STRETCHES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="lfm2-mixed", help="packaged name or file")
    parser.add_argument("--layouts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    space = load_space(options.space)
    carried = support_filter(space)
    sampler = Sampler(space, lambda layout: carried(layout) and bool(EXECUTORCH.supports(layout)))
    rng = np.random.default_rng(options.seed)
    layouts = [sampler.draw(rng) for _ in range(options.layouts)]
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as cache:
        passes = {name: _pass(name, layouts, Path(cache)) for name in ("first", "again")}
    print_json({"space": space.name, "seed": options.seed, "layouts": len(layouts), **passes})


def _pass(name: str, layouts: Sequence[Layout], cache: Path) -> dict[str, Any]:
    """Exports all layouts in a new worker."""
    context = multiprocessing.get_context("spawn")
    rows = []
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(str(cache),)) as pool:
        for number, layout in enumerate(layouts, 1):
            rows.append(pool.submit(_export, layout.format(), str(cache)).result())
            row = rows[-1]
            say(f"{name} {number}: {row['cpu_s']:.2f} CPU s, {row['new']} of {row['programs']} programs new")
    return _summary(rows) | {"candidates": rows}


def _begin(cache: str) -> None:
    os.environ["NAS_CACHE"] = cache
    os.environ["OMP_NUM_THREADS"] = "1"


def _export(text: str, scratch: str) -> dict[str, Any]:
    """Exports one candidate in the worker, as a study does."""
    from nas.measure.runtimes.base import RandomWeights
    from nas.measure.runtimes.executorch.chain import build_chain
    from nas.measure.runtimes.executorch.templates import template_key, templates_folder

    layout = Layout.parse(text)
    programs = build_chain(layout).programs
    new = [program.kind for program in programs if not (templates_folder() / template_key(program)).exists()]
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now (proc(5))
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        artifact = EXECUTORCH.export(layout, QUANTISATION, RandomWeights(), Path(folder) / "model", recipe=True)
        cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "layout": text,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "peak_mb": _peak_mb(),
        "programs": len(programs),
        "new": len(new),
        "new_kinds": new,
        "file_mb": artifact.size / 1e6,
    }


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:"))


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cpu, programs = [row["cpu_s"] for row in rows], sum(row["programs"] for row in rows)
    new = [row["new"] for row in rows]
    stretch = -(-len(rows) // STRETCHES)
    return {
        "cpu_s": {
            "median": statistics.median(cpu),
            "p90": quantile(cpu, 0.9),
            "max": max(cpu),
            "mean": statistics.fmean(cpu),
            "total": sum(cpu),
        },
        "wall_s_total": sum(row["wall_s"] for row in rows),
        "peak_mb": max(row["peak_mb"] for row in rows),
        "programs": programs,
        "lowered": sum(new),
        "hit_rate": 1 - sum(new) / programs,
        "candidates_without_lowering": sum(not each for each in new) / len(new),
        "order": [statistics.fmean(new[start : start + stretch]) for start in range(0, len(new), stretch)],
    }


if __name__ == "__main__":
    main()
