from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretrain_lab import LAYOUT, SETTINGS, write_corpus, write_tokenizer
from ray import cloudpickle
from safetensors.torch import load_file, save_file
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.pretrain.grow import Growth, grow, grow_checkpoint
from nas.train.pretrain.member_training import MemberToTrain, Work
from nas.train.pretrain.next_token import PretrainingRequest, _unnamed_layout

SMALL = "d64 v96 ffn=swiglu:96 [C3*2 A4/2:16 C3]"
MIXED = "d64 v96 ffn=moe:4x2:32 [C3 M16(heads=8) W4/2@8:16(sink=1)]"


def trained(layout: str) -> Model:
    """Weights that are no start values: gains apart from one, logits of some size."""
    model = Model(Layout.parse(layout), 3)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
        model.embed.weight.mul_(20)
    return model


def tokens() -> Tensor:
    return torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


def grown(small: str, large: str) -> tuple[Model, Model, Growth]:
    model = trained(small)
    larger, growth = grow(Layout.parse(small), model.state_dict(), Layout.parse(large), seed=1)
    return model, larger, growth


@torch.no_grad()
def difference(small: Model, large: Model) -> float:
    small_logits, large_logits = small(tokens()), large(tokens())
    return float((small_logits - large_logits).abs().max() / small_logits.abs().max())


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (SMALL, SMALL),
        (SMALL, "d128 v96 ffn=swiglu:200 [C3*2 A8/4:16 C3]"),
        (SMALL, "d128 v96 untied ffn=swiglu:200 [C3*2 A12/4:16 C3]"),
        (SMALL, "d192 v96 ffn=swiglu:97 [C3*2 A8/2:16 C3*2 A8/2:16]"),
        (SMALL, "d256 v96 ffn=swiglu:200 [C4*2 A4/2:64 C5]"),
        (SMALL.replace("A4/2:16", "A4/2:16(qk_norm=0)"), "d256 v96 ffn=swiglu:200 [C4*2 A12/4:48(qk_norm=0) C3]"),
        (MIXED, "d128 v96 ffn=moe:6x2:40 [C3 M16(heads=16) W8/2@8:32(sink=1)]"),
        (MIXED, "d256 v96 ffn=moe:4x2:32 [C3 M16(heads=8) C3 W4/2@8:16(sink=1) C3]"),
        *(
            (
                f"d64 v96 norms={norms} softcap=9 ffn=geglu:96 [C3 A4/2:16(softcap=2)]",
                f"d128 v96 norms={norms} softcap=9 ffn=geglu:200 [C3 A8/4:16(softcap=2) C3]",
            )
            for norms in ("before", "behind", "both")
        ),
        ("d64 v96 ffn=swiglu:96 [C3 A4/2:16 A4/2:16(kv=1) ^0]", "d128 v96 ffn=swiglu:96 [C3 A4/2:16 A4/2:16(kv=1) ^0]"),
    ],
)
def test_a_larger_model_computes_the_same(small: str, large: str) -> None:
    before, after, growth = grown(small, large)
    assert growth.changes == ()
    assert difference(before, after) < 1e-5


@pytest.mark.parametrize(
    ("large", "why"),
    [
        ("d96 v96 ffn=swiglu:96 [C3*2 A4/2:16 C3]", "no multiple of 64"),
        ("d128 v96 ffn=swiglu:96 [C3*2 A4/2:24 C3]", "heads of 24 numbers"),
        ("d128 v96 ffn=swiglu:96 [C3*2 A2/1:16 C3]", "no room"),
        ("d128 v96 ffn=swiglu:96 [C3*2 A4/2:16(softcap=5) C3]", "softcap differs"),
        ("d128 v96 ffn=swiglu:96 [C3*2 A4/2:16(gate=1) C3]", "gate differs"),
        ("d128 v96 ffn=swiglu:96 [C3*2 A4/2:16(rope_theta=1e4) C3]", "rope_theta differs"),
        ("d128 v96 ffn=swiglu:64 [C3*2 A4/2:16 C3]", "64 hidden units"),
        ("d128 v96 ffn=swiglu:96 [C2*2 A4/2:16 C3]", "2 taps"),
        ("d128 v96 ffn=swiglu:96 [C3 A4/2:16 C3]", "have no place"),
    ],
)
def test_what_changes_the_function_is_said(large: str, why: str) -> None:
    before, after, growth = grown(SMALL, large)
    assert any(why in change for change in growth.changes), growth.changes
    assert "another function" in growth.describe()
    assert difference(before, after) > 1e-4


def test_larger_heads_are_another_function_with_yarn() -> None:
    small = "d64 v96 ffn=swiglu:96 [A4/2:16(rope_factor=8,rope_theta=500,rope_tokens=200,rope_yarn=1)]"
    _, _, wider = grown(small, small.replace("d64", "d128").replace("A4/2", "A8/4"))
    assert wider.changes == ()
    _, _, larger = grown(small, small.replace("d64", "d128").replace(":16", ":32"))
    (change,) = larger.changes
    assert "YaRN rounds its bounds to whole pairs" in change


def test_another_vocabulary_keeps_the_layers() -> None:
    before, after, growth = grown(SMALL, SMALL.replace("v96", "v128"))
    assert "embedding and head drawn" in growth.describe()
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(before.layers["2"](x, [None])[0], after.layers["2"](x, [None])[0], atol=1e-5)


def test_copies_do_not_stay_copies() -> None:
    _, model, _ = grown(SMALL, "d128 v96 ffn=swiglu:192 [C3*2 A8/4:16 C3]")
    gate = model.get_parameter("layers.0.ffn.gate.weight")
    embed = model.get_parameter("embed.weight")
    assert torch.equal(gate[:96, :64] != 0, gate[96:, :64] != 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = tokens()
    loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    torch.autograd.backward(loss)
    optimizer.step()
    assert not torch.allclose(embed[:, :64], embed[:, 64:], atol=1e-6)
    up = model.get_parameter("layers.0.ffn.up.weight").grad
    assert up is not None and not torch.allclose(up[:96], up[96:], rtol=1e-3)


def test_narrower_and_rearranged_models_are_refused() -> None:
    with pytest.raises(InvalidInput, match="width 64 does not grow to width 32"):
        grown(SMALL, "d32 v96 ffn=swiglu:96 [C3 A2/1:16]")
    with pytest.raises(InvalidInput, match="norms and softcap do not change"):
        grown(SMALL, SMALL.replace("v96", "v96 norms=both"))
    with pytest.raises(InvalidInput, match="grow in width alone"):
        grown("d64 v96 ffn=swiglu:96 [C3 ^0]", "d64 v96 ffn=swiglu:96 [C3 ^0 C3]")


def test_the_layout_of_start_weights_is_in_the_key_if_their_file_names_none(tmp_path: Path, home: Path) -> None:
    named, plain = tmp_path / "named.safetensors", tmp_path / "plain.safetensors"
    save_weights(trained(SMALL), named)
    save_file(load_file(named), plain)
    assert _unnamed_layout(named, None) is None
    assert _unnamed_layout(named, Layout.parse(SMALL)) is None
    assert _unnamed_layout(plain, Layout.parse(SMALL)) == Layout.parse(SMALL).format()
    with pytest.raises(InvalidInput, match="header names no layout"):
        _unnamed_layout(plain, None)
    with pytest.raises(InvalidInput, match=r"--from-layout: .*named\.safetensors holds weights of"):
        _unnamed_layout(named, Layout.parse(MIXED))
    corpus = write_corpus(tmp_path / "corpus")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", corpus)

    def key(start: Path, layout: str | None) -> str:
        request = PretrainingRequest(
            (corpus,), SETTINGS, start=start, start_layout=None if layout is None else Layout.parse(layout)
        )  # fmt: skip
        return request.plan(MemberToTrain(tmp_path, LAYOUT, tokenizer, ()), lambda line: None).key

    assert key(plain, SMALL) != key(plain, MIXED)
    assert key(named, SMALL) == key(named, None)


def test_worker_processes_get_the_same_plan(tmp_path: Path, home: Path) -> None:
    save_weights(trained(SMALL), tmp_path / "small.safetensors")
    corpus = write_corpus(tmp_path / "corpus")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", corpus)
    request = PretrainingRequest((corpus,), SETTINGS, start=tmp_path / "small.safetensors")
    plan = request.plan(MemberToTrain(tmp_path, LAYOUT, tokenizer, ()), lambda line: None)
    work = Work(plan, tmp_path / "start.safetensors", tmp_path, 1, tmp_path, 60.0)
    received = cloudpickle.loads(cloudpickle.dumps(work))
    assert received == work and received.plan.key == plan.key


def test_a_checkpoint_is_grown_from_its_header_or_from_a_given_layout(tmp_path: Path) -> None:
    model, large = trained(SMALL), Layout.parse("d128 v96 ffn=swiglu:192 [C3*2 A8/4:16 C3]")
    save_weights(model, tmp_path / "small.safetensors")
    for layout in (None, Layout.parse(SMALL)):
        larger, _ = grow_checkpoint(tmp_path / "small.safetensors", layout, large, seed=0)
        assert difference(model, larger) < 1e-5
    with pytest.raises(InvalidInput, match="does not fit"):
        grow_checkpoint(tmp_path / "small.safetensors", Layout.parse(MIXED), large, seed=0)
    (tmp_path / "no.safetensors").write_text("no")
    with pytest.raises(InvalidInput, match="no safetensors file"):
        grow_checkpoint(tmp_path / "no.safetensors", Layout.parse(SMALL), large, seed=0)
