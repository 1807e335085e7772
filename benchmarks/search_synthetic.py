"""How much of the reachable hypervolume each proposer finds on synthetic problems; prints JSON.

    python benchmarks/search_synthetic.py --runs 5 --evaluations 100

A fraction is the noise-free hypervolume of a run's feasible layouts over that of a reference: all runs on that problem
and a noise-free evolution of `--reference` evaluations together. It is no optimum, and a fraction can only be compared
within one output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np

from nas.core.hypervolume import hypervolume
from nas.search import Sampler, make_proposer
from nas.testing.synthetic import OBJECTIVES, SyntheticProblem, synthetic_space

Points = list[np.ndarray | None]


def run(problem: SyntheticProblem, name: str, seed: int, evaluations: int) -> tuple[Points, float]:
    """Noise-free points in the order proposed, and seconds per proposal."""
    proposer = make_proposer(Sampler(problem.space), name, seed)
    proposer.fix_reference_point(problem.reference_point)
    points: Points = []
    spent = 0.0
    for _ in range(evaluations):
        start = time.perf_counter()
        proposals = proposer.ask(1)
        spent += time.perf_counter() - start
        for proposal in proposals:
            points.append(problem.point(proposal.layout))
            proposer.tell(problem.observe(proposal.layout))
    return points, spent / evaluations


def volume(problem: SyntheticProblem, points: Sequence[np.ndarray | None]) -> float:
    """Hypervolume of the feasible ones."""
    corner = [problem.reference_point[name] for name in OBJECTIVES]
    return hypervolume([point for point in points if point is not None], corner)


def summary(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation over runs."""
    return {"mean": round(statistics.fmean(values), 4), "sd": round(statistics.stdev(values), 4), "n": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposers", nargs="+", default=["random", "evolution", "ehvi"])
    parser.add_argument("--runs", type=int, default=5, help="problems, one seed each")
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--reference", type=int, default=3000)
    parser.add_argument("--pool", type=int, default=256)
    args = parser.parse_args()
    marks = [args.evaluations // 2, args.evaluations]
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(args.runs):
        problem = SyntheticProblem(seed, space=synthetic_space(args.pool))
        noise_free = SyntheticProblem(seed, noise=0.0, space=problem.space)
        pooled, _ = run(noise_free, "evolution", 1000 + seed, args.reference)
        runs = {name: run(problem, name, seed, args.evaluations) for name in args.proposers}
        best = volume(problem, pooled + [point for points, _ in runs.values() for point in points])
        for name, (points, seconds) in runs.items():
            result = found.setdefault(name, {})
            for mark in marks:
                result.setdefault(f"hypervolume_fraction@{mark}", []).append(volume(problem, points[:mark]) / best)
            share = sum(point is not None for point in points) / len(points)
            result.setdefault("feasible_share", []).append(share)
            result.setdefault("seconds_per_proposal", []).append(seconds)
    print(
        json.dumps({name: {key: summary(v) for key, v in result.items()} for name, result in found.items()}, indent=2)
    )


if __name__ == "__main__":
    main()
