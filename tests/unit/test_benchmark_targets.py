"""The study of targets: its layouts are comparable, and its losses are what arithmetic says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.targets import figures, layouts, models, quality, table
from benchmarks.targets.measuring import Target, read_rows
from nas.measure.runtimes import RUNTIMES
from nas.train.compare.published import REFERENCES

TARGETS = [Target("a 1", "local", "llama.cpp", 1), Target("b 1", "local", "executorch", 1)]


def test_layouts_differ_in_kinds_and_order_alone() -> None:
    drawn = layouts.draw(64)
    assert len({layout.id for layout in drawn}) == 64
    assert drawn[0].id == layouts.sized(layouts.LFM2, [False] * len(layouts.LFM2)).id
    sizes = [layout.params.total for layout in drawn]
    assert max(sizes) / min(sizes) < 1.045
    kinds = {block.kind for layout in drawn for layer in layout.layers for block in layer.blocks}
    assert kinds == {*layouts.MIXERS, "swiglu", "moe"}
    for runtime in ("llama.cpp", "executorch"):
        assert all(RUNTIMES[runtime].supports(layout) for layout in drawn)
    assert [layout.id for layout in layouts.draw(5)] == [layout.id for layout in drawn[:5]]


def study(logs: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> table.Table:
    """A table of such times to the first token."""
    rounds, count, _ = logs.shape
    rows = [
        {
            "layout": layout, "target": target.name, "round": number,
            "ttft": float(np.exp(logs[number, layout, place])), "decode_p50": 0.1, "peak_rss": 50.0,
            "foreign_cpu": 0.0, "drift": 0.0, "seconds": 1.0,
        }
        for number in range(rounds) for layout in range(count) for place, target in enumerate(TARGETS)
    ]  # fmt: skip
    return table.Table({"cpu": "x", "cores": 2}, layouts.draw(count), TARGETS, rows, [[]] * count)


def test_losses_and_compromise() -> None:
    # Layout 1 is best on the first target and 50 % slower on the second; layout 2 the reverse; layout 3 is 10 % off.
    means = np.log(np.array([[2.0, 2.0], [1.0, 1.5], [1.5, 1.0], [1.1, 1.1]]))
    noise = 0.01 * np.random.default_rng(0).standard_normal((3, 4, 2))
    times = study(means + noise - noise.mean(axis=0)).times("ttft")
    choice = figures.choose(times, range(4))
    assert choice.best == [1, 2]
    loss = choice.losses[0][1]
    assert loss.value == pytest.approx(0.5)
    assert loss.low < 0.5 < loss.high < 0.53
    assert choice.compromise == {"worst": 3, "geomean": 3}
    assert [loss.value for loss in choice.compromise_losses["worst"]] == pytest.approx([0.1, 0.1])
    assert [loss.value for loss in choice.published] == pytest.approx([1.0, 1.0])
    assert figures.choose(times, [0, 1, 2]).compromise["worst"] in (1, 2)


def test_costs_of_kinds_are_found_again() -> None:
    drawn = layouts.draw(40)
    prices = {"conv": 1.0, "gqa": 2.0, "swa": -0.5, "mamba2": 4.0, "mlstm": 3.0, "gdn": 5.0, "moe": -0.25}
    times = [
        60 + sum(
            prices.get(block.kind, 0.0) * (block.spec.count(block, 512).total / 1e6 if block.kind == "moe" else 1)
            for layer in layout.layers for block in layer.blocks
        )
        for layout in drawn
    ]  # fmt: skip
    logs = np.log(np.array(times))[:, None] + np.zeros((1, 2))
    measured = table.Times(drawn, list(range(40)), logs, np.ones((40, 2)), [np.array([-1e-4, 1e-4])] * 2)
    costs = figures.kind_costs(measured)
    mean = float(np.exp(np.mean(np.log(times))))
    assert costs.costs[:, 0] * mean == pytest.approx([prices[kind] for kind in figures.KINDS], abs=0.02)
    assert costs.off.max() < 1e-3
    assert costs.flips() == []
    gqa, conv = figures.KINDS.index("gqa"), figures.KINDS.index("conv")
    assert costs.dearer[gqa, conv].min() == 1.0


def test_costs_of_kinds_differ_between_tables_as_their_intervals_say() -> None:
    rng, drawn, tables = np.random.default_rng(0), layouts.draw(64), 20
    logs = np.log(60) + 0.1 * rng.standard_normal((64, tables))
    noise = [0.1 * rng.standard_normal(200)] * tables
    costs = figures.kind_costs(table.Times(drawn, list(range(64)), logs, np.ones((64, tables)), noise))
    stated = (costs.high - costs.low).mean(axis=1) / 2 / 1.96
    assert (stated / costs.costs.std(axis=1)).mean() == pytest.approx(1, abs=0.2)


def test_flips_by_chance_are_counted() -> None:
    rng, shape, flips = np.random.default_rng(0), (6, 7), []
    costs = figures.KindCosts(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros((6, 6, 7)), np.zeros(7))
    for _ in range(600):
        flips.append(len(replace(costs, dearer=rng.random((6, 6, 7))).flips()))
    assert np.mean(flips) == pytest.approx(costs.flips_by_chance(), abs=0.1)
    assert costs.flips_by_chance() == pytest.approx(0.35, abs=0.01)


def test_the_best_of_many_equal_layouts_seems_faster_than_it_is() -> None:
    rng = np.random.default_rng(0)
    pools = [0.05 * rng.standard_normal(400), np.zeros(400)]
    equal = table.Times(layouts.draw(20), list(range(20)), np.zeros((20, 2)), np.ones((20, 2)), pools)
    # The expected least of 20 normal values is 1.87 deviations below their mean.
    assert figures.choose(equal, range(20)).flattery == pytest.approx([np.expm1(1.87 * 0.05), 0.0], abs=0.01)


def test_one_round_has_the_noise_that_two_equal_targets_show() -> None:
    rng = np.random.default_rng(0)
    true = rng.standard_normal((1, 60, 1))
    measured = study(true + 0.02 * rng.standard_normal((1, 60, 2)))
    twins = [TARGETS[0], replace(TARGETS[1], repeats=TARGETS[0].name)]
    times = replace(measured, targets=twins).times("ttft")
    assert times.noise == pytest.approx([0.02, 0.02], rel=0.25)
    with pytest.raises(AssertionError, match="measured twice"):
        measured.times("ttft")
    half = replace(measured, targets=twins, rows=measured.rows[:-1])
    assert half.times("ttft").places == list(range(59)), "what lacks a target is left out"
    unknown = replace(half, rows=[*half.rows, measured.rows[-1] | {"ttft": None, "decode_p50": None}])
    assert unknown.times("ttft").places == unknown.times("latency").places == list(range(59)), "and an unknown figure"


def test_a_cut_off_line_is_left_out_and_nothing_is_written_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    file.write_text('{"layout": 0}\n{"layout": 1}\n{"lay')
    assert read_rows(tmp_path) == [{"layout": 0}, {"layout": 1}]
    assert file.read_text().endswith("}\n")


def test_quality_is_the_mean_over_domains_without_their_parts(tmp_path: Path) -> None:
    first, second = layouts.draw(2)
    scores = {"lm/code": 1.0, "lm/code.recall": 9.0, "lm/prose": 3.0}
    rows = [{"key": f"{seed}", "layout": first.format(), "seed": seed, "scores": scores} for seed in (1, 0)]
    file = tmp_path / "trained.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert quality.scores([first, second], file) == [[2.0, 2.0], []]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json.gz"
    written = study(np.zeros((2, 3, 2)))
    (tmp_path / "targets.json").write_text(table.json.dumps([vars(target) for target in TARGETS]))
    lines = [table.json.dumps(row) for row in written.rows]
    (tmp_path / "measurements.jsonl").write_text("".join(f"{line}\n" for line in lines[:-1]))
    collected = table.collect(tmp_path, written.layouts, written.machine, path)
    assert table.load(path) == collected


def test_published_shapes_are_layouts_of_as_many_weights() -> None:
    for name, layout in models.report_layouts().items():
        assert layout.params.total == pytest.approx(REFERENCES[name].parameters, rel=1e-3), name
