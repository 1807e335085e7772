"""Compares multi-fidelity with single fidelity at equal cost: hypervolume by worker seconds, paired by seed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.lines import read_lines
from benchmarks.search.problems import Problem
from benchmarks.search.report import interval
from benchmarks.search.rung_study import POLICIES, Study
from benchmarks.search.rungs import RungProblem

PROBLEMS = ("hybrid", "conflict", "placement", "conditional", "periodic", "noisy")
BASE = "single"
_PARTS = (0.25, 0.5, 1.0)


def compare(
    problems: Iterable[str],
    seeds: Sequence[int],
    engine: str,
    *,
    pool: int,
    whole: int,
    longer: float,
    out: Path | None,
    say: Any,
) -> dict[str, Any]:
    """Runs every policy on every instance."""
    conditions = {"engine": engine, "pool": pool, "whole": whole, "longer": longer}
    rows = read_lines(out) if out else []
    rows = [row for row in rows if conditions.items() <= row.items()]
    done = {(row["problem"], row["seed"], row["policy"]) for row in rows}
    for seed in seeds:
        for problem in problems:
            missing = [policy for policy in POLICIES if (problem, seed, policy) not in done]
            instance = RungProblem(Problem(problem, seed), longer) if missing else None
            for policy in missing:
                assert instance is not None
                rows.append(_run(instance, policy, engine, pool, whole) | conditions)
                say(json.dumps(rows[-1]))
                if out:
                    with out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    return {**conditions, "gains": summary(rows), "runs": rows}


def _run(instance: RungProblem, policy: str, engine: str, pool: int, whole: int) -> dict[str, Any]:
    start, budget = time.process_time(), whole * instance.whole_s
    study = Study(instance, policy, engine, pool, workers=4).run(budget)
    return {
        "problem": instance.problem.name,
        "seed": instance.problem.seed,
        "engine": engine,
        "policy": policy,
        "hypervolume": {f"{part:g}": study.volume(part * budget) for part in _PARTS},
        "reached": dict(study.reached),
        "cpu_s": round(time.process_time() - start, 1),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns per problem and over all the gain of each policy over single fidelity, as shares of its hypervolume."""
    lines = []
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    for names in [[problem] for problem in problems] + ([problems] if len(problems) > 1 else []):
        for policy in POLICIES:
            inside = [row for row in rows if row["problem"] in names and row["policy"] == policy]
            if not inside:
                continue
            row: dict[str, Any] = {"problem": names[0] if len(names) == 1 else "all", "policy": policy}
            if policy != BASE:
                row |= {f"gain@{part:g}": _gain(inside, rows, f"{part:g}") for part in _PARTS}
            trials = [{"entered": 0, "complete": 0} | result["reached"] for result in inside]
            row |= {key: round(statistics.fmean(t[key] for t in trials), 1) for key in ("entered", "complete")}
            lines.append(row)
    return lines


def _gain(inside: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], part: str) -> dict[str, float] | None:
    """Returns the mean difference to the base on the same instance, over the base's mean on that problem.

    Not the mean of ratios: early in a search some instance has next to nothing, and its ratio would be all that counts.
    """
    base = {(row["problem"], row["seed"]): row["hypervolume"][part] for row in rows if row["policy"] == BASE}
    means = {
        problem: statistics.fmean(volume for (name, _), volume in base.items() if name == problem)
        for problem in {problem for problem, _ in base}
    }
    pairs = [row for row in inside if (row["problem"], row["seed"]) in base and means[row["problem"]] > 0]
    shares = [(row["hypervolume"][part] - base[row["problem"], row["seed"]]) / means[row["problem"]] for row in pairs]
    return interval(shares) if shares else None


def table(report: dict[str, Any]) -> str:
    """Returns the gains as a Markdown table."""
    lines = []
    for row in report["gains"]:
        gains = [_gain_text(row.get(f"gain@{part:g}"), part == _PARTS[-1]) for part in _PARTS]
        counts = (f"{row['entered']:.0f}", f"{row['complete']:.0f}")
        lines.append([f"`{row['problem']}`", row["policy"], *counts, *gains])
    head = ("problem", "policy", "proposed", "complete", "gain @25 %", "@50 %", "@100 % (95 %)")
    return page.table(head, lines)


def _gain_text(gain: dict[str, float] | None, whole: bool) -> str:
    if gain is None:
        return ""
    between = f" ({gain['low']:+.1%} to {gain['high']:+.1%})" if whole and "low" in gain else ""
    return f"{gain['mean']:+.1%}{between}"
