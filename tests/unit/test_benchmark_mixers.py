"""What other families of mixers add to convolutions and attention: spaces, losses beside those of chance, ablations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.mixers import BASE, CONFIRMED, Fronts, ablations, campaign, confirm, measuring, report, run, space
from benchmarks.real_study import TABLE
from benchmarks.search.recorded import Recorded, load, write
from nas.core.errors import InvalidInput
from nas.search.spaces import parse_space, space_text

HYBRID = "d512 v8192 ffn=swiglu:1536 [C3 M64 A8/4(canon=4) X8]"


@pytest.mark.parametrize(("name", "kinds"), [("all", 8), ("plain", 2)])
def test_both_spaces_are_valid_and_differ_by_mixers_alone(name: str, kinds: int) -> None:
    base = yaml.safe_load(space_text(str(BASE)))
    content = space(base, name)
    assert len(content["mixers"]) == kinds
    assert {key for key in base if content[key] != base[key]} <= {"name", "mixers", "quality"}
    assert parse_space(yaml.safe_dump(content), name).quality.anchors is None


def sides(plain: Sequence[str], *every: str) -> list[Recorded]:
    """Recorded studies of engines, as those of either side."""
    studies = {study["engine"]: study for study in load(TABLE)}
    named = [("plain", engine) for engine in plain] + [("all", engine) for engine in every]
    return [{**studies[engine], "side": side, "trials": 60} for side, engine in named]


def test_losses_are_of_hypervolume() -> None:
    losses = Fronts(sides(["random", "optuna-nsga2"], "ehvi")).losses(100)
    assert 0.2 < losses["`plain`, to `all`"][0] < 0.5
    assert losses["luck: `plain`, one seed to the other"][0] < 0  # NSGA-II has less than random search
    assert losses["layouts without other families, to all layouts"][0] > 0
    loss, drawn = Fronts(sides(["ehvi"], "ehvi")).losses(20)["`plain`, to `all`"]
    assert loss == 0 and not drawn.any()


def test_luck_is_of_the_seeds_of_a_space_and_of_those_of_both_dealt() -> None:
    pairs = Fronts(sides(["random", "optuna-nsga2"], "ehvi", "cache-evolution")).pairs()
    assert len(pairs) == 6
    first, second = (pairs[f"luck: one seed of each, to the others ({number})"] for number in (1, 2))
    random, other = pairs["luck: `plain`, one seed to the other"]
    assert {*first[0]} > {*random} and {*second[0]} > {*random} and {*first[1]} > {*other}


def test_the_interval_of_a_loss_holds_the_true_one() -> None:
    """Simulated fronts of two sides, of which one is further, with noise in three objectives: in 85 % of them."""
    dice, held, simulations = np.random.default_rng(0), 0, 60

    def study(side: str, points: Sequence[Sequence[float]]) -> Recorded:
        names = ("quality", "latency", "memory")
        rows = [
            {
                "layout": f"d64 v256 ffn=swiglu:64 [C3*{number + 2} A4/{2 if side == 'all' else 1}]",
                "objectives": dict(zip(names, point, strict=True)),
                "noise": dict.fromkeys(names, 0.02),
                "status": "complete",
                "origin": "proposed",
            }
            for number, point in enumerate(points)
        ]
        return {"side": side, "told": rows, "reference_point": dict.fromkeys(names, 0.1)}

    def loss(points: Sequence[Any]) -> tuple[float, Any]:
        studies = [study(side, of_side.tolist()) for side, of_side in zip(("plain", "all"), points, strict=True)]
        return Fronts(studies).losses(60)["`plain`, to `all`"]

    for _ in range(simulations):
        directions = np.abs(dice.normal(size=(2, 12, 3)))
        true = -directions / np.linalg.norm(directions, axis=2, keepdims=True)
        true[1] *= 1.02
        drawn = loss(true + 0.02 * dice.standard_normal(true.shape))[1]
        low, high = np.quantile(drawn, (0.025, 0.975))
        held += low <= loss(true)[0] <= high
    assert held / simulations > 0.8


def test_layouts_count_whose_quality_is_of_fresh_seeds_and_with_the_later_figures_of_the_device() -> None:
    (study,) = sides([], "ehvi")
    layouts = [row["layout"] for row in study["told"] if row["status"] == "complete" and row["origin"] != "reference"]
    assert Fronts([{**study, "fresh": layouts[:3]}]).layouts == layouts[:3]
    again = [
        {**row, "objectives": {"latency": -1.0, "memory": -2.0}, "noise": {"latency": 0.5}}
        for row in study["told"]
        if row["layout"] in layouts[:2]
    ]
    confirmed = {**study, "side": CONFIRMED, "told": again}
    fronts = Fronts([{**study, "fresh": layouts[:3]}, confirmed])
    assert fronts.layouts == layouts[:2]
    names = list(study["reference_point"])
    assert [*fronts._points[0][[names.index("latency"), names.index("memory")]]] == [-1.0, -2.0]
    assert fronts._sd[1][names.index("latency")] == 0.5 and fronts._points[0][names.index("quality")] < 0


def test_devices_are_not_mixed() -> None:
    one, other = sides(["random"], "ehvi")
    with pytest.raises(InvalidInput, match="several devices cannot be compared: amd-1, intel-2"):
        Fronts([{**one, "devices": ["intel-2"]}, {**other, "devices": ["amd-1"]}])


def test_what_is_taken_out_of_a_layout() -> None:
    assert ablations(HYBRID) == {
        "no short convolution in other mixers": "d512 v8192 ffn=swiglu:1536 [C3 M64(conv=0) A8/4 X8]",
        "no linear and state mixers": "d512 v8192 ffn=swiglu:1536 [C3 - A8/4(canon=4) -]",
        "gated short convolutions for linear and state mixers": "d512 v8192 ffn=swiglu:1536 [C3*2 A8/4(canon=4) C3]",
        "no gated short convolutions": "d512 v8192 ffn=swiglu:1536 [- M64 A8/4(canon=4) X8]",
    }
    assert set(ablations("d512 v8192 ffn=swiglu:1536 [C3*2 A8/4]")) == {"no gated short convolutions"}
    assert ablations("d512 v8192 ffn=swiglu:1536 [A8/4*2]") == {}


def test_listed_layouts_are_measured_as_in_the_searches_and_hardly_trained() -> None:
    base = yaml.safe_load(space_text("lfm2-full"))
    layouts = ["d1024 v65536 ffn=swiglu:4608 [C3*8 A16/8]", "d1024 v65536 ffn=swiglu:4608 [-*8 A16/8]"]
    content = parse_space(yaml.safe_dump(measuring(base, layouts)), "measured")
    assert (content.layouts, content.budgets) == (tuple(layouts), ())
    assert [each.name for each in content.objectives] == ["latency", "memory"]
    assert content.workloads == parse_space(yaml.safe_dump(base), "base").workloads


def test_a_folder_has_one_base(tmp_path: Path) -> None:
    base = yaml.safe_load(space_text("lfm2-study"))
    campaign(tmp_path, "all", space(base, "all"))
    campaign(tmp_path, "all", space({**base, "doc": "of a later version"}, "all"))
    assert yaml.safe_load((tmp_path / "all.yaml").read_text())["doc"] == base["doc"]
    with pytest.raises(InvalidInput, match="lfm2-study-all, not lfm2-full-all: name another folder"):
        run(tmp_path, "lfm2-full", [0], 2, tmp_path / "table.json")


def test_the_report_says_how_far_searches_are_that_have_not_ended(tmp_path: Path) -> None:
    going, waiting = sides(["random"], "ehvi")
    nothing: dict[str, Any] = {
        "study": "ehvi-0",
        "side": "all",
        "seed": 0,
        "state": "not begun",
        "told": [],
        "trials": 60,
    }
    studies: list[Recorded] = [{**going, "state": "stopped", "told": going["told"][:32]}, nothing]
    text = report(studies)
    assert "| plain | 0 | stopped | 30 of 60 |" in text and "| all | 0 | not begun | 0 of 60 | 0 | 0.0 |" in text
    assert "No losses" in text
    over_budget = {**waiting, "told": [{**row, "status": "infeasible"} for row in waiting["told"]]}
    assert "No losses" in report([{**going, "state": "complete"}, over_budget])
    write([*studies, waiting], tmp_path / "table.json")
    with pytest.raises(InvalidInput, match="2 of 3 searches have not ended"):
        confirm(tmp_path, 6, 1.0, tmp_path / "table.json")


def test_the_report_has_what_each_ablation_changes() -> None:
    studies = sides(["random"], "ehvi")
    layout = next(layout for layout in Fronts(studies).front() if "M" in layout)
    ablated = ablations(layout)["no linear and state mixers"]
    published = studies[0]["told"][0]["layout"]
    trained = [
        {"layout": text, "seed": seed, "scores": {"lm/code": score + 0.1 * seed, "task/automata": recall}}
        for text, score, recall in ((published, 2.0, 1.0), (layout, 2.2, 1.5), (ablated, 1.8, 0.75))
        for seed in (100, 101)
    ]
    rows = [
        {
            **studies[1]["told"][5],
            "layout": text,
            "objectives": {"latency": at, "memory": 0.0},
            "noise": {"latency": 0.01},
        }
        for text, at in ((layout, 0.0), (ablated, -0.1))
    ]
    measured = {**studies[1], "side": CONFIRMED, "told": rows, "trials": 2}
    text = report([*studies, measured], trained)
    assert f"| `{layout}` | as it is |" in text
    assert "| no linear and state mixers | -0.189 ± 0.000 | -0.750 ± 0.000 | -9.5% ± 2.5% | +0.0% ± 0.0% |" in text
    assert "|  | no gated short convolutions | - | - | - | - |" in text
    assert "| no linear and state mixers | 1 | -0.189" in text and "| no gated short convolutions | 1 |" not in text
    # Of trainings that have not ended there is no row.
    assert f"`{layout}` | as it is" not in report([*studies, measured], trained[:3])
