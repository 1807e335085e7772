"""What other families of mixers add to convolutions and attention: spaces, losses, ablations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import ttest_ind

from benchmarks.mixers import (
    ABLATED,
    BASE,
    Loss,
    ablate,
    ablations,
    campaign,
    deals_as_good,
    fresh,
    front,
    measuring,
    report,
    run,
    space,
    volumes,
)
from benchmarks.real_study import TABLE
from benchmarks.search.recorded import Recorded, load, write
from nas.core.errors import InvalidInput
from nas.core.pareto import hypervolume
from nas.search.spaces import parse_space, space_text

HYBRID = "d512 v8192 ffn=swiglu:1536 [C3 M64 A8/4(canon=4) X8]"


@pytest.mark.parametrize(("name", "kinds"), [("all", 8), ("plain", 2)])
def test_both_spaces_are_valid_and_differ_by_mixers_alone(name: str, kinds: int) -> None:
    base = yaml.safe_load(space_text(str(BASE)))
    content = space(base, name)
    assert len(content["mixers"]) == kinds
    assert {key for key in base if content[key] != base[key]} <= {"name", "mixers", "quality"}
    assert parse_space(yaml.safe_dump(content), name).quality.anchors is None


def searches(plain: Sequence[str], *every: str) -> list[Recorded]:
    """Recorded studies of engines, as searches of either side."""
    studies = {study["engine"]: study for study in load(TABLE)}
    named = [("plain", engine) for engine in plain] + [("all", engine) for engine in every]
    return [
        {**studies[engine], "side": side, "trials": 60, "seed": number % max(len(plain), 1), "state": "complete"}
        for number, (side, engine) in enumerate(named)
    ]


def test_losses_are_of_mean_logarithms_of_hypervolume() -> None:
    sides = volumes(searches(["random", "optuna-nsga2"], "ehvi", "cache-evolution"))
    loss = Loss.of(sides)
    means = {side: math.exp(fmean(map(math.log, found))) for side, found in sides.items()}
    assert loss.value == pytest.approx(1 - means["plain"] / means["all"])
    expected = ttest_ind(np.log(sides["plain"]), np.log(sides["all"])).confidence_interval(0.95)
    assert (loss.low, loss.high) == pytest.approx((-math.expm1(expected.high), -math.expm1(expected.low)))
    assert deals_as_good(sides) in (1 / 6, 2 / 6) and 0.5 < loss.chance < 1
    same = Loss.of(equal := {"plain": [1.0, 2.0], "all": [2.0, 1.0]})
    assert same.value == pytest.approx(0) and same.low < 0 < same.high and deals_as_good(equal) > 0.5


def test_the_corner_can_be_moved() -> None:
    studies = searches(["random"], "ehvi")
    near, usual, far = (volumes(studies, shift) for shift in (-0.01, 0.0, 0.01))
    assert all(near[side][0] < usual[side][0] < far[side][0] for side in usual)
    with pytest.raises(InvalidInput, match="no layout is better than the corner"):
        volumes(studies, -9.0)


def test_the_interval_of_a_loss_holds_the_true_one() -> None:
    """Simulated searches of two spaces, one with layouts that are 2 % farther, with noise in three objectives."""
    dice, corner = np.random.default_rng(0), np.full(3, 0.1)

    def searched(scale: float, noise: float) -> float:
        directions = np.abs(dice.normal(size=(12, 3)))
        depth = 1 - 0.3 * dice.random((12, 1)) ** 2
        true = -scale * depth * directions / np.linalg.norm(directions, axis=1, keepdims=True)
        return hypervolume(true + noise * dice.standard_normal(true.shape), corner)

    def sides(count: int, noise: float) -> dict[str, list[float]]:
        scales = {"plain": 1.0, "all": 1.02}
        return {side: [searched(scale, noise) for _ in range(count)] for side, scale in scales.items()}

    true = Loss.of(sides(1000, 0.0)).value
    losses = [Loss.of(sides(4, 0.02)) for _ in range(200)]
    assert 0.01 < true < 0.1
    assert 0.9 <= fmean(loss.low <= true <= loss.high for loss in losses) <= 0.99


def test_layouts_count_whose_quality_is_of_fresh_seeds() -> None:
    (study,) = searches([], "ehvi")
    layouts = [row["layout"] for row in study["told"] if row["status"] == "complete" and row["origin"] != "reference"]
    assert [row["layout"] for row in fresh({**study, "fresh": layouts[:3]})] == layouts[:3]
    assert set(front([{**study, "fresh": layouts[:3]}])) <= {*layouts[:3]}
    assert len(fresh(study)) == len(layouts) and front([{**study, "fresh": []}]) == []


def test_devices_are_not_mixed() -> None:
    one, other = searches(["random"], "ehvi")
    with pytest.raises(InvalidInput, match="several devices cannot be compared: amd-1, intel-2"):
        volumes([{**one, "devices": ["intel-2"]}, {**other, "devices": ["amd-1"]}])


def test_what_is_taken_out_of_a_layout() -> None:
    assert ablations(HYBRID) == {
        "no short convolution in other mixers": "d512 v8192 ffn=swiglu:1536 [C3 M64(conv=0) A8/4 X8]",
        "no linear and state mixers": "d512 v8192 ffn=swiglu:1536 [C3 - A8/4(canon=4) -]",
        "gated short convolutions for linear and state mixers": "d512 v8192 ffn=swiglu:1536 [C3*2 A8/4(canon=4) C3]",
        "no gated short convolutions": "d512 v8192 ffn=swiglu:1536 [- M64 A8/4(canon=4) X8]",
    }
    attention = "grouped-query attention for windows and latents"
    assert ablations("d512 v8192 ffn=swiglu:1536 [W8/2@512(sink=1) L8/64 A8/4]") == {
        attention: "d512 v8192 ffn=swiglu:1536 [A8/2*2 A8/4]"
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
    going, waiting = searches(["random"], "ehvi")
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
    assert "No losses" in report([going, waiting])  # of one seed
    write([*studies, waiting], tmp_path / "table.json")
    with pytest.raises(InvalidInput, match="2 of 3 searches have not ended"):
        ablate(tmp_path, 6, 1.0, tmp_path / "table.json")
    write([{**waiting, "fresh": []}], tmp_path / "table.json")
    with pytest.raises(InvalidInput, match="nothing to ablate"):
        ablate(tmp_path, 6, 1.0, tmp_path / "table.json")


def test_the_report_has_what_each_ablation_changes() -> None:
    studies = searches(["random", "optuna-nsga2"], "ehvi", "cache-evolution")
    layout = next(layout for layout in front(studies) if "M" in layout)
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
    measured = {**studies[1], "side": ABLATED, "told": rows, "trials": 2, "whole": [layout]}
    text = report([*studies, measured], trained)
    assert f"| `{layout}` | as it is |" in text
    assert "| no linear and state mixers | -0.189 ± 0.000 | -0.750 ± 0.000 | -9.5% ± 2.5% | +0.0% ± 0.0% |" in text
    assert "|  | no gated short convolutions | - | - | - | - |" in text
    assert "| no linear and state mixers | 1 | -0.189" in text and "| no gated short convolutions | 1 |" not in text
    # Of trainings that have not ended there is no row.
    assert f"`{layout}` | as it is" not in report([*studies, measured], trained[:3])
