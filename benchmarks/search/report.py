"""Computes figures from results: fractions, lead over baselines and former engines, loss by parallel workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from benchmarks.search.results import REFERENCE, Key
from benchmarks.search.runs import ORACLE
from nas.core.pareto import hypervolume
from nas.core.stats import mean_interval

Results = Mapping[Key, Mapping[str, Any]]
Fractions = dict[tuple[str, str, int], dict[int, dict[int, float]]]
"""(problem, engine, workers) -> evaluations -> seed -> share of the reference hypervolume."""
ALL = "all"
"""Stands for every problem at once."""


def report(results: Results, marks: tuple[int, ...], candidate: str) -> dict[str, Any]:
    """Returns all figures as JSON; docs/measured/search-engine.md explains them."""
    shares = fractions(results, marks)
    problems = sorted({problem for problem, _, _ in shares})
    return {
        "fractions": [
            {"problem": problem, "engine": engine, "workers": workers}
            | {f"@{mark}": _summary(list(by_seed.values())) for mark, by_seed in by_mark.items()}
            | {"cpu_s": _cpu(results, problem, engine, workers)}
            for (problem, engine, workers), by_mark in sorted(shares.items())
        ],
        "of_oracle": [
            {"problem": problem, "engine": engine}
            | {f"@{mark}": _summary(list(by_seed.values())) for mark, by_seed in by_mark.items()}
            for problem, engine, by_mark in _of_oracle(shares)
        ],
        "former": [gain for mark in marks for gain in _former(shares, mark, candidate)],
        "leads": [lead for problem in problems for mark in marks if (lead := _lead(shares, problem, mark, candidate))],
        "parallel": [loss for mark in marks for loss in _losses(shares, problems, mark, candidate)],
    }


def _of_oracle(shares: Fractions) -> Iterator[tuple[str, str, dict[int, dict[int, float]]]]:
    """Yields for each problem and engine the share of what the oracle reached after as many evaluations, by seed."""
    for (problem, engine, workers), by_mark in sorted(shares.items()):
        best = shares.get((problem, ORACLE, 1))
        if best is None or workers != 1 or engine == ORACLE:
            continue
        of_best = {
            mark: {seed: share / best[mark][seed] for seed, share in by_seed.items() if best.get(mark, {}).get(seed)}
            for mark, by_seed in by_mark.items()
        }
        yield problem, engine, {mark: by_seed for mark, by_seed in of_best.items() if by_seed}


def fractions(results: Results, marks: tuple[int, ...]) -> Fractions:
    """Returns hypervolume over that of the reference: the long search and every run on the instance together.

    Runs of the oracle are no part of the reference, so that shares compare with those of a folder without them.
    """
    best: dict[tuple[str, int], float] = {}
    for problem, seed in sorted({(key.problem, key.seed) for key in results if key.engine == REFERENCE}):
        group = [
            data for key, data in results.items() if (key.problem, key.seed) == (problem, seed) and key.engine != ORACLE
        ]
        points = [point for data in group for point in data["points"] if point is not None]
        best[problem, seed] = hypervolume(points, group[0]["corner"])
    shares: Fractions = {}
    for key, data in results.items():
        if key.engine == REFERENCE or (key.problem, key.seed) not in best:
            continue
        for mark in marks:
            if data["costs"][-1] < mark - 1 and len(data["costs"]) < 2 * mark:
                continue
            inside = [p for p, cost in zip(data["points"], data["costs"], strict=True) if p and cost <= mark]
            share = hypervolume(inside, data["corner"]) / best[key.problem, key.seed] if inside else 0.0
            shares.setdefault(key[:3], {}).setdefault(mark, {})[key.seed] = share
    return shares


def _lead(shares: Fractions, problem: str, mark: int, candidate: str) -> dict[str, Any] | None:
    """Returns the candidate minus the best baseline, seed by seed; baselines without all of its seeds do not count."""
    mine = shares.get((problem, candidate, 1), {}).get(mark, {})
    others = {
        engine: by_mark[mark]
        for (name, engine, workers), by_mark in shares.items()
        if name == problem
        and not _is_ours(engine, candidate)
        and workers == 1
        and by_mark.get(mark, {}).keys() >= mine.keys()
    }
    if not mine or not others:
        return None
    best = max(others, key=lambda engine: statistics.fmean(others[engine].values()))
    paired = [mine[seed] - others[best][seed] for seed in mine]
    return {"problem": problem, "evaluations": mark, "over": best} | interval(paired)


def _is_ours(engine: str, candidate: str) -> bool:
    """Returns whether an engine is no baseline: the candidate, another form of it, or the oracle."""
    return engine == ORACLE or engine.startswith(candidate)


def _former(shares: Fractions, mark: int, candidate: str) -> Iterator[dict[str, Any]]:
    """Yields the gain over each other form of the candidate: the mean over all pairs of runs on one instance."""
    for other in sorted({engine for _, engine, _ in shares if _is_ours(engine, candidate)} - {candidate, ORACLE}):
        gains = [
            share - by_mark[mark][seed]
            for (problem, engine, workers), by_mark in shares.items()
            if (engine, workers) == (other, 1)
            for seed, share in shares.get((problem, candidate, 1), {}).get(mark, {}).items()
            if seed in by_mark.get(mark, {})
        ]
        if gains:
            yield {"over": other, "evaluations": mark, "better": sum(gain > 0 for gain in gains)} | interval(gains)


def _losses(shares: Fractions, problems: list[str], mark: int, candidate: str) -> Iterator[dict[str, Any]]:
    """Yields the relative loss of eight workers compared with one, on each problem and over all pairs of runs."""
    pairs = {problem: paired for problem in problems if (paired := _paired(shares, problem, mark, candidate))}
    for problem, paired in pairs.items():
        yield {"problem": problem, "evaluations": mark, "workers": 8} | interval(paired)
    if pairs:
        yield {"problem": ALL, "evaluations": mark, "workers": 8} | interval([*chain(*pairs.values())])


def _paired(shares: Fractions, problem: str, mark: int, candidate: str) -> list[float]:
    alone = shares.get((problem, candidate, 1), {}).get(mark, {})
    together = shares.get((problem, candidate, 8), {}).get(mark, {})
    return [1 - together[seed] / alone[seed] for seed in alone.keys() & together.keys() if alone[seed]]


def interval(values: list[float]) -> dict[str, float]:
    """Returns the mean with its two-sided 95 % interval (Student's t)."""
    mean, half = mean_interval(values)
    if math.isinf(half):
        return {"mean": round(mean, 4), "n": len(values)}
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4), "n": len(values)}


def _summary(values: list[float]) -> dict[str, float]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.fmean(values), 4), "sd": round(spread, 4), "n": len(values)}


def _cpu(results: Results, problem: str, engine: str, workers: int) -> float:
    spent = [data["cpu"] for key, data in results.items() if key[:3] == (problem, engine, workers)]
    return round(statistics.fmean(spent), 4)
