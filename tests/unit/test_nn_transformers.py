"""Same weights, same logits as transformers' own classes; same counts where published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.model.nn.kinds import MODULES
from nas.model.nn.model import Model
from nas.model.nn.primitives import draw_weights
from nas.model.nn.transformers import TensorName, tensor_names, to_transformers, transformers_config
from tests.support.twins import twin_of

DENSE = [
    "d64 v128 ffn=swiglu:160 [C3*2 A4/2 C3 A4/2 C3]",
    "d64 v128 ffn=swiglu:96 [C2 A4/4 C2]",
    "d64 v128 ffn=swiglu:96 [C5 A8/1 C5]",
    "d96 v128 untied ffn=swiglu:96 [C9 A6/2(rope_theta=10000) C9]",
    "d64 v128 ffn=swiglu:96 [C3 A4/2:32]",
]
MIXTURES = [
    "d64 v128 ffn=moe:8x2:32 [C3+swiglu:96*2 A4/2 C3 A4/2]",
    "d64 v128 ffn=moe:4x4:16 [C4 A4/1]",
    "d64 v128 untied ffn=moe:4x1:48 [C3+swiglu:64 A4/4 C3]",
]
ATTENTION_ONLY = [
    "d64 v128 ffn=swiglu:96 [A4/2*3]",
    "d64 v128 untied ffn=swiglu:96 [A4/4:32*2]",
    "d64 v128 ffn=swiglu:96 [A8/2(rope_theta=10000) W8/2@16(rope_theta=10000)*2]",
    "d64 v128 ffn=swiglu:96 [A4/2(qk_norm=0)*3]",
    "d64 v128 ffn=swiglu:96 [A2/1(qk_norm=0,rope_factor=8,rope_theta=10000,rope_tokens=32)*2]",
    "d64 v128 ffn=swiglu:96 [A2/1(rope_factor=4,rope_theta=100) W2/1@16(rope_factor=4,rope_theta=100)]",
]


def upstream_of(layout: Layout) -> Any:
    """Transformers' own module of `layout`."""
    config = transformers_config(layout)
    upstream = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert [type(upstream).__name__] == config["architectures"]
    return upstream


def random_pair(layout: Layout) -> tuple[Model, Any]:
    """Our model and that of transformers with the same weights, none of them at a special value."""
    model, upstream = Model(layout, seed=3).eval(), upstream_of(layout).eval()
    noise = torch.Generator().manual_seed(4)
    for tensor in model.state_dict().values():
        tensor += 0.05 * torch.randn(tensor.shape, generator=noise)
    missing, unexpected = upstream.load_state_dict(to_transformers(layout, model.state_dict()), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if layout.tied else [])
    upstream.tie_weights()
    return model, upstream


@pytest.mark.parametrize("text", DENSE + MIXTURES + ATTENTION_ONLY)
@torch.no_grad()
def test_logits_are_those_of_transformers(text: str) -> None:
    layout = Layout.parse(text)
    model, upstream = random_pair(layout)
    ids = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = model(ids)
    torch.testing.assert_close(logits, upstream(ids).logits, rtol=0, atol=1e-4)
    assert logits.std() > 0.1, "too flat to tell models apart"


@pytest.mark.parametrize("text", ATTENTION_ONLY[-2:])
@torch.no_grad()
def test_scaled_positions_are_those_of_transformers_with_a_cache(text: str) -> None:
    layout = Layout.parse(text)
    model, upstream = random_pair(layout)
    ids = torch.randint(1, 128, (1, 80), generator=torch.Generator().manual_seed(0))
    expected = upstream(ids).logits
    logits, state = model.prefill(ids[:, :50])
    rows = [logits]
    for token in ids[0, 50:]:
        logits, state = model.step(token[None], state)
        rows.append(logits[:, None])
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=0, atol=1e-4)
    plain = Layout.parse(
        text.replace("rope_factor=8,", "").replace(",rope_tokens=32", "").replace("rope_factor=4,", "")
    )
    unscaled = Model(plain, seed=None).eval()
    unscaled.load_state_dict(model.state_dict())
    assert (unscaled(ids) - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("relu2:96", "up_proj.weight"),
        ("moe:8x2:24(shared=1)", "shared_experts.up_proj.weight"),
        ("moe:4x3:16(shared=3)", "gate.e_score_correction_bias"),
    ],
)
@torch.no_grad()
def test_feed_forwards_are_those_of_transformers(text: str, changed: str) -> None:
    block = Block.parse(text, "ffn")
    module: Any = MODULES[block.kind](block, 64)
    draw_weights(module, 0, depth=4)
    generator = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    x = torch.randn(2, 40, 64, generator=generator)
    twin = twin_of(module, 64)
    expected = twin(x)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=4e-6 * float(expected.abs().max()))
    twin.module.state_dict()[changed][0] += 0.5
    assert (twin(x) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("text", [DENSE[0], MIXTURES[0], ATTENTION_ONLY[0], ATTENTION_ONLY[3]])
@torch.no_grad()
def test_their_weights_come_back(text: str) -> None:
    layout = Layout.parse(text)
    model, upstream = random_pair(layout)
    state = upstream.state_dict()
    back = {key: tensor for name in tensor_names(layout) for key, tensor in name.split(state).items()}
    assert back.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, back[name]), name


@pytest.mark.parametrize("text", [DENSE[3], MIXTURES[0], ATTENTION_ONLY[2], ATTENTION_ONLY[3]])
def test_the_base_of_rope_is_there_for_transformers_4_and_5(text: str) -> None:
    layout = Layout.parse(text)
    config = transformers_config(layout)
    theta = next(mixer.get("rope_theta") for layer in layout.layers for mixer in layer.mixers if mixer.kind == "gqa")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
    read = AutoConfig.for_model(**config)
    assert read.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize("name", LFM2)
def test_published_counts_are_those_of_transformers(name: str) -> None:
    layout = Layout.parse(LFM2[name])
    with torch.device("meta"):
        upstream, model = upstream_of(layout), Model(layout, seed=None)
    upstream.tie_weights()
    assert sum(weight.numel() for weight in upstream.parameters()) == layout.params.total
    renamed = to_transformers(layout, model.state_dict())
    shapes = {key: tensor.shape for key, tensor in upstream.state_dict().items() if key != "lm_head.weight"}
    assert {key: tensor.shape for key, tensor in renamed.items()} == shapes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d64 v128 ffn=swiglu:96 [C3 C4]", "one convolution for all layers, not C3, C4"),
        ("d64 v128 ffn=swiglu:96 [A4/2 A4/4]", "one attention"),
        ("d64 v128 ffn=swiglu:96 [C3 C3+swiglu:64]", "one dense feed-forward"),
        ("d64 v128 ffn=swiglu:96 [C3+moe:4x2:32 C3]", "dense ones first"),
        ("d64 v128 ffn=swiglu:96 [C3+none C3]", "feed-forward in each layer"),
        ("d64 v128 ffn=swiglu:96 [C3&A4/2]", "exactly one mixer"),
        ("d64 v128 ffn=swiglu:96 [C3 ^0]", "layer 1"),
        ("d64 v128 ffn=swiglu:96 [C3 A4/2(qk_norm=0)]", "QK-norm"),
        ("d64 v128 ffn=swiglu:96 [A4/2 W4/2@8 W4/2@16]", "one window"),
        ("d64 v128 ffn=swiglu:96 [W4/2@8(sink=1)]", "sinks"),
        ("d64 v128 ffn=swiglu:96 [W4/2@8(qk_norm=0)]", "no sliding windows"),
        ("d64 v128 ffn=swiglu:96 [A4/2 A4/2(kv=0)]", "cache of its own"),
        ("d64 v128 ffn=swiglu:96 [A4/2(rope_theta=0)]", "positions"),
        ("d64 v128 ffn=swiglu:96 [A4/2(canon=4)]", "canon"),
        ("d64 v128 ffn=swiglu:96 [C3 A4/2(canon=4)]", "canon"),
        ("d64 v128 ffn=relu2:96 [C3 A4/2]", "no relu2 feed-forwards"),
        ("d64 v128 ffn=moe:4x2:32(shared=1) [C3 A4/2]", "no shared experts"),
    ],
)
def test_what_transformers_cannot_hold_is_said(text: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        transformers_config(Layout.parse(text))


@pytest.mark.parametrize("text", ["d64 v9 ffn=none [C3]", "d64 v9 ffn=swiglu:32 [A4/2(qk_norm=0) C3]"])
def test_layers_without_names_of_theirs_are_refused(text: str) -> None:
    layout = Layout.parse(text)
    with pytest.raises(Unsupported, match="layer 0"):
        to_transformers(layout, Model(layout).state_dict())


def test_a_missing_tensor_is_named() -> None:
    layout = Layout.parse(DENSE[0])
    with pytest.raises(InvalidInput, match=r"lacks embed\.weight"):
        to_transformers(layout, {})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (TensorName(("a",), "t", tap_axis=True), (3,)),
        (TensorName(("a",), "t", tap_axis=True), (3, 0, 2)),
        (TensorName(("a", "b"), "t"), (4,)),
        (TensorName(("a",), "t", centred=1), (4,)),
        (TensorName(("a",), "t", order=(1, 0), order_axis=1), (4,)),
        (TensorName(("a",), "t", transposed=2), (4,)),
        (TensorName(("a",), "t", transposed=2), (5, 3)),
        (TensorName(("a",), "t"), ()),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: TensorName, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"^t has"):
        name.split({"t": torch.ones(shape)})
