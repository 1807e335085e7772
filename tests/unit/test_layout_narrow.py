"""Deploy scale to proxy scale: sizes that scale, sizes that stay, and that every proxy is valid."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nas.core.block import BLOCKS, Block, BlockKind
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout, narrow, padded
from nas.core.published import LFM2
from nas.testing.layout_strategy import WIDTHS, layouts

MIXED = Layout.parse("d1024 v65536 ffn=swiglu:4608 [M W16/4@512 A16/8+moe:32x4:1792]")
"""Has every kind that tests of drawn layouts look at."""


@given(layouts(), WIDTHS)
def test_proxies_stand_and_narrow_to_themselves(layout: Layout, width: int) -> None:
    width = min(width, layout.d_model)
    proxy = narrow(layout, width, 256)
    assert (proxy.d_model, proxy.vocab, proxy.tied) == (width, 256, layout.tied)
    assert Layout.parse(proxy.format()) == proxy
    assert narrow(proxy, width, 256) == proxy


@given(layouts(), WIDTHS)
def test_order_kernels_sharing_and_cache_reuse_stay(layout: Layout, width: int) -> None:
    proxy = narrow(layout, min(width, layout.d_model), 256)
    assert [shape(layer) for layer in proxy.layers] == [shape(layer) for layer in layout.layers]


def shape(layer: Layer) -> object:
    """Properties of a layer that narrowing keeps."""
    names = ("kernel", "kv", "qk_norm", "rope_theta", "experts", "top_k", "window", "sink", "state", "conv", "expand")
    shapes = [(block.kind, [(k, v) for k, v in block.args if k in names]) for block in layer.blocks]
    # States that all channels of an S5 share, and hidden numbers of a CfC, scale with the model.
    scaled = {("s5", "state"), ("cfc", "state")}
    return [(kind, [(k, v) for k, v in args if (kind, k) not in scaled]) for kind, args in shapes], layer.share


@given(layouts(), WIDTHS)
@example(MIXED, 64)
def test_padded_widths_are_multiples_of_the_quantisers_block(layout: Layout, width: int) -> None:
    if width >= layout.d_model:
        return
    for layer in padded(narrow(layout, width, 256)).layers:
        for block in (block.resolve(width) for block in layer.blocks):
            if block.kind in ("swiglu", "moe"):
                assert block.int("width") % 32 == 0
            if block.kind in ("gqa", "swa"):
                assert block.int("heads") * block.int("head_dim") % 32 == 0
                assert block.int("head_dim") >= 8
            if block.kind == "mamba2":
                assert block.int("expand") * width // block.int("heads") >= 16


@pytest.mark.parametrize("name", LFM2)
def test_attention_as_wide_as_the_model_stays_so(name: str) -> None:
    for width in range(32, 1025, 32):
        blocks = [block.resolve(width) for block in attention_of(narrow(Layout.parse(LFM2[name]), width, 256))]
        assert {block.int("heads") * block.int("head_dim") for block in blocks} == {width}


def test_the_proxies_of_the_published_family() -> None:
    order = "C3*2 A8/4 C3*2 A8/4 C3*2 A8/4 C3 A8/4 C3 A8/4 C3 A8/4 C3"
    assert narrow(Layout.parse(LFM2["LFM2-350M"]), 64, 256).format() == f"d64 v256 ffn=swiglu:288 [{order}]"
    assert narrow(Layout.parse(LFM2["LFM2-350M"]), 256, 256).format() == (
        "d256 v256 ffn=swiglu:1152 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]"
    )
    assert narrow(Layout.parse(LFM2["LFM2-8B-A1B"]), 128, 256).format() == (
        "d128 v256 ffn=moe:32x4:112 [C3+swiglu:448*2 A16/4 C3*3 A16/4 C3*3 A16/4 C3*3 A16/4 C3*3 A16/4 C3*2 A16/4 C3*2]"
    )


def test_proxies_of_windows_and_state_spaces() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [M W16/4@512 M64(groups=2,heads=16) W16/8@2048(sink=1) A16/8]")
    order = "M{n}(heads=8) W8/2@{w}{t} M{m}(groups=2,heads=8) W8/4@{v}({r}sink=1) A8/4{t}"
    sizes = {
        4096: {"w": 512, "v": 2048, "n": "", "m": 64, "t": "", "r": ""},
        8192: {"w": 512, "v": 2048, "n": "", "m": 64, "t": "", "r": ""},
        512: {"w": 64, "v": 256, "n": 16, "m": 8, "t": "(rope_theta=31600)", "r": "rope_theta=31600,"},
        20: {"w": 8, "v": 10, "n": 2, "m": 2, "t": "(rope_theta=145)", "r": "rope_theta=145,"},
    }
    for length, fields in sizes.items():
        proxy = narrow(layout, 64, 256, context=4096, length=length)
        assert proxy.format() == f"d64 v256 ffn=swiglu:288 [{order.format(**fields)}]"


def test_windows_of_proxies_are_no_shorter_than_eight_unless_they_were() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [W16/4@100 W16/4@8 W16/4@3]")
    proxy = narrow(layout, 64, 256, context=4096, length=16)
    assert [layer.mixers[0].int("window") for layer in proxy.layers] == [8, 8, 3]


def test_a_proxy_is_its_own_proxy() -> None:
    proxy = narrow(Layout.parse("d1024 v65536 ffn=swiglu:4608 [M W16/4@512 A16/8]"), 64, 256, context=4096, length=128)
    assert narrow(proxy, 64, 256, context=4096, length=128) == proxy


def test_the_proxy_id_never_changes() -> None:
    assert (
        narrow(Layout.parse(LFM2["LFM2-350M"]), 64, 256).id
        == "44cd486650896f19e2e67953ad9c79cb28727712564de1a349ce02f15443f1b6"
    )


def test_a_wider_proxy_is_refused() -> None:
    with pytest.raises(InvalidInput, match="proxy width 2048 exceeds the layout's 1024"):
        narrow(Layout.parse(LFM2["LFM2-350M"]), 2048, 256)


@pytest.mark.parametrize("heads", ["A16/2", "A16/4", "A16/8", "A16/16"])
def test_caches_of_few_heads_keep_their_proportion(heads: str) -> None:
    layout = Layout.parse(f"d1024 v65536 ffn=swiglu:4608 [{heads}]")
    assert narrow(layout, 64, 256).kv_bytes(1) == layout.kv_bytes(1) / 16


@given(layouts(), WIDTHS)
@example(MIXED, 64)
def test_positions_reach_as_far_in_a_proxys_sequence(layout: Layout, width: int) -> None:
    """The share of RoPE's frequencies that turn by a radian within a sequence stays."""
    if width >= layout.d_model:
        return
    proxy = narrow(layout, width, 256, context=4096, length=256)
    for block, short in zip(attention_of(layout), attention_of(proxy), strict=True):
        base, proxy_base = float(block.get("rope_theta") or 0), float(short.get("rope_theta") or 0)
        assert bool(base) == bool(proxy_base)
        if base > 100:
            assert math.log(256) / math.log(proxy_base) == pytest.approx(math.log(4096) / math.log(base), rel=0.01)


def test_the_length_before_scaling_stays_the_same_share_of_a_sequence() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [A16/8(rope_factor=32,rope_tokens=8192)]")
    block = narrow(layout, 64, 256, context=32768, length=256).layers[0].mixers[0]
    assert (block.get("rope_factor"), block.get("rope_tokens")) == (32.0, 64)


@pytest.mark.parametrize(("part", "narrowed"), [(32, 4), (62, 6), (2, 2)])
def test_rope_turns_the_same_share_of_a_head(part: int, narrowed: int) -> None:
    layout = Layout.parse(f"d1024 v65536 ffn=swiglu:4608 [A16/8(rope_dim={part})]")
    block = narrow(layout, 64, 256, context=32768, length=256).layers[0].mixers[0].resolve(64)
    assert (block.get("head_dim"), block.get("rope_dim")) == (8, narrowed)


def test_heads_and_groups_of_mamba2_stay_at_their_own_width() -> None:
    block = Block.parse("M16(groups=8,heads=8)", "mixer")
    assert block.canonical(96) == block
    assert block.spec.scale(block, 96, 96, "heads") == block


def attention_of(layout: Layout) -> list[Block]:
    return [block for layer in layout.layers for block in layer.mixers if block.kind in ("gqa", "swa")]


RECURRENT = (
    "M", "M64(groups=2)", "M48", "D8", "D16/8:128", "D6:256", "G4", "G16:96", "X4", "X8(key_dim=128)", "X16",
    "K8", "N8", "H",
)  # fmt: skip


def test_examples_have_every_kind_with_a_recurrent_memory() -> None:
    kinds = {name for name in BLOCKS if type(BLOCKS[name]).memory is not BlockKind.memory}
    assert {Block.parse(text, "mixer").kind for text in RECURRENT} == kinds


@given(st.sampled_from(RECURRENT), st.sampled_from((64, 96, 128, 256)), st.integers(8, 4096))
def test_memories_keep_their_share_of_attentions_cache(text: str, width: int, length: int) -> None:
    """Memory per token of context and channel: within a factor of 2 of that at deploy scale, or the nearest."""
    layout = Layout.parse(f"d1536 v65536 ffn=none [{text}]")

    def narrowed(length: int) -> Block:
        (layer,) = narrow(layout, width, 256, context=4096, length=length).layers
        return layer.mixers[0].resolve(width)

    (wide,), short, shortest = layout.layers[0].mixers, narrowed(length), narrowed(1)
    share = short.spec.memory(short, width) / (width * length)
    ratio = share / (wide.spec.memory(wide.resolve(1536), 1536) / (1536 * 4096))
    heads = {"mamba2": "groups", "gdn": "key_heads"}.get(wide.kind, "heads")
    assert ratio >= 0.5 or short.int(heads) == 1, "no head is wider than its layer"
    assert ratio <= 2 or short == shortest


@pytest.mark.parametrize("text", [text for text in RECURRENT if text[0] not in "MH"])
@pytest.mark.parametrize("length", [20, 128, 1024])
def test_smaller_heads_are_as_wide_together(text: str, length: int) -> None:
    layout = Layout.parse(f"d1536 v65536 ffn=none [{text}]")
    proxy = narrow(layout, 96, 256, context=4096, length=length)
    block, short = layout.layers[0].mixers[0].resolve(1536), proxy.layers[0].mixers[0].resolve(96)
    width, proportional = (one.int("heads") * one.int("head_dim") for one in (short, block))
    assert width == proportional / 16 and width % 32 == 0
    for name, of in {"D": [("key_heads", "heads")], "X": [("key_dim", "head_dim")]}.get(text[0], []):
        assert short.int(name) / short.int(of) == pytest.approx(block.int(name) / block.int(of), rel=0.01)
