"""The family of search problems, and what the benchmark makes of runs on it."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exhaustive import mostly_exhaustive

from benchmarks.search import models
from benchmarks.search.problems import BUDGETS, FAMILY, Problem
from benchmarks.search.recorded import load, recorded, rounded, table, write
from benchmarks.search.replay import replay
from benchmarks.search.report import fractions, report
from benchmarks.search.results import REFERENCE, Key, fill, pack, read
from benchmarks.search.runs import run
from benchmarks.search.table import tables
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.space import SearchSettings
from nas.search.proposers import Observation, Sampler


@pytest.mark.parametrize("name", mostly_exhaustive(FAMILY, "hybrid"))  # the others differ by their parameters
def test_a_problem_is_what_it_says(name: str) -> None:
    problem, other = Problem(name, 5), Problem(name, 6)
    sampler, rng = Sampler(problem.space), np.random.default_rng(1)
    layouts = [sampler.draw(rng) for _ in range(120)]
    inside = [problem.point(layout) for layout in layouts]
    share = sum(point is not None for point in inside) / len(inside)
    assert 0.2 * FAMILY[name].feasible < share < 2.5 * FAMILY[name].feasible
    assert problem.truth(layouts[0]) == Problem(name, 5).truth(layouts[0]) != other.truth(layouts[0])
    observation = problem.observe(layouts[0])
    assert observation == problem.observe(layouts[0]) and set(observation.constraints) == set(BUDGETS)
    spread = np.std([[problem.truth(layout)[axis] for axis in problem.axes] for layout in layouts], axis=0)
    assert (spread > 0.01).all()


def test_noise_has_the_size_it_says() -> None:
    problem = Problem("noisy", 3)
    sampler, rng = Sampler(problem.space), np.random.default_rng(1)
    layouts = [sampler.draw(rng) for _ in range(150)]
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
    messages: list[str] = []
    assert not fill(tmp_path, keys, 50, 60, 0.0, messages.append) and messages == []
    assert fill(tmp_path, keys[:3], 50, 60, 1e9, messages.append) and len(messages) == 3
    assert fill(tmp_path, keys, 50, 60, 1e9, messages.append) and len(messages) == 6
    results = read(tmp_path)
    assert set(results) == set(keys)
    table = report(results, (50,), "evolution")
    assert [row["engine"] for row in table["fractions"]] == ["evolution", "random"]
    assert all(0 < row["@50"]["mean"] <= 1 for row in table["fractions"])
    (lead,) = table["leads"]
    shares = fractions(results, (50,))
    evolution, others = (shares["attention", engine, 1][50] for engine in ("evolution", "random"))
    gaps = [evolution[seed] - others[seed] for seed in (0, 1)]
    assert lead["over"] == "random" and lead["mean"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert lead["low"] < lead["mean"] < lead["high"]
    assert f"| `attention` | 2 | {table['fractions'][0]['@50']['mean']:.3f} ± " in tables(table, "evolution")


@pytest.mark.exhaustive  # by default the next test: a run whose claim another file handle holds is left to it
def test_two_processes_fill_one_folder_side_by_side(tmp_path: Path) -> None:
    keys = [Key("attention", "random", 1, seed) for seed in range(4)]
    script = (
        "import sys; from pathlib import Path; from benchmarks.search.results import Key, fill\n"
        "keys = [Key('attention', 'random', 1, seed) for seed in range(4)]\n"
        "fill(Path(sys.argv[1]), keys, 50, 0, 1e9, print)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for one in pair for line in one.communicate()[0].splitlines()]
    assert [one.returncode for one in pair] == [0, 0]
    assert sorted(line.split()[0] for line in lines) == sorted(key.file for key in keys)
    assert {path.name for path in tmp_path.iterdir()} == {key.file for key in keys}


def test_what_another_process_is_at_is_left_to_it(tmp_path: Path) -> None:
    keys = [Key("attention", "random", 1, seed) for seed in range(2)]
    messages: list[str] = []
    with (tmp_path / keys[0].file).with_suffix(".claim").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert not fill(tmp_path, keys, 50, 0, 1e9, messages.append)
    assert set(read(tmp_path)) == {keys[1]} and len(messages) == 1
    assert fill(tmp_path, keys, 50, 0, 1e9, messages.append) and set(read(tmp_path)) == set(keys)


def observed(problem: Problem, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of random layouts, as reports have them."""
    sampler, rng = Sampler(problem.space), np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for trial in range(count):
        layout = sampler.draw(rng)
        row = problem.observe(layout).to_json()
        row |= {"layout": layout.format(), "trial": trial, "origin": "reference" if trial == 0 else "proposal"}
        rows.append(row)
    return rows


def study(problem: Problem, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"study": name, "state": "complete", "seed": 0, "version": "0", "elapsed_s": 1.0}
    return recorded(head | {"reference_point": problem.reference_point, "space": {"name": "s"}, "told": rows})


def test_recorded_studies_are_replayed_from_their_table_incomplete_trials_too(tmp_path: Path) -> None:
    problem = Problem("hybrid", 2)
    one, other = (study(problem, name, observed(problem, 40, seed)) for seed, name in enumerate("ab"))
    write([one, other], tmp_path / "table.json")
    recorded_table = table(load(tmp_path / "table.json"))
    assert recorded_table.studies == ("a", "b") and recorded_table.space == "s" and len(recorded_table.references) == 2
    counts = Counter(observation.status for observation in recorded_table.observations.values())
    assert counts["infeasible"] > counts["complete"] > 0
    space = problem.space.model_copy(update={"search": SearchSettings(pool=16)})
    result = replay(recorded_table, space, {"random": "random", "ehvi": "ehvi"}, seeds=1, evaluations=10)
    assert (result["layouts"], result["ended"]) == (len(recorded_table.observations), dict(sorted(counts.items())))
    assert result["after"] == list(range(1, 11))
    for shares in result["fraction"].values():
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1


def test_all_of_a_table_replayed_is_all_of_its_hypervolume() -> None:
    problem = Problem("attention", 1)
    recorded_table = table([study(problem, "a", observed(problem, 40, 3))])
    result = replay(recorded_table, problem.space, {"random": "random"}, seeds=1)
    assert result["after"][-1] == result["layouts"] and result["fraction"]["random"][-1] == 1


def test_a_table_holds_of_each_layout_what_went_furthest(tmp_path: Path) -> None:
    problem = Problem("hybrid", 2)
    rows = [row for row in observed(problem, 60, 0) if row["status"] == "complete" and row["origin"] != "reference"]
    done = rows[-1]
    stopped = done | {"status": "stopped", "rung": 0}
    running = rows[-2] | {"status": "running"}
    first, second = study(problem, "a", [stopped, running]), study(problem, "b", [done, stopped])
    (observation,) = table([first, second]).observations.values()
    assert observation.status == "complete"
    with pytest.raises(InvalidInput, match="nothing to find"):
        replay(table([first]), problem.space, {"random": "random"}, seeds=1)


def test_a_report_is_a_table_of_one_study(tmp_path: Path) -> None:
    problem = Problem("hybrid", 2)
    rows = observed(problem, 5, 0)
    report_ = study(problem, "a", rows) | {"space": {"name": "s"}, "front": []}
    (tmp_path / "report.json").write_text(json.dumps(report_))
    (tables,) = load(tmp_path / "report.json")
    assert tables["told"] == rounded(rows_without_nulls(rows)) and "front" not in tables


def rows_without_nulls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def test_engines_are_compared_with_an_oracle_that_is_no_part_of_the_reference(tmp_path: Path) -> None:
    keys = [Key("attention", engine, 1, 0) for engine in (REFERENCE, "oracle", "random")]
    fill(tmp_path, keys, 16, 30, 1e9, lambda text: None)
    figures = report(read(tmp_path), (16,), "ehvi")
    by_engine = {row["engine"]: row["@16"]["mean"] for row in figures["fractions"]}
    (row,) = figures["of_oracle"]
    assert row["engine"] == "random"
    assert row["@16"]["mean"] == pytest.approx(by_engine["random"] / by_engine["oracle"], abs=1e-3)
    assert by_engine["oracle"] > by_engine["random"]
    alone = fractions({key: data for key, data in read(tmp_path).items() if key.engine != "oracle"}, (16,))
    assert alone["attention", "random", 1][16][0] == pytest.approx(by_engine["random"], abs=1e-3)


def test_surrogates_are_checked_on_a_stored_history_beside_recorded_checks(tmp_path: Path) -> None:
    messages: list[str] = []
    rows = models.check(tmp_path, ["attention"], [0], ["ehvi"], 14, messages.append)
    assert [row["engine"] for row in rows] == ["ehvi"] and len(messages) == 2
    assert all(np.isfinite(row[name]) for row in rows for name in ("near_z_sd", "random_r2", "memory_near"))
    former = tmp_path / "attention.ehvi-3.14.0.json"
    former.write_text(json.dumps(rows[0] | {"engine": "ehvi-3", "near_z_sd": 3.0}))
    both = models.check(tmp_path, ["attention"], [0], ["ehvi-3", "ehvi"], 14, messages.append)
    assert [row["engine"] for row in both] == ["ehvi-3", "ehvi"] and both[1] == rows[0] and len(messages) == 2
    assert "| `all` | ehvi-3 |" in models.table(both)


def test_a_history_continues_after_a_kill_and_is_as_long_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe, layouts = Problem.observe, list[Layout]()

    def killed(problem: Problem, layout: Layout) -> Observation:
        layouts.append(layout)
        if len(layouts) == 4:
            raise KeyboardInterrupt
        return observe(problem, layout)

    monkeypatch.setattr(Problem, "observe", killed)
    monkeypatch.setattr(models, "_KEPT_EVERY", 2)
    with pytest.raises(KeyboardInterrupt):
        models._history(tmp_path, "attention", 0, 5)
    assert len(models._history(tmp_path, "attention", 0, 2)["layouts"]) == 2
    before = len(layouts)
    assert len(models._history(tmp_path, "attention", 0, 5)["layouts"]) == 5
    assert len(layouts) - before == 2, "three were stored before the kill"


def test_packed_runs_are_compared_with_those_of_a_former_engine(tmp_path: Path) -> None:
    keys = [Key("attention", engine, 1, seed) for seed in (0, 1) for engine in (REFERENCE, "random", "evolution")]
    fill(tmp_path / "runs", keys, 16, 30, 1e9, lambda text: None)
    packed = tmp_path / "runs.jsonl.gz"
    assert pack(tmp_path / "runs", packed, {"random": "ehvi-3", "evolution": "ehvi"}) == 6
    plain, figures = fractions(read(tmp_path / "runs"), (16,)), report(read(packed), (16,), "ehvi")
    gains = [
        plain["attention", "evolution", 1][16][seed] - plain["attention", "random", 1][16][seed] for seed in (0, 1)
    ]
    (row,) = figures["former"]
    assert (row["over"], row["better"], row["n"]) == ("ehvi-3", sum(gain > 0 for gain in gains), 2)
    assert row["mean"] == pytest.approx(np.mean(gains), abs=1e-3) and figures["leads"] == []
    assert f"| gain (95 %) | {row['better']} of 2 better | {row['mean']:.3f} (" in tables(figures, "ehvi")
