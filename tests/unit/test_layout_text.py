"""Layouts as text and JSON: both forms read back as written, and nothing else is read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core import layout as layout_module
from nas.core.block import BLOCKS, Block
from nas.core.canonical import canonical_json
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layer, Layout, Norms
from nas.testing.layout_strategy import layouts


@given(layouts())
def test_text_reads_back(layout: Layout) -> None:
    text = layout.format()
    assert Layout.parse(text) == layout
    assert Layout.parse(text).format() == text
    assert Layout.parse(f"  {text.replace(' ', '   ')} ") == layout


@given(layouts())
def test_json_reads_back(layout: Layout) -> None:
    data = json.loads(canonical_json(layout.to_json()))
    assert Layout.from_json(data) == layout
    assert Layout.from_json(data).id == layout.id == Layout.parse(layout.format()).id


@given(layouts(), st.sampled_from(["behind", "both"]), st.floats(0, 1e9))
def test_norms_and_bounds_read_back(layout: Layout, norms: Norms, softcap: float) -> None:
    if any(len(layer.mixers) > 1 for layer in layout.layers):
        norms = "before"
    framed = replace(layout, norms=norms, softcap=softcap)
    assert Layout.parse(framed.format()) == framed
    assert Layout.from_json(json.loads(canonical_json(framed.to_json()))) == framed
    assert framed.with_layers(framed.layers) == framed


@given(layouts(max_depth=4), layouts(max_depth=4))
def test_ids_tell_layouts_apart(one: Layout, other: Layout) -> None:
    assert (one.id == other.id) == (one == other) == (one.format() == other.format())


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("d64 v256 ffn=swiglu:96 [C3 C3 C3]", "d64 v256 ffn=swiglu:96 [C3*3]"),
        ("d64 v256 ffn=swiglu:96 [A4/2:16]", "d64 v256 ffn=swiglu:96 [A4/2]"),
        ("d64 v256 ffn=swiglu:96 [A4/2(qk_norm=1,rope_theta=1000000)]", "d64 v256 ffn=swiglu:96 [A4/2]"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_theta=5e4,qk_norm=0)]", None),
        ("d64 v256 ffn=swiglu:96 [C3+swiglu:32*2 C3+swiglu:96]", "d64 v256 ffn=swiglu:32 [C3*2 C3+swiglu:96]"),
        ("d64 v256 ffn=swiglu:96 [C3 C3+none]", "d64 v256 ffn=swiglu:96 [C3 C3+none]"),
        ("d64 v256 ffn=none [C3 C3+swiglu:96]", "d64 v256 ffn=none [C3 C3+swiglu:96]"),
        ("d64 v256 ffn=swiglu:96 [C3 ^0 ^0]", "d64 v256 ffn=swiglu:96 [C3 ^0*2]"),
        ("d64 v256 ffn=swiglu:96 [- C3]", "d64 v256 ffn=swiglu:96 [- C3]"),
    ],
)
def test_canonical_text(written: str, canonical: str | None) -> None:
    expected = canonical or "d64 v256 ffn=swiglu:96 [A4/2(qk_norm=0,rope_theta=50000)]"
    assert Layout.parse(written).format() == expected
    assert Layout.parse(written).id == Layout.parse(expected).id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 'dWIDTH vVOCAB"),
        ("d64 v256 ffn=swiglu:96 [C3", "expected 'dWIDTH"),
        ("d64 v256 ffn=swiglu:96 []", "1 to 1024 layers, not 0"),
        ("d64 v256 ffn=swiglu:96 [C3*9999]", "1 to 1024 layers, not 9999"),
        ("d64 v256 ffn=swiglu:96 [C3*0]", r"cannot read layer 'C3\*0'"),
        ("d33 v256 ffn=swiglu:96 [C3]", "multiple of 32"),
        ("d64 v1 ffn=swiglu:96 [C3]", "vocab must be in"),
        ("d64 v256 ffn=swiglu:96 [Q3]", "unknown mixer block 'Q3'"),
        ("d64 v256 ffn=swigul:96 [C3]", "unknown ffn block 'swigul:96'"),
        ("d64 v256 ffn=swiglu:96 [C]", "expected the form KERNEL"),
        ("d64 v256 ffn=swiglu:96 [C1]", r"layer 0|kernel must be in \[2"),
        ("d64 v256 ffn=swiglu:96 [C3.5]", "kernel must be a whole number"),
        ("d64 v256 ffn=swiglu:96 [C3(taps=4)]", "unknown argument of conv 'taps'"),
        ("d64 v256 ffn=swiglu:96 [A4/2(qk_norm=2)]", "qk_norm must be 0 or 1"),
        ("d64 v256 ffn=swiglu:96 [A4/2(qk_norm=0,qk_norm=0)]", "given twice"),
        ("d64 v256 ffn=swiglu:96 [A4/2(heads=4)]", "given twice"),
        ("d64 v256 ffn=swiglu:96 [A4/2(qk_norm)]", "not key=number"),
        ("d64 v256 ffn=swiglu:96 [A4/3]", "layer 0: gqa: 3 key-value heads do not divide 4"),
        ("d64 v256 ffn=swiglu:96 [A5/5]", "give the head size"),
        ("d64 v256 ffn=swiglu:96 [A4/2:9]", "is odd"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_theta=1e-5)]", "0 .no positions. or at least 1"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_theta=1e999)]", "must be a number, not inf"),
        ("d64 v256 ffn=moe:4x5:32 [C3]", "top_k 5 exceeds 4"),
        ("d64 v256 ffn=none [-]", "layer 0: a layer needs a mixer or a feed-forward"),
        ("d64 v256 ffn=swiglu:96 [^0]", r"\^0 must name an earlier layer"),
        ("d64 v256 ffn=swiglu:96 [C3 ^0 ^1]", r"layer 2: \^1 must name an earlier layer with weights of its own"),
        ("d64 v256 ffn=swiglu:96 [A4/2 A4/2(kv=1)]", "kv=1 must name an earlier layer"),
        ("d64 v256 ffn=swiglu:96 [C3 A4/2(kv=0)]", "kv=0 must name an earlier layer with a gqa cache"),
        ("d64 v256 ffn=swiglu:96 [A4/2 A4/2(canon=4,kv=0)]", "canon needs a state of its own"),
        ("d64 v256 ffn=swiglu:96 [A4/2(canon=1)]", "or at least 2 taps"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_dim=16)]", "rope_dim 16 must be even and below the head size 16"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_dim=7)]", "rope_dim 7 must be even"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_dim=8,rope_theta=0)]", "of which rope_theta=0 has none"),
        ("d64 v256 ffn=swiglu:96 [A4/2(qk_norm=0,qk_norm_wide=1)]", "qk_norm_wide says how qk_norm is computed"),
        ("d64 v256 ffn=swiglu:96 [W4/2@8(sink=1,softcap=5)]", "softcap bounds scores, which sink=1 compares"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_factor=8,rope_yarn=1)]", "rope_yarn says how rope_tokens scale RoPE"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_factor=8,rope_theta=1,rope_tokens=9,rope_yarn=1)]", "rope_theta above 1"),
        ("d64 v256 norms=after ffn=swiglu:96 [A4/2]", "norms must be before, behind, both, not 'after'"),
        ("d64 v256 softcap=99999999999 ffn=swiglu:96 [A4/2]", "cannot read layout"),
        ("d64 v256 norms=both ffn=swiglu:96 [A4/2&C3]", "mixers side by side have no norm behind them"),
        ("d64 v256 ffn=swiglu:96 [A4/2(rope_tokens=64)]", "rope_tokens needs a rope_factor above 1"),
        (
            "d64 v256 ffn=swiglu:96 [A4/2(rope_factor=8,rope_theta=0)]",
            "scales positions, of which rope_theta=0 has none",
        ),
        ("d64 v256 ffn=swiglu:96 [A4/2 A4/2(kv=0,rope_factor=8)]", "same kv_heads, head_dim, rope_theta, rope_factor"),
        ("d64 v256 ffn=swiglu:96 [A4/2 A4/4(kv=0)]", "same kv_heads, head_dim, rope_theta"),
        ("d64 v256 ffn=swiglu:96 [A4/2 A4/2(kv=0,rope_theta=9)]", "same kv_heads, head_dim, rope_theta"),
        ("d64 v256 ffn=swiglu:96 [A4/2 A4/2(kv=0) A4/2(kv=1)]", "layer 2: kv=1 must name"),
        ("d64 v256 ffn=swiglu:96 [C3&swiglu:96]", "unknown mixer block"),
        ("d64 v256 ffn=swiglu:96 [C3*00 A4/2]", r"cannot read layer 'C3\*00'"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Layout.parse(text)


def test_unknown_argument_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'qk_norm'"):
        Layout.parse("d64 v256 ffn=swiglu:96 [A4/2(qknorm=0)]")


@given(st.text(st.sampled_from("dv0123456789 ffn=swiglu:moex[]C3A/4+*^&-(kv=).e"), max_size=60))
def test_any_other_text_is_refused_as_invalid(body: str) -> None:
    for text in (body, f"d64 v256 ffn=swiglu:96 [{body}]"):
        try:
            layout = Layout.parse(text)
        except InvalidInput:
            continue
        assert Layout.parse(layout.format()) == layout


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.sampled_from(["conv", "gqa", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kind", "kernel", "heads", "kv_heads", "mixers", "ffn", "share", "v"]), inner
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["v", "d_model", "vocab", "layers", "tied"]), JSON) | JSON)
def test_any_other_json_is_refused_as_invalid(data: Any) -> None:
    for variant in (data, {"v": 1, "d_model": 64, "vocab": 256, "layers": data}, {"v": 1, "layers": [data]}):
        try:
            layout = Layout.from_json(variant)
        except InvalidInput:
            continue
        assert Layout.from_json(layout.to_json()) == layout


def test_block_text_covers_every_argument_of_every_kind() -> None:
    for kind in BLOCKS.values():
        least = {arg.name: 1 if arg.low is None else arg.low for arg in kind.args}
        block = Block.of(kind.name, **least)
        assert Block.parse(block.format(), kind.role) == block
        assert dict(block.args).keys() >= {arg.name for arg in kind.args if arg.required}


def test_layer_with_one_mixer_gives_it() -> None:
    layers = Layout.parse("d64 v256 ffn=swiglu:96 [C3 -]").layers
    assert layers[0].mixer == Block.of("conv", kernel=3)
    assert layers[1].mixer is None
    assert Layer(share=0).blocks == ()


def test_a_short_text_does_not_become_a_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    items = Counter[str]()

    def count(item: str, default: Block | None) -> list[Layer]:
        items[item] += 1
        return parse_item(item, default)

    parse_item = layout_module._parse_item
    monkeypatch.setattr(layout_module, "_parse_item", count)
    with pytest.raises(InvalidInput, match="a layout has 1 to 1024 layers, not 9999 or more"):
        Layout.parse(f"d64 v256 ffn=swiglu:96 [{'C3*9999 ' * 1000}]")
    assert items.total() == 1


@pytest.mark.parametrize("size", [10**400, -(10**400)], ids=["above", "below"])
def test_a_whole_number_that_is_no_float_is_refused(size: int) -> None:
    layers = [{"mixers": [{"kind": "conv", "kernel": size}]}]
    with pytest.raises(InvalidInput, match="kernel must be a number"):
        Layout.from_json({"v": 1, "d_model": 64, "vocab": 256, "layers": layers})
