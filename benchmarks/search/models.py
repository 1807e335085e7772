"""Checks the surrogates of proposers: errors and calibration near the front and on random layouts.

A history of observations is made once for each problem and seed, by `ehvi`, and stored. Every compared proposer is
told the same history; its surrogate then forecasts the noise-free figures of layouts that it was not told: single edits
of the history's front, and random ones.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.search.problems import BUDGETS, Problem
from benchmarks.search.results import claimed
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.pareto import front_mask
from nas.search.proposers import Observation, Sampler, make_proposer, mutate
from nas.search.proposers.ehvi import EhviSearch

_NEAR, _RANDOM = 120, 200
"""Layouts of each sort that are forecast."""
HISTORY = "history"
_KEPT_EVERY = 10
_CALIBRATED = (0.9, 1.2)
"""Aim for the standard deviation of z near the front."""


def check(
    folder: Path, problems: Sequence[str], seeds: Sequence[int], engines: Sequence[str], observed: int, say: Any
) -> list[dict[str, Any]]:
    """Returns a row of figures for each problem, seed and engine; what the folder holds is not computed again."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in seeds:
        for name in problems:
            path = folder / f"{name}.{HISTORY}.{observed}.{seed}.json"
            history = _stored(path, partial(_history, folder, name, seed, observed), say)
            for engine in engines:
                path = folder / f"{name}.{engine}.{observed}.{seed}.json"
                rows.append(_stored(path, partial(_checked, name, seed, engine, history), say))
    return [row for row in rows if row]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as a Markdown table, means over seeds, then means over problems, and how often z is as aimed."""
    names = ("near_z_mean", "near_z_sd", "near_r2", "random_r2", "random_rho", "memory_near", "memory_random")
    lines, notes = [], []
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    for problem in [*problems, "all"]:
        for engine in engines:
            group = [row for row in rows if row["engine"] == engine and problem in (row["problem"], "all")]
            if group:
                cells = [f"{statistics.fmean(row[name] for row in group):.3f}" for name in names]
                lines.append([f"`{problem}`", engine, *cells])
    for engine in engines:
        spread = [row["near_z_sd"] for row in rows if row["engine"] == engine]
        inside = sum(_CALIBRATED[0] <= deviation <= _CALIBRATED[1] for deviation in spread)
        notes.append(f"`{engine}`: near_z_sd within {_CALIBRATED[0]} to {_CALIBRATED[1]} on {inside} of {len(spread)}")
    return "\n".join([page.table(["problem", "engine", *names], lines), *notes])


def _stored(path: Path, make: Any, say: Any) -> dict[str, Any]:
    """Returns the contents of `path`, computed where it is missing; empty where another process computes it."""
    with claimed(path) as mine:
        if mine:
            write_durably(path, json.dumps(make()).encode())
            say(path.name)
    return json.loads(path.read_text()) if path.exists() else {}


def _history(folder: Path, name: str, seed: int, observed: int) -> dict[str, Any]:
    """Returns the observations of a run of `ehvi`; its state is stored after each: a killed process repeats little."""
    problem, state_file = Problem(name, seed), folder / f"{name}.{observed}.{seed}.partial"
    proposer = make_proposer(Sampler(problem.space), "ehvi", seed)
    proposer.fix_reference_point(problem.reference_point)
    if state_file.exists():
        proposer.restore(json.loads(state_file.read_text()))
    while len(proposals := proposer.state()["proposals"]) < observed:
        proposer.tell(problem.observe(proposer.ask(1)[0].layout))
        if len(proposals) % _KEPT_EVERY == 0:
            write_durably(state_file, json.dumps(proposer.state()).encode())
    state_file.unlink(missing_ok=True)
    return {"layouts": [Layout.from_json(proposal["layout"]).format() for proposal in proposals]}


def _checked(name: str, seed: int, engine: str, history: Mapping[str, Any]) -> dict[str, Any]:
    problem = Problem(name, seed)
    sampler = Sampler(problem.space)
    proposer = make_proposer(sampler, engine, seed)
    assert isinstance(proposer, EhviSearch), f"{engine} has no surrogate"
    proposer.fix_reference_point(problem.reference_point)
    observations = [problem.observe(Layout.parse(text)) for text in history["layouts"]]
    for observation in observations:
        proposer.tell(observation)
    seen_ids = {observation.layout.id for observation in observations}
    start = time.process_time()
    surrogate = proposer.surrogate()
    result: dict[str, Any] = {"problem": name, "engine": engine, "seed": seed, "told": len(observations)}
    sets = {"near": _near(problem, sampler, observations, seen_ids), "random": _random(problem, sampler, seen_ids)}
    for place, layouts in sets.items():
        objectives, constraints = surrogate.predict(layouts)
        truth = [problem.truth(layout) for layout in layouts]
        names = [*problem.axes, *surrogate.constraints]
        mean, sd = np.hstack([objectives.mean, constraints.mean]), np.hstack([objectives.sd, constraints.sd])
        for column, target in enumerate(names):
            limit = problem.limits[target] if column >= len(problem.axes) else 0.0
            true = np.array([figures[target] for figures in truth]) - limit
            if target == "quality" and column == 0:
                result |= _scores(place, true, mean[:, column], sd[:, column])
            elif target in BUDGETS:
                result[f"{target}_{place}"] = float(np.sqrt(((true - mean[:, column]) ** 2).mean()) / true.std())
    return result | {"cpu_s": time.process_time() - start}


def _scores(place: str, true: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> dict[str, float]:
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    away = (true - mean) / sd
    density = -0.5 * away**2 - np.log(sd) - 0.5 * math.log(2 * math.pi)
    return {
        f"{place}_z_mean": float(away.mean()),
        f"{place}_z_sd": float(away.std()),
        f"{place}_r2": float(1 - ((true - mean) ** 2).mean() / true.var()),
        f"{place}_rho": float(spearmanr(true, mean).statistic),
        f"{place}_log_score": float((density + math.log(true.std())).mean()),
    }


def _near(problem: Problem, sampler: Sampler, observations: Sequence[Observation], seen_ids: set[str]) -> list[Layout]:
    """Returns single edits of the layouts on the history's front that truly keep the budgets."""
    inside = [
        (observation.layout, point)
        for observation in observations
        if (point := problem.point(observation.layout)) is not None
    ]
    best = front_mask([point for _, point in inside])
    front = [layout for (layout, _), on in zip(inside, best, strict=True) if on]
    rng = np.random.default_rng([103, problem.seed])
    edits = (mutate(front[index % len(front)], sampler, rng)[0] for index in range(4 * _NEAR))
    return _distinct(edits, seen_ids, _NEAR)


def _random(problem: Problem, sampler: Sampler, seen_ids: set[str]) -> list[Layout]:
    rng = np.random.default_rng([107, problem.seed])
    return _distinct((sampler.draw(rng) for _ in range(4 * _RANDOM)), seen_ids, _RANDOM)


def _distinct(layouts: Iterator[Layout], seen_ids: set[str], most: int) -> list[Layout]:
    layouts_by_id: dict[str, Layout] = {}
    for layout in layouts:
        if layout.id not in seen_ids:
            layouts_by_id.setdefault(layout.id, layout)
        if len(layouts_by_id) == most:
            break
    return list(layouts_by_id.values())
