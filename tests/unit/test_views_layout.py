"""Layouts as people look at them, alone and side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.layout import Layout
from nas.serve.views.layout import align, differs, distances, layer_codes, layout_view


def stack(items: str) -> Layout:
    return Layout.parse(f"d128 v256 ffn=swiglu:320 [{items}]")


def test_layers_add_up_to_the_layout_s_own_arithmetic() -> None:
    layout = stack("C3 A2/1 A2/1(kv=1) W2/1@128+moe:8x2:64 -")
    view = layout_view(layout, 1000, 3000)
    blocks = [block for layer in view.layers for block in layer.blocks]
    assert sum(block.kv_bytes for block in blocks) == layout.kv_bytes(1000)
    assert sum(block.state_bytes for block in blocks) == layout.state_bytes() == view.state_bytes
    norms = layout.d_model * (len(blocks) + 1)
    assert sum(layer.params for layer in view.layers) + norms == layout.params.non_embedding == view.non_embedding
    assert {1000, 3000} <= {cost.context for cost in view.contexts}
    assert all(cost.kv_bytes == layout.kv_bytes(cost.context) for cost in view.contexts)
    assert view.text == layout.format() and view.id == layout.id


def test_a_layer_with_another_s_weights_shows_them_and_says_so() -> None:
    first, second = layout_view(stack("C3 ^0"), 512).layers
    assert (first.share, second.share) == (None, 0)
    assert first.blocks == second.blocks


def test_shapes_name_what_follows_from_the_width() -> None:
    (layer,) = layout_view(stack("A2/1"), 512).layers
    assert layer.mixers[0].shape["head_dim"] == 64


def test_equal_layers_stand_side_by_side_around_what_was_put_in() -> None:
    layouts = [stack("C3 A2/1 C3"), stack("C3 C4 A2/1 C3"), stack("C3 A2/1")]
    rows = align(layouts)
    assert rows == [(0, 0, 0), (None, 1, None), (1, 2, 1), (2, 3, None)]
    assert [differs(layouts, row) for row in rows] == [False, True, False, True]


def test_a_layer_that_changed_is_paired_and_marked() -> None:
    layouts = [stack("C3 A2/1"), stack("C3 C4")]
    assert align(layouts) == [(0, 0), (1, 1)]
    assert [differs(layouts, row) for row in align(layouts)] == [False, True]


def test_a_layer_with_another_s_weights_is_compared_by_what_runs() -> None:
    layouts = [stack("C3 C3"), stack("C3 ^0")]
    assert [differs(layouts, row) for row in align(layouts)] == [False, False]


stacks = st.lists(st.sampled_from(["C3", "C4", "A2/1", "-"]), min_size=1, max_size=8).map(
    lambda items: stack(" ".join(items))
)


@given(st.lists(stacks, min_size=1, max_size=4))
def test_every_layer_stands_once_and_in_its_order(layouts: list[Layout]) -> None:
    rows = align(layouts)
    for place, layout in enumerate(layouts):
        assert [row[place] for row in rows if row[place] is not None] == list(range(layout.depth))
    assert all(any(index is not None for index in row) for row in rows)


@pytest.mark.parametrize("items", ["C3", "C3 A2/1 C3"])
def test_one_layout_is_its_own_alignment(items: str) -> None:
    assert align([stack(items)]) == [(index,) for index in range(stack(items).depth)]


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("C3 A2/1 C3", "C3 A2/1 C3", 0),
        ("C3 A2/1 C3", "C3 C3 C3", 1),
        ("C3 A2/1 C3", "C3 C3", 2),
        ("C3", "C3 C3 A2/1", 4),
        ("C3 A2/1 C3", "C3 W2/1@128 C3", 1),
        ("C3 -", "C3", 2),
    ],
)
def test_distances_are_costs_of_alignments(one: str, other: str, distance: int) -> None:
    codes = layer_codes([stack(one), stack(other), stack("C3 C3 C3 C3 C3 C3")])
    assert distances(codes, 0)[:2].tolist() == [0, distance] == distances(codes, 1)[1::-1].tolist()
