"""Layouts of other sizes in a parent's pattern."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest
from exhaustive import examples
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.testing.layout_strategy import layouts
from nas.train.scaling.candidates import (
    EMBEDDING_SHARE,
    FFN_RATIO,
    MAX_ASPECT,
    Experts,
    ScaledLayout,
    ScaledMixers,
    ScaledStack,
    active_width,
    apportion,
    candidates,
    entangled,
    ffn_ratio,
    mixer_blocks,
    mixer_counts,
    parse_size,
    scaled_mixer,
    stretched,
    width_step,
)
from nas.train.scaling.explain import member_decisions

PARENT = Layout.parse(LFM2["LFM2-350M"])
DEMO = Layout.parse("d512 v8192 ffn=swiglu:1536 [C3*2 A8/4 C3*2 A8/4 C3 A8/4]")


@cache
def shapes_of(size: str) -> list[ScaledLayout]:
    """Candidates of a size in the parent's pattern and vocabulary."""
    return candidates(PARENT, parse_size(size), PARENT.vocab)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 200))
def test_seats_are_apportioned_whole_and_nearly_in_proportion(counts: list[int], more: int) -> None:
    seats = len(counts) + more
    shares = apportion(counts, seats)
    assert sum(shares) == seats
    assert min(shares) >= 1
    if all(count * seats >= sum(counts) for count in counts):
        assert all(abs(n - count * seats / sum(counts)) < 1 for n, count in zip(shares, counts, strict=True))


def test_fewer_layers_than_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 kinds of layers do not fit into 1 layers"):
        stretched(PARENT.layers, 1)


@given(layouts(max_depth=12))
def test_a_stack_of_the_same_depth_is_unchanged(layout: Layout) -> None:
    after = stretched([layout.layer_at(i) for i in range(layout.depth)], layout.depth)
    assert after == tuple(range(layout.depth))


@pytest.mark.parametrize(("depth", "order"), [(2, "CA"), (3, "CCA"), (5, "CCCCA"), (7, "CCCCACA")])
def test_a_single_attention_layer_near_the_top_stays_there(depth: int, order: str) -> None:
    parent = Layout.parse("d512 v8192 ffn=swiglu:1024 [C3*3 A8/2]")
    assert "".join("CCCA"[i] for i in stretched(parent.layers, depth)) == order


@pytest.mark.parametrize("depth", [2, 5, 8, 15, 24, 30, 48])
def test_attention_keeps_its_share_and_layers_stay_apart(depth: int) -> None:
    kinds = ["gqa" if PARENT.layers[i].mixers[0].kind == "gqa" else "conv" for i in stretched(PARENT.layers, depth)]
    assert abs(kinds.count("gqa") - depth * 6 / 16) < 1
    assert kinds[0] == "conv"
    if depth <= 30:
        assert ("gqa", "gqa") not in pairwise(kinds)


@given(layouts(), st.integers(1, 16), st.integers(1, 12), st.booleans(), st.integers(0, 2))
def test_a_scaled_stack_counts_the_weights_of_its_layout(
    layout: Layout, steps: int, depth: int, sparse: bool, leading: int
) -> None:
    width = steps * width_step(mixer_blocks(layout))
    assume(width <= 4096)
    order = tuple(range(layout.depth)) if entangled(layout) else tuple(sorted([*range(layout.depth)] * depth))
    experts = Experts(8, 2, min(leading, len(order) - 1)) if sparse else None
    try:
        sketch = ScaledStack(ScaledMixers.of(layout, 256, width, "ratio"), order, experts)
        scaled_layout = sketch.layout(96, 32)
    except InvalidInput:  # a kind that has no block of this width
        reject()
    assert sketch.params(96, 32) == scaled_layout.params


@pytest.mark.parametrize("size", ["700M", "1.2B", "2.6B", "8B-A1B"])
def test_every_candidate_has_the_size_the_pattern_and_the_proportions(size: str) -> None:
    target = parse_size(size)
    shapes = shapes_of(size)
    for shape in shapes:
        layout = shape.layout
        assert target.admits(layout.params)
        assert abs(mixer_counts(layout)["gqa"] - layout.depth * 6 / 16) < 1
        assert {block.int("head_dim") for block in mixer_blocks(layout, "gqa")} == {64}
        assert {block.int("kernel") for block in mixer_blocks(layout, "conv")} == {3}
        assert layout.d_model % 256 == 0
        assert 1 / MAX_ASPECT <= layout.d_model / layout.depth / 64 <= MAX_ASPECT
        assert FFN_RATIO[0] * 0.98 <= ffn_ratio(layout) / 4.5 <= FFN_RATIO[1] * 1.02  # whole steps of 32
        assert LLAMA_CPP.supports(layout).verdict == "stock"
    widths = len({shape.layout.d_model for shape in shapes})
    assert len({shape.layout.d_model for shape in shapes[:widths]}) == widths >= 3
    assert [shape.deviation for shape in shapes[:widths]] == sorted(shape.deviation for shape in shapes[:widths])
    assert len({shape.layout.id for shape in shapes}) == len(shapes)


def test_published_shapes_are_among_what_would_be_measured() -> None:
    """Width and heads of each LFM2 size, depth and feed-forward within a quarter of theirs."""
    for name in ("LFM2-700M", "LFM2-1.2B", "LFM2-2.6B", "LFM2-8B-A1B"):
        published = Layout.parse(LFM2[name])
        shapes = shapes_of(name.removeprefix("LFM2-"))[:4]
        near = [shape.layout for shape in shapes if shape.layout.d_model == published.d_model]
        assert near, name
        assert mixer_blocks(near[0], "gqa")[0] == mixer_blocks(published, "gqa")[0]
        assert abs(near[0].depth / published.depth - 1) < 0.25
        assert abs(ffn_ratio(near[0]) / ffn_ratio(published) - 1) < 0.3


def test_a_parent_of_the_size_is_the_only_candidate() -> None:
    (only,) = candidates(PARENT, parse_size("350M"), 65536)
    assert only.layout == PARENT
    assert len(candidates(PARENT, parse_size("350M"), 32768)) > 1


def test_experts_begin_from_the_published_ones() -> None:
    first = shapes_of("8B-A1B")[0].layout
    ffns = [layer.ffn for layer in first.layers]
    assert [ffn.kind for ffn in ffns if ffn][:3] == ["swiglu", "swiglu", "moe"]
    lead, sparse = ffns[0], ffns[2]
    assert lead is not None and sparse is not None
    assert (sparse.int("experts"), sparse.int("top_k")) == (32, 4)
    assert lead.int("width") == 4 * sparse.int("width")


def test_experts_keep_what_the_parent_says_of_them() -> None:
    parent = Layout.parse("d512 v65536 ffn=moe:8x2:256(shared=1,softmax=1) [C3*2 A8/2 C3]")
    shapes = candidates(parent, parse_size("1B-A300M"), 65536)
    for ffn in (layer.ffn for layer in shapes[0].layout.layers):
        assert ffn is not None and (ffn.int("shared"), ffn.get("softmax")) == (1, True)
    assert active_width(parent.layers[0].ffn) == 3 * 256


def test_a_pattern_with_experts_has_dense_sizes_of_one_width() -> None:
    for shape in candidates(Layout.parse(LFM2["LFM2-8B-A1B"]), parse_size("1.2B"), 65536):
        assert len({layer.ffn for layer in shape.layout.layers}) == 1


@pytest.mark.parametrize("size", ["4M", "8M", "16M"])
def test_small_sizes_are_reached_with_a_small_vocabulary(size: str) -> None:
    shapes = candidates(DEMO, parse_size(size), 4096)[:4]
    assert len({shape.layout.d_model for shape in shapes}) >= 2
    assert all(4096 * shape.layout.d_model <= EMBEDDING_SHARE * shape.layout.params.total for shape in shapes)


def test_a_size_that_no_scaling_reaches_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        InvalidInput, match=r"5M: no layout.* 4\.6M to 5\.4M weights; the nearest .* d\d+ v65536 .*smaller --vocab"
    ):
        candidates(PARENT, parse_size("5M"), 65536)
    with pytest.raises(InvalidInput, match=r"8B-A7B: .* active; the nearest has .* active: d\d+"):
        candidates(PARENT, parse_size("8B-A7B"), 65536)
    odd = Layout.parse("d64 v256 ffn=swiglu:64 [A1/1:62 A1/1:58 A1/1:54 A1/1:46]")
    with pytest.raises(InvalidInput, match=r"2M: no layout.*; its width would have to be a multiple of [\d,]+ and at"):
        candidates(odd, parse_size("2M"), 256)


def test_layers_that_read_a_cache_have_its_heads() -> None:
    parent = Layout.parse("d256 v256 ffn=swiglu:1024 [A4/2 C3 A8/2:64(kv=0)]")
    layouts = [shape.layout for shape in candidates(parent, parse_size("15M"), 256)]
    assert {layout.d_model for layout in layouts} == {512, 576, 640}
    assert all(len({block.int("kv_heads") for block in mixer_blocks(layout, "gqa")}) == 1 for layout in layouts)


def test_widths_at_which_a_kind_has_no_block_are_left_out() -> None:
    grouped = Layout.parse("d512 v256 ffn=swiglu:1024 [M64(expand=1,groups=8)*3 A8/2]")
    assert {shape.layout.d_model for shape in candidates(grouped, parse_size("20M"), 256)} == {512}
    narrow = Layout.parse("d128 v256 ffn=swiglu:320 [M16(expand=1)*2]")
    assert {shape.layout.d_model for shape in candidates(narrow, parse_size("1M"), 256)} == {192}


def test_latent_attention_is_explained() -> None:
    parent, size = Layout.parse("d256 v256 ffn=swiglu:512 [L8/64*2]"), parse_size("3M")
    decisions = {one.what: one for one in member_decisions(candidates(parent, size, 256)[0], parent, size)}
    assert decisions["heads of mla"].value.endswith(" of size 32, latents of 64")
    assert "is the parent's" in decisions["heads of mla"].reason


def test_layers_that_read_each_other_keep_their_number() -> None:
    tied = Layout.parse("d256 v1024 ffn=swiglu:1024 [C3*2 A4/2 C3 A4/2(kv=2) ^0]")
    shapes = candidates(tied, parse_size("12M"), 1024)
    assert {shape.layout.depth for shape in shapes} == {tied.depth}


@settings(max_examples=examples(50))
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 40), st.sampled_from(["heads", "ratio"]))
def test_heads_keep_their_size_and_divide(kv_heads: int, group: int, units: int, caches: str) -> None:
    heads = kv_heads * group
    before = Layout.parse(f"d{heads * 64} v256 ffn=swiglu:64 [A{heads}/{kv_heads}]")
    width = 64 * units
    block = scaled_mixer(before.layers[0].mixers[0], before.d_model, width, "heads" if caches == "heads" else "ratio")
    full = block.resolve(width)
    assert (full.int("heads"), full.int("head_dim")) == (units, 64)
    assert full.int("heads") % full.int("kv_heads") == 0
    if caches == "ratio" and units % group == 0:
        assert full.int("kv_heads") == units // group


def test_growing_attention_keeps_its_cache_where_heads_divide() -> None:
    block = PARENT.layers[2].mixers[0]
    assert [scaled_mixer(block, 1024, width, "heads").format() for width in (1536, 2048, 2560)] == [
        "A24/8:64", "A32/8:64", "A40/8:64",
    ]  # fmt: skip
    assert math.isclose(Layout.parse(LFM2["LFM2-1.2B"]).kv_bytes(4096), PARENT.kv_bytes(4096))
