"""Models of whole layouts: decoding equals the parallel pass, nothing leaks, each layout feature means what it says."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from exhaustive import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nas.core.layout import Layout
from nas.model.nn.attention import reference_cache
from nas.model.nn.gqa import GroupedQueryAttention, reference_gqa
from nas.model.nn.layer import ResidualLayer
from nas.model.nn.model import Model, ModelState
from nas.testing.layout_strategy import layouts

MIXED = (
    "d64 v97 ffn=swiglu:96 [C3 A4/2 C4&A2/1:48+moe:4x2:32 ^1 A4/2(kv=1) -+moe:4x2:64 ^4 C16+none"
    " A8/2:16(kv=1,qk_norm=0)]"
)
TEXTS = [
    MIXED,
    "d64 v97 untied ffn=swiglu:96 [C3*2 A4/2 C3 A4/4]",
    "d32 v97 ffn=moe:4x2:32 [C3+swiglu:64 A2/1 C5 A2/2]",
    "d32 v97 ffn=none [C3 A2/1 ^0 -+swiglu:32]",
    "d64 v97 ffn=swiglu:96 [M16 W4/2@5 C3&M8(groups=2,heads=4) ^1 A4/2&W4/1@9(sink=1)]",
]


def tokens(length: int = 23, batch: int = 3) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(5))


def decode(model: Model, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits [B, T, V] from chunks; chunks of one token go through `step`."""
    state: ModelState | None = None
    parts = []
    for chunk in torch.split(ids, cuts, 1):
        if state is not None and chunk.shape[1] == 1:
            logits, state = model.step(chunk[:, 0], state)
            parts.append(logits[:, None])
        else:
            logits, state = model.prefill(chunk, state)
            parts.append(logits)
    return torch.cat(parts, 1)


def layer_of(model: Model, index: int) -> ResidualLayer:
    layer = model.layers[str(index)]
    assert isinstance(layer, ResidualLayer)
    return layer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cuts", [[1] * 23, [20, 1, 1, 1], [7, 9, 1, 6]], ids=str)
@torch.no_grad()
def test_decoding_equals_the_parallel_pass(text: str, cuts: list[int]) -> None:
    model = Model(Layout.parse(text), seed=1).eval()
    torch.testing.assert_close(decode(model, tokens(), cuts), model(tokens()), rtol=0, atol=5e-6)


@torch.no_grad()
def test_prefill_leaves_the_state_it_was_given() -> None:
    model = Model(Layout.parse(MIXED), seed=1).eval()
    _, state = model.prefill(tokens())
    first, _ = model.prefill(tokens(4), state)
    again, _ = model.prefill(tokens(4), state)
    assert torch.equal(first, again)


@pytest.mark.parametrize("text", TEXTS)
def test_no_logit_depends_on_a_later_token(text: str) -> None:
    model = Model(Layout.parse(text), seed=1).eval()
    ids = tokens()
    for t in (0, 11, 22):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % 97
        moved = (model(changed) - model(ids)).abs().amax((0, 2))
        assert torch.all(moved[:t] == 0)
        assert moved[t] > 1e-4


@settings(max_examples=examples(40))
@given(layouts(widths=st.sampled_from([32, 64])))
def test_counts_equal_the_module(layout: Layout) -> None:
    with torch.device("meta"):
        model = Model(layout, seed=None)
    assert sum(weight.numel() for weight in model.parameters()) == layout.params.total


@settings(max_examples=15)
@given(layouts(max_depth=5, widths=st.just(32)).map(lambda layout: replace(layout, vocab=97)))
@torch.no_grad()
def test_any_layout_decodes_as_it_trains(layout: Layout) -> None:
    model = Model(layout, seed=2).eval()
    ids = tokens(9, batch=2)
    torch.testing.assert_close(decode(model, ids, [4, 1, 3, 1]), model(ids), rtol=0, atol=2e-5)
    numbers = sum(tensor.numel() for layer in model.prefill(ids)[1] for state in layer for tensor in state)
    assert 4 * numbers == 2 * (layout.kv_bytes(9, element=4.0) + layout.state_bytes())


def test_biases_of_experts_and_divisors_of_rope_are_float32_in_models_of_half_precision() -> None:
    torch.set_default_dtype(torch.float16)  # as transformers does while it makes a model
    try:
        model = Model(Layout.parse("d32 v97 ffn=moe:4x2:16 [A2/1(rope_long=8)]"), seed=None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.embed.weight.dtype == torch.float16
    names = {name.removeprefix("layers.0.") for name, _ in model.named_buffers()}
    assert names == {"ffn.bias.weight", "ffn.bias.load", "mixers.0.rope_short.weight", "mixers.0.rope_long.weight"}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_shared_layer_is_the_same_layer_again() -> None:
    shared = Model(Layout.parse("d32 v97 ffn=swiglu:32 [C3 A2/1 ^0 ^1]"), seed=3)
    plain = Model(Layout.parse("d32 v97 ffn=swiglu:32 [C3 A2/1 C3 A2/1]"), seed=None)
    weights = shared.state_dict()
    twice = {name.replace(f"layers.{i}.", f"layers.{i + 2}."): w for i in (0, 1) for name, w in weights.items()}
    plain.load_state_dict(weights | twice)
    torch.testing.assert_close(shared(tokens()), plain(tokens()), rtol=0, atol=0)
    assert not any(name.startswith(("layers.2.", "layers.3.")) for name in weights)


def test_parallel_mixers_add_up_on_one_norm() -> None:
    layer = layer_of(Model(Layout.parse("d32 v97 ffn=none [C3&A2/1]"), seed=3), 0)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    h = layer.mixer_norm(x)
    expected = x + sum(mixer(h)[0] for mixer in layer.mixers)
    torch.testing.assert_close(layer(x, [None, None])[0], expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_cache_reader_attends_to_the_named_layer() -> None:
    model = Model(Layout.parse("d32 v97 ffn=none [C3&A2/1 C3 A4/1:16(kv=0)]"), seed=3)
    x = model.embed(tokens(7, batch=1))
    source, conv, reader = (layer_of(model, i) for i in range(3))
    attention, mixer = source.mixers[1], reader.mixers[0]
    assert isinstance(attention, GroupedQueryAttention) and isinstance(mixer, GroupedQueryAttention)
    cache = reference_cache(attention.block, attention.state_dict(), source.mixer_norm(x)[0])
    x, _ = source(x, [None, None])
    x, _ = conv(x, [None])
    x = x + reference_gqa(mixer.block, mixer.state_dict(), reader.mixer_norm(x)[0], cache)
    torch.testing.assert_close(model(tokens(7, batch=1)), model.logits(model.norm(x)), rtol=0, atol=1e-5)
    assert {name.split(".")[0] for name in mixer.state_dict()} == {"q", "q_norm", "o"}


def test_start_values_are_the_same_everywhere() -> None:
    before = torch.get_rng_state()
    model = Model(Layout.parse(MIXED), seed=7)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not ours to move"
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    assert digest.hexdigest()[:16] == "e5d40658c6aab481"


def test_layouts_that_differ_in_one_layer_start_alike_elsewhere() -> None:
    one = Model(Layout.parse("d32 v97 ffn=swiglu:32 [C3 C3 A2/1]"), seed=7).state_dict()
    other = Model(Layout.parse("d32 v97 ffn=swiglu:32 [C3 A2/2 A2/1]"), seed=7).state_dict()
    common = [name for name in one if name in other]
    assert len(common) > 15
    assert all(torch.equal(one[name], other[name]) for name in common)
    assert not torch.equal(one["embed.weight"], Model(Layout.parse(TEXTS[3]), seed=8).state_dict()["embed.weight"])


def test_start_values_have_the_sizes_meant() -> None:
    model = Model(Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2 C3 C3]"), seed=0)
    weights = model.state_dict()
    deviations = {
        "embed.weight": 256**-0.5,
        "layers.0.mixers.0.in_proj.weight": 256**-0.5,
        "layers.0.mixers.0.conv.weight": 3**-0.5,
        "layers.0.ffn.down.weight": (512 * 8 * 256) ** -0.5,
        "layers.1.mixers.0.o.weight": (256 * 8 * 256) ** -0.5,
    }
    for name, std in deviations.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.05), name
        assert abs(weights[name].mean().item()) < 0.05 * std, name
    assert torch.all(weights["norm.weight"] == 1)


@torch.no_grad()
def test_first_logits_have_deviation_one() -> None:
    assert Model(Layout.parse(MIXED), seed=0)(tokens()).std().item() == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("mixer", ["C3", "A4/2", "W4/2@8(sink=1)", "M(heads=4)"])
@torch.no_grad()
def test_the_first_block_leaves_the_token_to_those_above(mixer: str, width: int) -> None:
    """What a mixer adds to the residual stream is smaller than the embedding, at every width."""
    layer = Model(Layout.parse(f"d{width} v97 ffn=swiglu:192 [{mixer}*4]"), seed=0)
    x = layer.embed(tokens(32))
    added = layer_of(layer, 0)(x, [None])[0] - x
    assert added.std() < 0.6 * x.std()


@pytest.mark.parametrize("text", TEXTS)
def test_trains_under_bfloat16_autocast(text: str) -> None:
    model = Model(Layout.parse(text), seed=0)
    exact = model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - exact).norm() / exact.norm()
    assert 0 < error < 0.5
    logits.float().square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
