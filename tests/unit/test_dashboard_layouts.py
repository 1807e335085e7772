"""Drawings of layouts are well-formed, say what they show, and carry nothing that could run or style itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

import nas.serve.dashboard
from nas.core.block import BLOCKS
from nas.core.layout import Layout
from nas.search.analysis.snapshot import NONE
from nas.serve.dashboard.filters import hue
from nas.serve.dashboard.layout_svg import (
    aligned_strips,
    depth_shares,
    layout_strip,
    layout_thumbnail,
    tallest,
    tallest_of,
)
from nas.serve.views.candidate import CandidateView, ComparisonView, LayerRow
from nas.serve.views.layout import LayerView, layout_view
from nas.serve.views.study import ShareView

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\" onload='x' & \x00\x1b[2J]]>"
DRAWN = {"svg", "title", "g", "rect", "line", "text"}
ATTRIBUTES = {
    "class", "role", "aria-label", "viewBox", "x", "y", "width", "height", "x1", "x2", "y1", "y2", "text-anchor",
}  # fmt: skip


def layers(text: str) -> tuple[LayerView, ...]:
    return layout_view(Layout.parse(text), 512).layers


MIXED = layers("d128 v256 ffn=swiglu:320 [C3 A2/1&C4 -+moe:8x2:64 A2/1+none ^0]")
SHARES = [
    ShareView(role="mixer", kind="conv", all=[1.0, 0.5], front=[0.5, 0.0]),
    ShareView(role="mixer", kind=NONE, all=[0.0, 0.5], front=[0.5, 1.0]),
]
PICTURES: dict[str, Callable[[str], Markup]] = {
    "strip": lambda name: layout_strip([*MIXED, None], name),
    "depth": lambda name: depth_shares([share.model_copy(update={"kind": name}) for share in SHARES], "mixer"),
}


def parsed(drawn: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(drawn))


def shapes(drawn: Markup, tag: str, kind: str = "") -> Iterator[ElementTree.Element]:
    return (shape for shape in parsed(drawn).iter(SVG + tag) if kind in shape.get("class", "").split() or not kind)


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("name", ["plain", HOSTILE])
def test_a_drawing_is_labelled_shapes_and_text(kind: str, name: str) -> None:
    root = parsed(PICTURES[kind](name))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= DRAWN
    assert {attribute for element in root.iter() for attribute in element.attrib} <= ATTRIBUTES
    assert root.get("role") == "img" and f"picture-{kind}" in root.get("class", "").split()
    assert root[0].tag == SVG + "title" and root[0].text == root.get("aria-label")
    assert "\x00" not in "".join(root.itertext())


@pytest.mark.parametrize("kind", PICTURES)
def test_every_class_is_in_the_style_sheet(kind: str) -> None:
    styles = Path(nas.serve.dashboard.__file__).with_name("assets").joinpath("plots.css").read_text()
    classes = {name for element in parsed(PICTURES[kind]("what")).iter() for name in element.get("class", "").split()}
    assert {name for name in classes - {"layer"} if f".{name} " not in styles} == set()


def test_a_strip_has_a_column_a_layer_and_a_block_for_each_of_its_blocks() -> None:
    drawn = layout_strip(MIXED, "a")
    columns = list(shapes(drawn, "g", "layer"))
    assert [len(list(column.iter(SVG + "rect"))) for column in columns] == [2, 3, 1, 1, 2]
    assert [column[-1].text for column in columns] == ["C", "A&C", "-", "A", "^0"]
    assert len(list(shapes(drawn, "rect", "shared"))) == 2
    titles = [title.text or "" for title in shapes(drawn, "title")]
    assert any("layer 1: A2/1, grouped-query attention" in title and "cache" in title for title in titles)
    assert any("weights of layer 0" in title for title in titles)
    assert any("active" in title and "moe" in title for title in titles)
    assert [element.tag for element in parsed(layout_strip([], "a"))] == [SVG + "title", SVG + "line"]


def test_areas_are_weights() -> None:
    small, large = layers("d128 v256 ffn=swiglu:256 [C3]"), layers("d128 v256 ffn=swiglu:512 [C3]")
    most = tallest(large)

    def area(columns: tuple[LayerView, ...]) -> float:
        (shape,) = shapes(layout_strip(columns, "a", most=most), "rect", "hue-4")
        return float(shape.get("height", 0)) + 1

    assert area(small) / area(large) == pytest.approx(0.5, rel=0.05)


def test_gaps_and_marks_are_drawn_where_they_were_asked_for() -> None:
    drawn = layout_strip([MIXED[0], None, MIXED[1]], "a", marked=[2])
    assert len(list(shapes(drawn, "line", "gap"))) == 1
    assert [column.get("class") for column in shapes(drawn, "g", "layer")] == ["layer", "layer marked"]


def compared(*texts: str) -> ComparisonView:
    """A comparison of layouts with the same number of layers."""
    candidates = [
        CandidateView.model_construct(name=text, layout=layout_view(Layout.parse(text), 512)) for text in texts
    ]
    depth = len(candidates[0].layout.layers)
    rows = [LayerRow(layers=(index,) * len(texts), differs=True) for index in range(depth)]
    return ComparisonView.model_construct(candidates=tuple(candidates), rows=tuple(rows))


def marked_layers(drawn: Markup) -> list[int]:
    columns = shapes(drawn, "g", "layer")
    return [index for index, column in enumerate(columns) if "marked" in column.get("class", "").split()]


def test_only_kinds_that_most_layouts_do_not_have_are_marked() -> None:
    one, other, third = (
        f"d128 v256 ffn=swiglu:{width} [{mixers}]"
        for width, mixers in ((320, "C3 A2/1 C3"), (640, "C3 C3 C3"), (960, "A2/1 C3 C3"))
    )
    drawn = aligned_strips(compared(one, other, third))
    assert [marked_layers(strip) for strip in drawn] == [[1], [], [0]], "widths differ everywhere"
    assert [marked_layers(strip) for strip in aligned_strips(compared(one, other))] == [[], [1]]


def test_thumbnails_of_a_list_share_a_scale() -> None:
    small, large = "d128 v256 ffn=swiglu:320 [C3]", "d128 v256 ffn=swiglu:640 [C3]"
    most = tallest_of([small, large])
    assert most == tallest(layers(large)) and tallest_of([]) == 1
    heights = [
        [float(shape.get("height", 0)) for shape in shapes(layout_thumbnail(text, most), "rect")][-1]
        for text in (small, large)
    ]
    assert heights[0] < 0.6 * heights[1]


def test_shares_are_stacked_by_depth() -> None:
    titles = [title.text for title in shapes(depth_shares(SHARES, "mixer"), "title")][1:]
    assert titles[0] == "front: conv: 50 % of the depth from 0 % to 50 %" and len(titles) == 6
    without = [share.model_copy(update={"front": None}) for share in SHARES]
    assert len(list(shapes(depth_shares(without, "mixer"), "rect"))) == 3


def test_kinds_of_blocks_have_colours_of_their_own() -> None:
    colours = [hue(kind) for kind in BLOCKS if type(BLOCKS[kind]).__module__.startswith("nas.model.blocks")]
    assert len(set(colours)) == len(colours) >= 11
    assert hue("somebody_elses") == hue("somebody_elses") not in colours
