"""What other families of mixers add to convolutions and attention: spaces, losses, ablations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from scipy.stats import ttest_ind, ttest_rel
from store_support import open_store
from study_support import TINY, Bed, tiny_space

from benchmarks.mixers import (
    AGAIN,
    BASE,
    Loss,
    Volume,
    ablations,
    again,
    campaign,
    collected,
    fresh,
    front,
    measured_again,
    measuring,
    pairs,
    report,
    run,
    searched,
    space,
    terms_of,
    volumes,
)
from benchmarks.real_study import TABLE
from benchmarks.search.recorded import Recorded, load, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.terms import Terms
from nas.core.clock import SystemClock
from nas.core.errors import InvalidInput
from nas.core.pareto import hypervolume
from nas.core.stats import t_critical
from nas.search.analysis.report import study_report
from nas.search.spaces import parse_space, space_text
from nas.testing.fake_runtime import FakeRuntime

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
    inside = volumes(searches(["random", "optuna-nsga2"], "ehvi", "cache-evolution"))
    loss = Loss.of(inside)
    plain, every = ([math.log(search.value) for search in inside if search.side == side] for side in ("plain", "all"))
    assert loss.value == pytest.approx(1 - math.exp(fmean(plain) - fmean(every)))
    expected = ttest_ind(plain, every).confidence_interval(0.95)
    assert (loss.low, loss.high) == pytest.approx((-math.expm1(expected.high), -math.expm1(expected.low)))
    assert loss.deals in (1 / 6, 2 / 6) and 0.5 < loss.chance < 1
    same = Loss.of(batch(plain=[1.0, 2.0], every=[2.0, 1.0]))
    assert same.value == pytest.approx(0) and same.low < 0 < same.high and same.deals > 0.5


def batch(plain: Sequence[float], every: Sequence[float], name: str = "") -> list[Volume]:
    return [Volume(name, side, value) for side, values in (("plain", plain), ("all", every)) for value in values]


def test_searches_are_compared_within_batches() -> None:
    """As least squares with a column for each batch and one for the plain side, and as the t-test of pairs."""
    inside = [*batch([1.0, 1.2], [1.1], "a"), *batch([2.0], [2.6, 2.1, 2.3], "b"), *batch([], [9.0, 8.0], "c")]
    rows = [[*(search.batch == name for name in "abc"), search.side == "plain"] for search in inside]
    columns = np.array(rows, float)
    logs = np.log([search.value for search in inside])
    (*_, expected), (squares,), rank, _ = np.linalg.lstsq(columns, logs)
    variance = squares / (len(inside) - rank) * np.linalg.inv(columns.T @ columns)[3, 3]
    loss = Loss.of(inside)
    assert loss.value == pytest.approx(1 - math.exp(expected))
    half = t_critical(0.95, len(inside) - rank) * math.sqrt(variance)
    assert (loss.low, loss.high) == pytest.approx((1 - math.exp(expected + half), 1 - math.exp(expected - half)))
    assert loss.deals * 3 * 4 == pytest.approx(round(loss.deals * 3 * 4))

    values = [(1.0, 1.1), (2.0, 2.6), (0.5, 0.6)]
    paired = [search for plain, every in values for search in batch([plain], [every], f"{plain}")]
    interval = ttest_rel(*np.log(values).T).confidence_interval(0.95)
    loss = Loss.of(paired)
    assert (loss.low, loss.high) == pytest.approx((1 - math.exp(interval.high), 1 - math.exp(interval.low)))
    assert loss.deals == 1 / 8
    for few in ([], batch([1.0], [1.1]), [*batch([1.0, 2.0], [], "a"), *batch([], [1.0, 2.0], "b")]):
        with pytest.raises(InvalidInput, match="it takes two searches of each space in one batch"):
            Loss.of(few)


@pytest.mark.parametrize(("true", "deviation"), [(0.05, 0.015), (0.05, 0.05), (0.0, 0.01)])
def test_what_searches_can_decide_is_so_in_simulated_ones(true: float, deviation: float) -> None:
    dice, count = np.random.default_rng(2), 1000
    logs = deviation * dice.standard_normal((count, 2, 4))
    logs[:, 0] += math.log1p(-true)
    studies = [batch(np.exp(plain).tolist(), np.exp(every).tolist()) for plain, every in logs]
    losses = list(map(Loss.of, studies))
    error = deviation * math.sqrt(2 / 4)
    something, nothing = losses[0]._replace(error=error).decided(true)
    assert something == pytest.approx(fmean(loss.chance >= 0.95 for loss in losses), abs=0.03)
    assert nothing == pytest.approx(fmean(loss.chance <= 0.05 for loss in losses), abs=0.03)


def test_the_corner_can_be_moved() -> None:
    studies = searches(["random"], "ehvi")
    near, usual, far = (volumes(studies, shift) for shift in (-0.01, 0.0, 0.01))
    assert near[0].value < usual[0].value < far[0].value
    with pytest.raises(InvalidInput, match="no layout is better than the corner"):
        volumes(studies, -9.0)


Layouts = NDArray[np.float64]


def layouts_of(dice: np.random.Generator, scale: float, noise: float = 0.0) -> Layouts:
    """[12, 3] coordinates of a simulated search of a space whose layouts reach as far as `scale`."""
    directions = np.abs(dice.normal(size=(12, 3)))
    depth = 1 - 0.3 * dice.random((12, 1)) ** 2
    true = -scale * depth * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    return np.asarray(true + noise * dice.standard_normal(true.shape))


def volume_of(*searches: Layouts) -> float:
    return hypervolume(np.concatenate(searches), np.full(3, 0.1))


def loss_of(plain: Sequence[Layouts], every: Sequence[Layouts]) -> Loss:
    return Loss.of(batch([*map(volume_of, plain)], [*map(volume_of, every)]))


def loss_of_pairs(plain: Sequence[Layouts], every: Sequence[Layouts]) -> Loss:
    together = [[volume_of(one, other) for other in (*plain, *every)] for one in (*plain, *every)]
    return Loss.of_pairs(np.array(together), len(plain))


def test_the_intervals_of_losses_hold_the_true_ones() -> None:
    """Four simulated searches of each of two spaces, one with layouts that are 2 % farther, with noise in figures."""
    dice, scales, count = np.random.default_rng(0), (1.0, 1.02), 1000
    alone = [fmean(math.log(volume_of(layouts_of(dice, scale))) for _ in range(count)) for scale in scales]
    paired = [
        fmean(math.log(volume_of(layouts_of(dice, 1.0), layouts_of(dice, scale))) for _ in range(count))
        for scale in scales
    ]
    studies = [[[layouts_of(dice, scale, 0.02) for _ in range(4)] for scale in scales] for _ in range(200)]
    losses = [loss_of(*study) for study in studies], [loss_of_pairs(*study) for study in studies[:60]]
    for (plain, every), of_studies in zip((alone, paired), losses, strict=True):
        true = 1 - math.exp(plain - every)
        assert 0.01 < true < 0.1
        assert fmean(loss.low <= true <= loss.high for loss in of_studies) >= 0.9
        assert fmean(loss.value for loss in of_studies) == pytest.approx(true, abs=0.01)
    assert fmean(loss.low <= 1 - math.exp(alone[0] - alone[1]) <= loss.high for loss in losses[0]) <= 0.99


def test_what_a_second_search_adds_is_of_pairs() -> None:
    dice = np.random.default_rng(1)
    plain, every = ([layouts_of(dice, scale) for _ in range(3)] for scale in (1.0, 1.5))
    loss = loss_of_pairs(plain, every)
    within = [volume_of(plain[one], plain[other]) for one, other in ((0, 1), (0, 2), (1, 2))]
    across = [volume_of(one, other) for one in plain for other in every]
    assert loss.value == pytest.approx(1 - math.exp(fmean(map(math.log, within)) - fmean(map(math.log, across))))
    assert loss.deals == 1 / 20 and loss.chance > 0.99
    # A search of the larger space that repeats a plain one adds less than another plain search.
    assert loss_of_pairs(plain, plain).value < 0
    with pytest.raises(InvalidInput, match="fewer than 3 searches"):
        loss_of_pairs(plain, every[:2])
    # One search without a layout inside of the corner has no logarithm; with another it has.
    nothing = np.ones((1, 3))
    assert 0 < loss_of_pairs([nothing, *plain[1:]], every).value < 1
    with pytest.raises(InvalidInput, match="two searches have no layout"):
        loss_of_pairs([nothing, nothing, plain[0]], every)


def test_layouts_count_whose_quality_is_of_fresh_seeds() -> None:
    (study,) = searches([], "ehvi")
    layouts = [row["layout"] for row in study["told"] if row["status"] == "complete" and row["origin"] != "reference"]
    assert [row["layout"] for row in fresh({**study, "fresh": layouts[:3]})] == layouts[:3]
    assert set(front([{**study, "fresh": layouts[:3]}])) == {*layouts[1:3]}
    assert len(fresh(study)) == len(layouts) and front([{**study, "fresh": []}]) == []


def test_no_two_searches_have_one_seed_and_spaces_take_turns() -> None:
    searches_to_run = terms_of([0, 1, 2], 40)
    assert [terms.side for terms in searches_to_run] == ["all", "plain", "plain", "all", "all", "plain"]
    assert len({terms.seed for terms in searches_to_run}) == len(searches_to_run)


def test_hypervolume_over_trials_is_of_the_quality_that_the_search_knew() -> None:
    (study,) = searches(["random"])
    complete = [row for row in study["told"] if row["origin"] != "reference" and row["status"] == "complete"]
    search = {**study, "fresh": [], "searched": {row["layout"]: row["objectives"]["quality"] - 1 for row in complete}}
    rows = searched(search, 60)
    assert [row["layout"] for row in rows] == [row["layout"] for row in complete]
    assert rows[0]["objectives"]["quality"] == complete[0]["objectives"]["quality"] - 1
    assert rows[0]["objectives"]["latency"] == complete[0]["objectives"]["latency"]
    half = searched(search, 30)
    assert 0 < len(half) < len(rows) and half == rows[: len(half)]
    after = [volumes([search], trials=count)[0].value for count in (30, 60)]
    assert 0 < after[0] <= after[1]


def test_studies_are_collected_with_what_the_report_needs(tmp_path: Path) -> None:
    """A search by `ehvi` on simulated devices, whose front is trained again on fresh seeds."""
    quality = {**TINY["quality"], "rescore": {"seeds": [100, 101], "p_front": 0.2}}
    content = tiny_space(quality=quality, search={**TINY["search"], "proposer": "ehvi"})
    bed = Bed(open_store(tmp_path, SystemClock()), tmp_path, content, FakeRuntime(tmp_path / "fake"))  # type: ignore[arg-type]
    bed.run(12)
    whole = study_report(bed.store, "study")
    source: Any = SimpleNamespace(report=lambda terms: whole | {"study": "study"}, store=lambda: nullcontext(bed.store))
    terms: Any = SimpleNamespace(study="study", side="all", seed=0, trials=12)
    (study,) = collected({"all": source}, [terms])
    assert study["references"].keys() == {"published", "attention"}
    assert study["references"]["published"]["quality"] == pytest.approx(1)
    assert study["references"]["published"]["latency"] > 0 and study["devices"]
    assert 0 < study["modelled"] < 12
    assert study["fresh"] == sorted(row["layout"] for row in whole["ranking"] if row["rescored"])
    complete = [row["layout"] for row in study["told"] if row["status"] == "complete"]
    assert study["searched"].keys() >= {*complete}
    source.report = lambda terms: None
    assert collected({"all": source}, [Terms("ehvi", 3, 12, "all")])[0]["state"] == "not begun"


def test_the_quality_that_a_search_knew_is_the_only_one_without_fresh_seeds(tmp_path: Path) -> None:
    bed = Bed(open_store(tmp_path, SystemClock()), tmp_path, tiny_space(), FakeRuntime(tmp_path / "fake"))
    bed.run(6)
    whole = study_report(bed.store, "study")
    source: Any = SimpleNamespace(report=lambda terms: whole, store=lambda: nullcontext(bed.store))
    (study,) = collected({"all": source}, [SimpleNamespace(study="study", side="all", seed=0, trials=6)])  # type: ignore[list-item]
    rows = [row for row in study["told"] if row["status"] == "complete" and row["origin"] != "reference"]
    assert rows and study["fresh"] == []
    for row in rows:
        assert study["searched"][row["layout"]] == pytest.approx(row["objectives"]["quality"])


def test_a_second_measurement_takes_the_place_of_the_first() -> None:
    (study,) = searches([], "ehvi")
    rows = fresh(study)
    slower = [{**row, "objectives": {"latency": row["objectives"]["latency"] + 0.1}} for row in rows[:5]]
    device = {"devices": ["box"], "references": {"published": {"latency": 10.0}}}
    (second,) = measured_again([study], {**study, **device, "told": slower})
    assert {key: second[key] for key in device} == device
    assert [row["layout"] for row in fresh(second)] == [row["layout"] for row in rows[:5]]
    for before, after in zip(rows, fresh(second), strict=False):
        assert after["objectives"] == {**before["objectives"], "latency": before["objectives"]["latency"] + 0.1}


def test_searches_of_a_database_are_a_batch() -> None:
    one, other = searches(["random"], "ehvi")
    of_two = [{**one, "devices": ["intel-2"]}, {**other, "devices": ["amd-1"]}]
    assert len({search.batch for search in volumes(of_two)}) == 2
    with pytest.raises(InvalidInput, match="several batches"):
        pairs(of_two)
    of_two = [{**study, "devices": ["amd-1"], "references": {"published": {"latency": 10.0}}} for study in of_two]
    assert len({search.batch for search in volumes(of_two)}) == 1
    drifted = {**of_two[0], "references": {"published": {"latency": 10.2}}}
    assert len({search.batch for search in volumes([*of_two, drifted])}) == 2


def test_complete_searches_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine: of four searches two are recorded as complete, one of them with other trials."""
    launched: list[str] = []
    monkeypatch.setattr(Campaign, "run", lambda self, terms: launched.extend(search.study for search in terms))
    before = [
        {**study, "study": f"{study['side']}-ehvi-{seed}", "seed": seed, "trials": trials}
        for study, seed, trials in zip(searches(["random"], "ehvi"), (1000, 0), (4, 2), strict=True)
    ]
    second = {**before[0], "side": AGAIN, "study": "again-ehvi-0"}
    write([*before, second], tmp_path / "table.json")
    run(tmp_path / "studies", str(BASE), [0, 1], 4, tmp_path / "table.json")
    assert launched == ["all-ehvi-0", "plain-ehvi-1001", "all-ehvi-1"]
    after = load(tmp_path / "table.json")
    assert [study["study"] for study in after] == ["all-ehvi-0", "plain-ehvi-1000", *launched[1:], "again-ehvi-0"]
    assert [study["state"] for study in after] == ["not begun", "complete", "not begun", "not begun", "complete"]


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
    assert [objective.name for objective in content.objectives] == ["latency", "memory"]
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
    assert "| plain | 0 | - | stopped | 30 of 60 |" in text
    assert "| all | 0 | - | not begun | 0 of 60 | - | 0 | - | - | - | 0.0 |" in text
    assert "No losses" in text
    assert "No losses" in report([going, waiting])  # of one seed
    write([*studies, waiting], tmp_path / "table.json")
    with pytest.raises(InvalidInput, match="2 of 3 searches have not ended"):
        again(tmp_path, 6, 1.0, tmp_path / "table.json")
    write([{**waiting, "fresh": []}], tmp_path / "table.json")
    with pytest.raises(InvalidInput, match="nothing to measure again"):
        again(tmp_path, 6, 1.0, tmp_path / "table.json")


def test_the_report_says_what_is_estimated_how_and_from_what() -> None:
    figures = {"published": {"latency": 10.0}, "attention": {"latency": 12.5}}
    studies: list[Recorded] = [
        {**study, "modelled": 40 + number, "references": figures, "devices": ["intel-2"]}
        for number, study in enumerate(searches(["random"] * 3, "ehvi", "ehvi", "ehvi"))
    ]
    studies = [
        {**study, "searched": {row["layout"]: row["objectives"].get("quality", 0.0) for row in study["told"]}}
        for study in studies
    ]
    text = report(studies)
    assert text.startswith("Estimated: what share of its hypervolume V a search of 60 trials by ehvi loses")
    assert "are conv and gqa alone" in text and "(batches: 1)" in text
    assert "Answer, by the first row: the other mixers add something." in text  # equal searches have no variance
    assert "| fresh seeds, corner: reference point | " in text and "first 30 trials | " in text
    assert "| fresh seeds, two searches together | " in text
    assert "| plain | 0 | 1 | complete | 60 of 60 | 40 |" in text and "V after 30 | V after 60 | V, fresh seeds" in text
    assert "-" not in [cell.strip() for cell in text.split("| plain | 0 | ")[1].splitlines()[0].split("|")]
    drifted = {**studies[0], "references": {**figures, "published": {"latency": 10.2}}}
    text = report([drifted, *studies[1:]])
    assert "(batches: 2)" in text and "| plain | 1 | 2 | complete |" in text
    assert "two searches together | searches of several batches |" in text
    # A search without a layout inside of a corner leaves the other rows.
    first = {**studies[0], "fresh": []}
    text = report([first, *studies[1:]])
    assert "Answer, by the first row: undecided" in text and "no layout is better than the corner" in text
    assert re.search(r"first 60 trials \| \d+\.\d% \(", text) and re.search(
        r"two searches together \| \d+\.\d% \(", text
    )


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
    measured = {**studies[1], "side": AGAIN, "told": rows, "trials": 2, "whole": [layout]}
    text = report([*studies, measured], trained)
    assert "| fresh seeds, measured again | " in text and "measured again" not in report(studies)
    assert f"| `{layout}` | as it is |" in text
    assert "| no linear and state mixers | -0.189 ± 0.000 | -0.750 ± 0.000 | -9.5% ± 2.5% | +0.0% ± 0.0% |" in text
    assert "|  | no gated short convolutions | - | - | - | - |" in text
    assert "| no linear and state mixers | 1 | -0.189" in text and "| no gated short convolutions | 1 |" not in text
    # Of trainings that have not ended there is no row.
    assert f"`{layout}` | as it is" not in report([*studies, measured], trained[:3])
