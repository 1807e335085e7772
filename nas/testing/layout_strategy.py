"""Hypothesis strategies for layouts: valid ones of every built-in kind, with sharing, parallel mixers, cache reuse."""

from __future__ import annotations

from hypothesis import strategies as st

from nas.core.block import Block
from nas.core.layout import Layer, Layout

WIDTHS = st.integers(1, 16).map(lambda n: 32 * n)


@st.composite
def attention(draw: st.DrawFn, d_model: int) -> Block:
    """A grouped-query attention block that stands at `d_model`."""
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    derivable = d_model % heads == 0 and d_model // heads % 2 == 0
    head_dim = draw(st.integers(1, 40).map(lambda half: 2 * half) | (st.none() if derivable else st.nothing()))
    theta = draw(st.none() | st.floats(1, 1e12) | st.sampled_from([0.0, 1e4, 1e6]))
    qk_norm = draw(st.none() | st.booleans())
    return Block.of("gqa", heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_theta=theta, qk_norm=qk_norm)


@st.composite
def sliding_window(draw: st.DrawFn, d_model: int) -> Block:
    """A sliding-window attention block that stands at `d_model`."""
    heads = dict(draw(attention(d_model)).given)
    return Block.of("swa", window=draw(st.integers(1, 4096)), sink=draw(st.none() | st.booleans()), **heads)


@st.composite
def state_space(draw: st.DrawFn, d_model: int) -> Block:
    """A Mamba-2 block that stands at `d_model`."""
    expand = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 4]))
    own = {"state": draw(st.integers(1, 200)), "conv": draw(st.integers(2, 12))}
    return Block.of("mamba2", heads=heads, expand=expand, groups=groups, **own)


def mixers(d_model: int) -> st.SearchStrategy[Block]:
    """Any mixer with a state of its own."""
    conv = st.integers(2, 64).map(lambda kernel: Block.of("conv", kernel=kernel))
    return conv | attention(d_model) | sliding_window(d_model) | state_space(d_model)


def feed_forwards() -> st.SearchStrategy[Block]:
    """Any feed-forward."""
    width = st.integers(1, 400)
    dense = width.map(lambda n: Block.of("swiglu", width=n))
    experts = st.tuples(st.integers(2, 8), st.integers(1, 8), width).filter(lambda t: t[1] <= t[0])
    return dense | experts.map(lambda t: Block.of("moe", experts=t[0], top_k=t[1], width=t[2]))


@st.composite
def layouts(draw: st.DrawFn, max_depth: int = 8, widths: st.SearchStrategy[int] = WIDTHS) -> Layout:
    """Valid layouts of 1 to `max_depth` layers; `widths` gives multiples of 32."""
    d_model = draw(widths)
    palette = draw(st.lists(mixers(d_model), min_size=1, max_size=4))
    ffns = [None, *draw(st.lists(feed_forwards(), min_size=1, max_size=3))]
    layers: list[Layer] = []
    for _ in range(draw(st.integers(1, max_depth))):
        layers.append(_draw_layer(draw, layers, palette, ffns))
    return Layout.of(d_model, draw(st.integers(2, 70000)), layers, tied=draw(st.booleans()))


def _draw_layer(draw: st.DrawFn, earlier: list[Layer], palette: list[Block], ffns: list[Block | None]) -> Layer:
    owners = [i for i, layer in enumerate(earlier) if layer.share is None]
    if owners and draw(st.integers(0, 5)) == 0:
        return Layer(share=draw(st.sampled_from(owners)))
    chosen = draw(st.lists(st.sampled_from(palette), max_size=3))
    ffn = draw(st.sampled_from(ffns[1:] if not chosen else ffns))
    return Layer(tuple(_maybe_reader(draw, block, earlier) for block in chosen), ffn)


def _maybe_reader(draw: st.DrawFn, block: Block, earlier: list[Layer]) -> Block:
    sources = [i for i, layer in enumerate(earlier) if block in layer.mixers]
    if block.kind == "gqa" and sources and draw(st.booleans()):
        more = draw(st.integers(1, 3))
        wider = {"heads": more * block.int("heads")} if block.get("head_dim") else {}
        return block.replace(kv=draw(st.sampled_from(sources)), **wider)
    return block
