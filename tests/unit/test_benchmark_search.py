"""The family of search problems, and what the benchmark makes of runs on it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.search.problems import BUDGETS, FAMILY, Problem
from benchmarks.search.replay import replay
from benchmarks.search.report import fractions, report
from benchmarks.search.results import REFERENCE, Key, fill, read
from benchmarks.search.runs import run
from benchmarks.search.table import tables
from nas.core.space import SearchSettings
from nas.search import Sampler


@pytest.mark.parametrize("name", FAMILY)
def test_a_problem_is_what_it_says(name: str) -> None:
    problem, other = Problem(name, 5), Problem(name, 6)
    sampler, rng = Sampler(problem.space), np.random.default_rng(1)
    layouts = [sampler.draw(rng) for _ in range(120)]
    inside = [problem.point(layout) for layout in layouts]
    share = sum(point is not None for point in inside) / len(inside)
    assert 0.2 * FAMILY[name].feasible < share < 2.5 * FAMILY[name].feasible
    assert problem.truth(layouts[0]) == Problem(name, 5).truth(layouts[0]) != other.truth(layouts[0])
    seen = problem.observe(layouts[0])
    assert seen == problem.observe(layouts[0]) and set(seen.constraints) == set(BUDGETS)
    spread = np.std([[problem.truth(layout)[axis] for axis in problem.axes] for layout in layouts], axis=0)
    assert (spread > 0.01).all()


def test_noise_has_the_size_it_says() -> None:
    problem = Problem("noisy", 3)
    sampler, rng = Sampler(problem.space), np.random.default_rng(1)
    layouts = [sampler.draw(rng) for _ in range(300)]
    off = [problem.observe(x, gated=False).objectives["decode"] - problem.truth(x)["decode"] for x in layouts]
    assert np.std(off) == pytest.approx(0.03, rel=0.15)


def test_what_breaks_a_budget_has_no_quality_unless_ungated() -> None:
    problem = Problem("tight", 0)
    sampler, rng = Sampler(problem.space), np.random.default_rng(1)
    broken = next(x for x in (sampler.draw(rng) for _ in range(99)) if problem.observe(x).status == "infeasible")
    assert "quality" not in problem.observe(broken).objectives
    assert "quality" in problem.observe(broken, gated=False).objectives


def test_a_cheap_gate_buys_more_layouts() -> None:
    problem = Problem("attention", 0)
    plain, gated = run(problem, "random", 20), run(problem, "random-gated", 20)
    assert len(plain.points) == 20 < len(gated.points) and gated.costs[-1] >= 20


def test_workers_finish_in_another_order() -> None:
    problem = Problem("attention", 0)
    assert run(problem, "evolution", 20, workers=8).points != run(problem, "evolution", 20).points


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    keys = [Key("attention", engine, 1, seed) for seed in (0, 1) for engine in (REFERENCE, "random", "evolution")]
    said: list[str] = []
    assert not fill(tmp_path, keys, 50, 60, 0.0, said.append) and said == []
    assert fill(tmp_path, keys[:3], 50, 60, 1e9, said.append) and len(said) == 3
    assert fill(tmp_path, keys, 50, 60, 1e9, said.append) and len(said) == 6
    results = read(tmp_path)
    assert set(results) == set(keys)
    table = report(results, (50,), "evolution")
    assert [row["engine"] for row in table["fractions"]] == ["evolution", "random"]
    assert all(0 < row["@50"]["mean"] <= 1 for row in table["fractions"])
    (lead,) = table["leads"]
    shares = fractions(results, (50,))
    ours, others = (shares["attention", engine, 1][50] for engine in ("evolution", "random"))
    gaps = [ours[seed] - others[seed] for seed in (0, 1)]
    assert lead["over"] == "random" and lead["mean"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert lead["low"] < lead["mean"] < lead["high"]
    assert f"| `attention` | 2 | {table['fractions'][0]['@50']['mean']:.3f} ± " in tables(table, "evolution")


def test_two_processes_fill_one_folder_side_by_side(tmp_path: Path) -> None:
    keys = [Key("attention", "random", 1, seed) for seed in range(4)]
    script = (
        "import sys; from pathlib import Path; from benchmarks.search.results import Key, fill\n"
        "keys = [Key('attention', 'random', 1, seed) for seed in range(4)]\n"
        "fill(Path(sys.argv[1]), keys, 50, 0, 1e9, print)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [line for one in pair for line in one.communicate()[0].splitlines()]
    assert [one.returncode for one in pair] == [0, 0]
    assert sorted(line.split()[0] for line in said) == sorted(key.file for key in keys)
    assert {path.name for path in tmp_path.iterdir()} == {key.file for key in keys}


def test_what_another_process_is_at_is_left_to_it(tmp_path: Path) -> None:
    keys = [Key("attention", "random", 1, seed) for seed in range(2)]
    said: list[str] = []
    with (tmp_path / keys[0].file).with_suffix(".claim").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert not fill(tmp_path, keys, 50, 0, 1e9, said.append)
    assert set(read(tmp_path)) == {keys[1]} and len(said) == 1
    assert fill(tmp_path, keys, 50, 0, 1e9, said.append) and set(read(tmp_path)) == set(keys)


def test_a_recorded_study_is_replayed_from_its_table() -> None:
    problem = Problem("hybrid", 2)
    sampler, rng = Sampler(problem.space), np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    while len(rows) < 20:
        layout = sampler.draw(rng)
        seen = problem.observe(layout)
        if seen.status == "complete":
            row = {"layout": layout.format(), "coordinates": dict(seen.objectives), "budgets": []}
            rows.append(row | {"sd": dict.fromkeys(problem.axes, 0.01)})
    recorded = {"study": "s", "ranking": rows, "reference_point": problem.reference_point}
    space = problem.space.model_copy(update={"search": SearchSettings(pool=32)})
    found = replay(recorded, space, {"random": "random", "ehvi": "ehvi"}, seeds=2)
    assert found["layouts"] == 20 and found["after"][0] == 2
    for shares in found["fraction"].values():
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
