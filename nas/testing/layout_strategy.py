"""Hypothesis strategies for valid layouts, with shared layers, parallel mixers and cache reuse."""

from __future__ import annotations

from hypothesis import strategies as st

from nas.core.block import BLOCKS, Arg, Block, BlockKind, Scalar
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
    heads = dict(draw(attention(d_model)).given)
    return Block.of("swa", window=draw(st.integers(1, 4096)), sink=draw(st.none() | st.booleans()), **heads)


@st.composite
def state_space(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a Mamba-2 block that is valid at `d_model`."""
    expand = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 4]))
    own = {"state": draw(st.integers(1, 200)), "conv": draw(st.integers(2, 12))}
    return Block.of("mamba2", heads=heads, expand=expand, groups=groups, **own)


@st.composite
def delta_net(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a Gated DeltaNet block that is valid at `d_model`."""
    key_heads, head_dim = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 12, 16, 40]))
    heads = key_heads * draw(st.sampled_from([1, 2, 3]))
    return Block.of("gdn", heads=heads, key_heads=key_heads, head_dim=head_dim, conv=draw(st.integers(2, 12)))


@st.composite
def gated_linear(draw: st.DrawFn, d_model: int) -> Block:
    """Draws a gated linear attention block that is valid at `d_model`."""
    heads, head_dim = draw(st.integers(1, 6)), draw(st.sampled_from([4, 12, 16, 40]))
    return Block.of("gla", heads=heads, head_dim=head_dim, rank=draw(st.integers(1, 32)))


@st.composite
def matrix_lstm(draw: st.DrawFn, d_model: int) -> Block:
    """Draws an mLSTM block that is valid at `d_model`."""
    head_dim, key_dim = draw(st.sampled_from([4, 12, 16, 40])), draw(st.none() | st.integers(1, 32))
    return Block.of("mlstm", heads=draw(st.integers(1, 6)), head_dim=head_dim, key_dim=key_dim)


def mixers(d_model: int) -> st.SearchStrategy[Block]:
    """Returns a strategy for any mixer with a state of its own."""
    conv = st.integers(2, 64).map(lambda kernel: Block.of("conv", kernel=kernel))
    latent = of_kind(BLOCKS["mla"], d_model)
    linear = state_space(d_model) | delta_net(d_model) | gated_linear(d_model) | matrix_lstm(d_model)
    built_in = conv | attention(d_model) | sliding_window(d_model) | linear | latent
    return st.one_of(built_in, *(of_kind(kind, d_model) for kind in _further("mixer")))


def _further(role: str) -> list[BlockKind]:
    """Returns kinds of other distributions."""
    built_in = ("conv", "gqa", "swa", "mla", "mamba2", "gdn", "gla", "mlstm", "swiglu", "relu2", "moe")
    return [kind for kind in BLOCKS.values() if kind.role == role and kind.name not in built_in]


def of_kind(kind: BlockKind, d_model: int) -> st.SearchStrategy[Block]:
    """Returns a strategy for blocks of `kind` that are valid at `d_model`, with arguments up to 64 or their minimum."""

    def values(arg: Arg) -> st.SearchStrategy[Scalar | None]:
        low, high = arg.low or 0, 64 if arg.high is None else arg.high
        given: st.SearchStrategy[Scalar | None] = st.floats(low, high)
        if arg.type is not float:
            given = st.booleans() if arg.type is bool else st.integers(int(low), int(min(high, max(64, low))))
        return given if arg.required else st.none() | given

    def is_valid(block: Block) -> bool:
        try:
            block.canonical(d_model)
        except InvalidInput:
            return False
        return True

    drawn = st.fixed_dictionaries({arg.name: values(arg) for arg in kind.args if arg.name != "kv"})
    return drawn.map(lambda args: Block.of(kind.name, **args)).filter(is_valid)


def feed_forwards(d_model: int = 64) -> st.SearchStrategy[Block]:
    """Returns a strategy for any feed-forward."""
    width = st.integers(1, 400)
    dense = st.tuples(st.sampled_from(["swiglu", "relu2"]), width).map(lambda t: Block.of(t[0], width=t[1]))
    experts = st.tuples(st.integers(2, 8), st.integers(1, 8), width, st.integers(0, 2)).filter(lambda t: t[1] <= t[0])
    mixtures = experts.map(lambda t: Block.of("moe", experts=t[0], top_k=t[1], width=t[2], shared=t[3]))
    return st.one_of(dense, mixtures, *(of_kind(kind, d_model) for kind in _further("ffn")))


@st.composite
def layouts(draw: st.DrawFn, max_depth: int = 8, widths: st.SearchStrategy[int] = WIDTHS) -> Layout:
    """Draws valid layouts of 1 to `max_depth` layers; `widths` gives multiples of 32."""
    d_model = draw(widths)
    palette = draw(st.lists(mixers(d_model), min_size=1, max_size=4))
    ffns = [None, *draw(st.lists(feed_forwards(d_model), min_size=1, max_size=3))]
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
