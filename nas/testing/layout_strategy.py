"""Hypothesis strategies for valid layouts, with shared layers, parallel mixers and cache reuse."""

from __future__ import annotations

from hypothesis import strategies as st

from nas.core.block import BLOCKS, Arg, Block, BlockKind, Role, Scalar
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout

WIDTHS = st.integers(1, 16).map(lambda n: 32 * n)


@st.composite
def attention(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a grouped-query attention block that is valid at `d_model`."""
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    derivable = d_model % heads == 0 and d_model // heads % 2 == 0
    head_dim = draw(st.integers(1, 40).map(lambda half: 2 * half) | (st.none() if derivable else st.nothing()))
    theta = draw(st.none() | st.floats(1, 1e12) | st.sampled_from([0.0, 1e4, 1e6]))
    qk_norm = draw(st.none() | st.booleans())
    return Block.of("gqa", heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_theta=theta, qk_norm=qk_norm)


@st.composite
def sliding_window(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a sliding-window attention block that is valid at `d_model`."""
    heads = dict(draw(attention(d_model)).args)
    return Block.of("swa", window=draw(st.integers(1, 4096)), sink=draw(st.none() | st.booleans()), **heads)


@st.composite
def state_space(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a Mamba-2 block that is valid at `d_model`."""
    expand = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 4]))
    sizes = {"state": draw(st.integers(1, 200)), "conv": draw(st.integers(2, 12))}
    return Block.of("mamba2", heads=heads, expand=expand, groups=groups, **sizes)


@st.composite
def mixture(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a mixture of experts."""
    experts, width = draw(st.integers(2, 8)), draw(st.integers(1, 400))
    top_k, shared = draw(st.integers(1, experts)), draw(st.integers(0, 2))
    return Block.of("moe", experts=experts, top_k=top_k, width=width, shared=shared)


_STRATEGIES = {"gqa": attention, "swa": sliding_window, "mamba2": state_space, "moe": mixture}
"""Kinds whose arguments are rarely valid together where each is drawn alone."""


def blocks(role: Role, d_model: int) -> st.SearchStrategy[Block]:
    """Returns a strategy for any block of a role: of every registered kind."""
    kinds = [kind for kind in BLOCKS.values() if kind.role == role]
    return st.one_of(
        *(_STRATEGIES[kind.name](d_model) if kind.name in _STRATEGIES else of_kind(kind, d_model) for kind in kinds)
    )


def of_kind(kind: BlockKind, d_model: int) -> st.SearchStrategy[Block]:
    """Returns a strategy for blocks of `kind` that are valid at `d_model`, with arguments up to 64 or their minimum."""

    def values(arg: Arg) -> st.SearchStrategy[Scalar | None]:
        low, high = arg.low or 0, 64 if arg.high is None else arg.high
        values: st.SearchStrategy[Scalar | None] = st.floats(low, high)
        if arg.type is not float:
            values = st.booleans() if arg.type is bool else st.integers(int(low), int(min(high, max(64, low))))
        return values if arg.required else st.none() | values

    def is_valid(block: Block) -> bool:
        try:
            block.canonical(d_model)
        except InvalidInput:
            return False
        return True

    drawn = st.fixed_dictionaries({arg.name: values(arg) for arg in kind.args if arg.name != "kv"})
    return drawn.map(lambda args: Block.of(kind.name, **args)).filter(is_valid)


@st.composite
def layouts(draw: st.DrawFn, max_depth: int = 8, widths: st.SearchStrategy[int] = WIDTHS) -> Layout:
    """Draws valid layouts of 1 to `max_depth` layers; `widths` gives multiples of 32."""
    d_model = draw(widths)
    palette = draw(st.lists(blocks("mixer", d_model), min_size=1, max_size=4))
    ffns = [None, *draw(st.lists(blocks("ffn", d_model), min_size=1, max_size=3))]
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
