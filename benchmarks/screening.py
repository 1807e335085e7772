"""Measures the gain of screening by hardware models, on the problems of benchmarks/search; JSON.

    python -m benchmarks.screening [--engines random evolution] [--problems hybrid tight] [--seeds 10] > result.json
    python -m benchmarks.screening --markdown result.json ...

The same seeds with and without `search.screen`. `kept`: share of proposals that truly keep all budgets; `hypervolume`:
noise-free, means over seeds; `gain`: of the run with screening over that without, with the 95 % interval of its mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.problems import Problem
from benchmarks.search.runs import run
from nas.core.pareto import hypervolume
from nas.core.stats import t_critical

FIRST_SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["random", "evolution"])
    parser.add_argument("--problems", nargs="+", default=["hybrid", "tight"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--screen", type=float, default=0.1)
    parser.add_argument("--markdown", nargs="+", type=Path, help="results to print as one table instead")
    options = parser.parse_args()
    if options.markdown:
        print(_table([row for path in options.markdown for row in json.loads(path.read_text())["rows"]]))
        return
    rows = [
        _compared(engine, problem, options.seeds, options.evaluations, options.screen)
        for engine in options.engines
        for problem in options.problems
    ]
    json.dump({"screen": options.screen, "evaluations": options.evaluations, "rows": rows}, sys.stdout, indent=1)
    print()


def _compared(engine: str, problem: str, seeds: int, evaluations: int, screen: float) -> dict[str, Any]:
    pairs = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        pairs.append([_run(engine, problem, seed, evaluations, level) for level in (0.0, screen)])
        print(engine, problem, seed, pairs[-1], file=sys.stderr, flush=True)
    plain, screened = zip(*pairs, strict=True)
    return {
        "engine": engine,
        "problem": problem,
        "seeds": seeds,
        "kept": [statistics.fmean(result["kept"] for result in runs) for runs in (plain, screened)],
        "cpu_s": [statistics.fmean(result["cpu"] for result in runs) for runs in (plain, screened)],
        "hypervolume": [statistics.fmean(result["hypervolume"] for result in runs) for runs in (plain, screened)],
        "gain": _interval([b["hypervolume"] - a["hypervolume"] for a, b in pairs]),
        "runs": pairs,
    }


def _run(engine: str, name: str, seed: int, evaluations: int, screen: float) -> dict[str, float]:
    problem = Problem(name, seed)
    search = problem.space.search.model_copy(update={"screen": screen})
    problem.space = problem.space.model_copy(update={"search": search})
    done = run(problem, engine, evaluations)
    in_budget = [point for point in done.points if point is not None]
    corner = [problem.reference_point[axis] for axis in problem.axes]
    return {"hypervolume": hypervolume(in_budget, corner), "kept": len(in_budget) / len(done.points), "cpu": done.cpu}


def _interval(values: Sequence[float]) -> list[float]:
    """Returns the mean and both ends of its 95 % t-interval."""
    half = t_critical(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return [mean, mean - half, mean + half]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| engine | problem | seeds | kept budgets, without / with | hypervolume, without / with | gain (95 %) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kept_shares = " / ".join(f"{share:.0%}" for share in row["kept"])
        volume = " / ".join(f"{value:.4f}" for value in row["hypervolume"])
        gain = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*row["gain"])
        lines.append(f"| `{row['engine']}` | `{row['problem']}` | {row['seeds']} | {kept_shares} | {volume} | {gain} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
