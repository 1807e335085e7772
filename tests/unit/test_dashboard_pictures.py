"""Pictures are well-formed, say what they show, and carry nothing that could run or style itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

import nas.dashboard
from nas.core.layout import Layout
from nas.dashboard.pictures.curves import Curve, training_curves
from nas.dashboard.pictures.distribution import cumulative, histogram
from nas.dashboard.pictures.plot import TOP, Limit
from nas.dashboard.pictures.scale import Scale, ticks
from nas.dashboard.pictures.sparkline import sparkline
from nas.dashboard.pictures.strip import hue, layout_strip, tallest
from nas.dashboard.pictures.trace import Stretch, latency_trace
from nas.service.layout_view import LayerView, layout_view

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\" onload='x' & \x00\x1b[2J]]>"
DRAWN = {"svg", "title", "g", "rect", "line", "polyline", "circle", "text"}
ATTRIBUTES = {
    "class", "role", "aria-label", "viewBox", "x", "y", "width", "height", "x1", "x2", "y1", "y2", "points", "cx", "cy",
    "r", "text-anchor",
}  # fmt: skip


def layers(text: str) -> tuple[LayerView, ...]:
    return layout_view(Layout.parse(text), 512).layers


MIXED = layers("d128 v256 ffn=swiglu:320 [C3 A2/1&C4 -+moe:8x2:64 A2/1+none ^0]")
PICTURES: dict[str, Callable[[str], Markup]] = {
    "strip": lambda name: layout_strip([*MIXED, None], name),
    "sparkline": lambda name: sparkline([(0, 1), (1, 3), (2, 2)], name),
    "histogram": lambda name: histogram([1.0, 2, 2, 3], name, name, [Limit(name, 2.5, name)]),
    "cumulative": lambda name: cumulative({name: [1.0, 2], "b": []}, name, name, [Limit(name, 1.5, name)]),
    "trace": lambda name: latency_trace([Stretch(name, [1.0, 2], 40.0), Stretch("b", [3.0], None, False)], name),
    "curves": lambda name: training_curves([Curve(name, name, [(1, 2.0), (2, 1.0)])], name),
}


def parsed(drawn: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(drawn))


def shapes(drawn: Markup, tag: str, kind: str = "") -> Iterator[ElementTree.Element]:
    return (each for each in parsed(drawn).iter(SVG + tag) if kind in each.get("class", "").split() or not kind)


def titles(drawn: Markup) -> list[str]:
    return [each.text or "" for each in shapes(drawn, "title")]


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("name", ["plain", HOSTILE])
def test_whatever_it_is_told_a_picture_is_shapes_and_text(kind: str, name: str) -> None:
    root = parsed(PICTURES[kind](name))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= DRAWN
    assert {attribute for each in root.iter() for attribute in each.attrib} <= ATTRIBUTES
    assert root.get("role") == "img"
    assert "\x00" not in "".join(root.itertext())


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_says_what_it_shows(kind: str) -> None:
    root = parsed(PICTURES[kind]("what"))
    assert "what" in root.get("aria-label", "")
    assert root[0].tag == SVG + "title" and root[0].text == root.get("aria-label")
    assert f"picture-{kind}" in root.get("class", "").split()


PLAIN = {"picture", "layer", "key", "line", "dot"}
"""Classes whose looks others decide."""


@pytest.mark.parametrize("kind", PICTURES)
def test_every_class_is_known_to_the_style_sheet(kind: str) -> None:
    styles = Path(nas.dashboard.__file__).with_name("assets").joinpath("pictures.css").read_text()
    classes = {name for each in parsed(PICTURES[kind]("what")).iter() for name in each.get("class", "").split()}
    assert {name for name in classes - PLAIN if f".{name} " not in styles and f".{name}," not in styles} == set()


@pytest.mark.parametrize(
    "drawn",
    [
        layout_strip([], "a"), sparkline([], "a"), histogram([], "a", "ms"), cumulative({}, "a", "ms"),
        cumulative({"b": []}, "a", "ms"), latency_trace([], "a"), latency_trace([Stretch("b", [])], "a"),
        training_curves([], "a"), training_curves([Curve("a", "b", [])], "a"),
    ],
)  # fmt: skip
def test_nothing_to_show_is_an_empty_picture(drawn: Markup) -> None:
    assert [each.tag for each in parsed(drawn)] == [SVG + "title"]


figures = st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=20)


@given(figures)
@settings(max_examples=50)
def test_no_shape_lies_beyond_its_picture(values: list[float]) -> None:
    for drawn in (
        histogram(values, "a", "ms"),
        cumulative({"a": values}, "a", "ms"),
        latency_trace([Stretch("a", [abs(value) for value in values], values[0])], "a"),
        training_curves([Curve("a", "b", list(enumerate(values)))], "a"),
        sparkline(list(enumerate(values)), "a"),
    ):
        _, _, width, height = map(float, parsed(drawn).get("viewBox", "").split())
        for line in shapes(drawn, "polyline"):
            for corner in line.get("points", "").split():
                x, y = map(float, corner.split(","))
                assert 0 <= x <= width and 0 <= y <= height


def test_a_strip_has_a_column_a_layer_and_a_block_for_each_of_its_blocks() -> None:
    drawn = layout_strip(MIXED, "a")
    columns = list(shapes(drawn, "g", "layer"))
    assert [len(list(column.iter(SVG + "rect"))) for column in columns] == [2, 3, 1, 1, 2]
    assert [column[-1].text for column in columns] == ["C", "A&C", "-", "A", "^0"]
    assert len(list(shapes(drawn, "rect", "shared"))) == 2
    told = titles(drawn)
    assert any("layer 1: A2/1, grouped-query attention" in each and "cache" in each for each in told)
    assert any("weights of layer 0" in each for each in told)
    assert any("active" in each and "moe" in each for each in told)


def test_areas_are_weights() -> None:
    small, large = layers("d128 v256 ffn=swiglu:256 [C3]"), layers("d128 v256 ffn=swiglu:512 [C3]")
    most = tallest(large)

    def area(columns: tuple[LayerView, ...]) -> float:
        (shape,) = shapes(layout_strip(columns, "a", most=most), "rect", "hue-4")
        return float(shape.get("height", 0)) + 1

    assert area(small) / area(large) == pytest.approx(0.5, rel=0.05)


def test_gaps_and_marks_stand_where_they_were_asked_for() -> None:
    drawn = layout_strip([MIXED[0], None, MIXED[1]], "a", marked=[2])
    assert len(list(shapes(drawn, "line", "gap"))) == 1
    assert [column.get("class") for column in shapes(drawn, "g", "layer")] == ["layer", "layer marked"]


def test_kinds_of_blocks_have_colours_of_their_own() -> None:
    own = [hue(kind) for kind in ("conv", "gqa", "swa", "mamba2", "swiglu", "moe")]
    assert len(set(own)) == len(own)
    assert hue("somebody_elses") == hue("somebody_elses") not in own


def test_a_histogram_counts_every_sample_once() -> None:
    values = [float(each) for each in range(100)]
    bars = [title.rsplit(": ", 1)[1] for title in titles(histogram(values, "a", "ms"))[1:]]
    assert sum(map(int, bars)) == 100
    assert titles(histogram([3.0, 3.0], "a", "ms"))[1] == "2.5 to 3.5 ms: 2"


def test_limits_are_lines_where_they_lie_inside_the_picture() -> None:
    drawn = histogram([1.0, 2.0, 3.0], "a", "ms", [Limit("budget", 2.0, "ms"), Limit("far", 9.0, "ms")])
    (line,) = shapes(drawn, "line", "limit")
    assert line[0].text == "budget: 2 ms"
    (level,) = shapes(latency_trace([Stretch("a", [1.0, 4.0])], "a", [Limit("b", 2.0, "ms")]), "line", "limit")
    assert level.get("y1") == level.get("y2")


def test_cumulative_shares_end_at_one_and_name_each_series() -> None:
    drawn = cumulative({"one": [1.0, 2, 3], "two": [2.0, 4], "none": []}, "a", "ms")
    lines = list(shapes(drawn, "polyline"))
    assert [float(line.get("points", "").split(",")[-1]) for line in lines] == [TOP, TOP]
    assert [line.get("class") for line in lines] == ["line series-0", "line series-1"]
    assert {"one", "two", "none: no samples"} <= {text.text for text in shapes(drawn, "text")}


def test_a_trace_keeps_its_peaks_however_long_it_is() -> None:
    tokens = [1.0] * 20_000
    tokens[12_345] = 9.0
    (line,) = shapes(latency_trace([Stretch("a", tokens)], "a"), "polyline", "tokens")
    corners = [tuple(map(float, each.split(","))) for each in line.get("points", "").split()]
    assert len(corners) <= 1100
    assert min(y for _, y in corners) == TOP


def test_a_trace_tells_temperatures_and_refused_repetitions() -> None:
    drawn = latency_trace([Stretch("first", [1.0], 40.0), Stretch("second", [2.0], 44.0, valid=False)], "a")
    assert [line[0].text for line in shapes(drawn, "line", "temperature")] == ["first: 40 °C", "second: 44 °C"]
    assert len(list(shapes(drawn, "polyline", "refused"))) == 1
    assert not list(shapes(latency_trace([Stretch("first", [1.0])], "a"), "line", "temperature"))


def test_runs_of_one_group_share_a_colour() -> None:
    runs = [Curve("lm", "seed 0", [(1, 2.0)]), Curve("lm", "seed 1", [(1, 1.0)]), Curve("task", "seed 0", [(1, 3.0)])]
    lines = list(shapes(training_curves(runs, "a"), "polyline"))
    assert [line.get("class") for line in lines] == ["line series-0", "line series-0", "line series-1"]
    assert [line[0].text for line in lines] == ["lm, seed 0", "lm, seed 1", "task, seed 0"]


def test_a_sparkline_ends_in_its_last_figure() -> None:
    drawn = sparkline([(0, 0.5), (10, 0.75)], "hypervolume")
    assert parsed(drawn).get("aria-label") == "hypervolume: 0.5 to 0.75"
    (dot,) = shapes(drawn, "circle")
    assert dot[0].text == "0.75"


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert len(found) <= 5
    assert all(low - width * 1e-6 <= each <= low + width * (1 + 1e-6) for each in found)


def test_one_figure_lies_in_the_middle_of_its_scale() -> None:
    assert Scale.over([3.0], 0, 10)(3.0) == 5
