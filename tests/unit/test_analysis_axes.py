"""What a study's panels can be drawn over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from live_lab import LiveLab, figures
from study_support import CHAT, TINY, snapshot, tiny_space

from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.scoring import MeasurementKey
from nas.core.space import SearchSpace
from nas.infra.store import trials
from nas.infra.store.rows import NewTrial
from nas.search.analysis.axes import AxisView, axis_views, measured_figures
from nas.search.analysis.snapshot import TENTHS
from nas.serve.views.study import kind_views, page_state, share_views

TWO: dict[str, Any] = {
    "runtimes": [{"name": "fake", "quantisation": "q4_0"}, {"name": "other", "quantisation": "q4_0"}]
}


def axes(space: SearchSpace, latency: float = 1.0, memory: float = 1.0) -> dict[str, AxisView]:
    places = [MeasurementKey(device, runtime.name, "chat") for device in space.devices for runtime in space.runtimes]
    published = dict.fromkeys(places, figures(latency, memory))
    return {axis.key: axis for axis in axis_views(space, published, None)}


def test_a_figure_that_is_an_objective_is_told_once() -> None:
    views = axes(tiny_space())
    assert list(views) == [
        "quality", "latency", "memory", "decode_p50.chat@local.fake", "params_total", "params_active", "kv_bytes"
    ]  # fmt: skip
    assert (views["quality"].target, views["memory"].target) == (None, "local/fake")
    assert [axis.objective for axis in views.values()] == [True] * 3 + [False] * 4


def test_over_several_places_an_objective_is_a_ratio_and_every_place_has_its_own_axis() -> None:
    views = axes(tiny_space(**TWO), memory=3.0)
    memory = views["memory"]
    assert (memory.unit, memory.target, memory.direction) == ("x", None, "min")
    assert memory.budget == pytest.approx(2.0), "twice the published reference's figure, wherever"
    peak_rss = views["peak_rss.chat@local.other"]
    assert (peak_rss.unit, peak_rss.target, peak_rss.workload, peak_rss.budget) == ("MB", "local/other", "chat", 6.0)


def test_no_line_tells_budgets_that_differ_from_place_to_place() -> None:
    budgets = [{"metric": "peak_rss", "max": "2x", "runtime": "fake", **CHAT}]
    views = axes(tiny_space(**TWO, budgets=budgets))
    assert views["memory"].budget is None
    assert views["peak_rss.chat@local.fake"].budget == 2.0 and views["peak_rss.chat@local.other"].budget is None


def test_a_limit_relative_to_figures_that_are_not_taken_yet_is_not_known() -> None:
    (memory,) = [axis for axis in axis_views(tiny_space(), None, None) if axis.key == "memory"]
    assert memory.budget is None


def test_an_objective_may_have_the_name_of_a_size() -> None:
    objectives = [TINY["objectives"][0], {"name": "params_total", "metric": "latency", **CHAT}]
    keys = [axis.key for axis in axis_views(tiny_space(objectives=objectives), None, None)]
    assert len(set(keys)) == len(keys)


def test_keys_are_safe_in_addresses_and_differ() -> None:
    space = tiny_space(devices=["tag:a b", "tag:a,b", "é<script>"])
    views = axis_views(space, None, None)
    keys = [axis.key for axis in views]
    assert len(set(keys)) == len(keys) == 3 + len(measured_figures(space)) + 3
    assert all(re.fullmatch(r"[A-Za-z0-9._@-]+", key) for key in keys)


def test_what_needs_no_workload_has_none() -> None:
    axis = axes(tiny_space(budgets=[{"metric": "file_size", "max": "3MB"}]))["file_size@local.fake"]
    assert (axis.workload, axis.target, axis.budget) == (None, "local/fake", 3.0)


def test_a_budget_on_quality_is_a_line_on_its_axis() -> None:
    assert axes(tiny_space(budgets=[{"metric": "quality", "min": "0.9x"}]))["quality"].budget == 0.9
    assert axes(tiny_space(budgets=[{"metric": "quality.recall", "min": "0.9x"}]))["quality"].budget is None


def test_limits_on_parameters_are_budgets() -> None:
    model = tiny_space().model.model_dump(mode="json") | {"params": {"total": {"max": "1M"}}}
    views = axes(tiny_space(model=model))
    assert (views["params_total"].budget, views["params_active"].budget) == (1e6, None)


def state(query: dict[str, str], **changes: Any) -> Any:
    return page_state([*axes(tiny_space(**changes)).values()], query)


def test_a_new_visitor_sees_the_objectives() -> None:
    assert [(panel.x, panel.y) for panel in state({}).panels] == [
        ("latency", "quality"), ("memory", "quality"), ("latency", "memory")
    ]  # fmt: skip
    two = [objective.model_dump() for objective in tiny_space().objectives[:2]]
    assert [(panel.x, panel.y) for panel in state({}, objectives=two).panels] == [
        ("latency", "quality"), ("params_total", "quality"), ("kv_bytes", "quality")
    ]  # fmt: skip


def test_an_address_says_what_the_page_shows() -> None:
    query = {"x1": "kv_bytes", "y3": "quality", "log": "latency,kv_bytes", "infeasible": "1", "pick": "latency:-1:2e3"}
    page = state(query)
    assert (page.panels[0].x, page.panels[0].y, page.panels[2].y) == ("kv_bytes", "quality", "quality")
    assert page.log == ["latency", "kv_bytes"] and page.infeasible
    assert [tuple(dict(pick).values()) for pick in page.pick] == [("latency", -1.0, 2000.0)]


def test_the_address_chooses_device_and_runtime() -> None:
    views = [*axes(tiny_space(**TWO)).values()]
    assert page_state(views, {"place": "local/other"}).target == "local/other"
    assert page_state(views, {}).target is None


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"x1": "latencies"}, UnknownName),
        ({"log": "quality,nothing"}, UnknownName),
        ({"place": "elsewhere/fake"}, UnknownName),
        ({"infeasible": "yes"}, InvalidInput),
        ({"pick": "quality"}, InvalidInput),
        ({"pick": "quality:2:1"}, InvalidInput),
        ({"pick": "quality:nan:1"}, InvalidInput),
        ({"pick": "quality:0:inf"}, InvalidInput),
        ({"pick": "quality:0:1:2"}, InvalidInput),
    ],
)
def test_what_an_address_cannot_say_is_refused(query: dict[str, str], error: type[InvalidInput]) -> None:
    with pytest.raises(error):
        state(query)


def test_shares_of_the_depth_are_exact_and_whole(tmp_path: Path) -> None:
    lab = LiveLab(tmp_path)
    study = lab.study()
    texts = ("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]", "d128 v256 ffn=swiglu:320 [A2/1*2]")
    for text, origin in zip(texts, ("proposal", "seed"), strict=True):
        layout = Layout.parse(text)
        trials.propose(lab.store, study, [NewTrial(layout.to_json(), layout.id, origin=origin)])
    views = {(view.role, view.kind): view for view in share_views(snapshot(lab.store))}
    for role in ("mixer", "ffn"):
        assert [sum(row.all[tenth] for (part, _), row in views.items() if part == role) for tenth in range(TENTHS)] == (
            pytest.approx([1.0] * TENTHS, abs=1e-3)
        )
    assert list(views) == [("mixer", "conv"), ("mixer", "gqa"), ("ffn", "swiglu")]
    assert views["mixer", "conv"].front is None
    counts = {view.kind: view for view in kind_views(snapshot(lab.store))}
    assert {kind: view.trials for kind, view in counts.items()} == {"conv": 1, "gqa": 2, "swiglu": 2}
    assert {kind: view.chosen for kind, view in counts.items()} == {"conv": 1.0, "gqa": 1.0, "swiglu": 1.0}
    assert counts["gqa"].drawn == counts["swiglu"].drawn == 1.0  # the space demands both
    assert counts["conv"].drawn is not None and 0.3 < counts["conv"].drawn < 1.0
    assert counts["gqa"].states == {"proposed": 2}
    assert {view.front for view in counts.values()} == {0}
    # The first layer of three fills three tenths and a third of the fourth.
    assert views["mixer", "conv"].all[:5] == pytest.approx([0.5, 0.5, 0.5, 0.5 / 3, 0.0], abs=1e-3)
