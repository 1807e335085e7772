"""The class of layouts that no stock class of transformers holds: logits, padding, checkpointing, hidden states."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from exhaustive import mostly_exhaustive
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nas.core.layout import Layout
from nas.model.nn.kinds import MODULES
from nas.model.nn.model import Model
from nas.train.release.bundle import bundle
from nas.train.release.huggingface import own_config

LAYOUTS = {
    "conv": "d64 v96 ffn=swiglu:64 [C2 C5]",
    "gqa": "d64 v96 ffn=swiglu:64 [A4/2 A4/1(rope_theta=0)]",
    "swa": "d64 v96 ffn=swiglu:64 [W4/2@3 W4/2@4(sink=1)]",
    "canon": "d64 v96 ffn=swiglu:64 [A4/2(canon=4) W4/2@3(canon=3,sink=1) A4/2(kv=0)]",
    "relu2": "d64 v96 ffn=relu2:64 [C3 A4/2]",
    "shared": "d64 v96 ffn=moe:4x2:32(shared=2) [C3 A4/2]",
    "mla": "d64 v96 ffn=swiglu:64 [L4/32 L4/24(query=16,nope_dim=8) L2/16:12(rope_theta=0)]",
    "mamba2": "d64 v96 ffn=swiglu:64 [M16 M8(groups=2)]",
    "gdn": "d64 v96 ffn=swiglu:64 [D4 D4/2:24]",
    "gla": "d64 v96 ffn=swiglu:64 [G4 G2:24(rank=4)]",
    "mlstm": "d64 v96 ffn=swiglu:64 [X4 X2:24(key_dim=8)]",
    "linear": "d64 v96 ffn=swiglu:64 [K4 K2:24(conv=4)]",
    "deltanet": "d64 v96 ffn=swiglu:64 [N4 N2:24(conv=0)]",
    "mamba": "d64 v96 ffn=swiglu:64 [H H4(conv=0,expand=1)]",
    "states": "d64 v96 ffn=swiglu:64 [S4 S4(conv=3,liquid=1) V V5(conv=4) F F8(conv=2) R R40(conv=2)]",
    "longconv": "d64 v96 ffn=swiglu:64 [Y Y30(conv=0)]",
    "moe": "d64 v96 untied ffn=moe:4x2:32 [C3 A4/2]",
    "mixed": "d64 v96 ffn=moe:4x2:32 [C4&A2/1 M16+none W4/2@3(sink=1)+swiglu:64 ^0 A4/2(rope_theta=0) A4/2 A4/2(kv=5)]",
}
LENGTHS = (9, 4, 7, 1)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout.parse(LAYOUTS[request.param])


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The modelling file of a released folder with all kinds, imported from there."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "released").mkdir()
    for name, content in bundle(MODULES).items():
        (folder / "released" / name).write_bytes(content)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("released.modeling_hilnas")
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "released"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def original(layout: Layout) -> Model:
    """The model that the class copies, with no weight at a special value."""
    model, noise = Model(layout, seed=3).eval(), torch.Generator().manual_seed(4)
    for tensor in model.state_dict().values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=noise)
    return model


@pytest.fixture(scope="module")
def model(code: Any, layout: Layout, original: Model) -> Any:
    """The class with the same weights; a test that changes it changes a copy."""
    config = code.HilnasConfig(**own_config(layout), pad_token_id=0, eos_token_id=None)
    causal_lm = code.HilnasForCausalLM(config).eval()
    causal_lm.load_state_dict(original.state_dict())
    return causal_lm


def texts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 96, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T]; the ids of padding are of no account."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), 7)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(rows):
        at = slice(longest - len(text), None) if side == "left" else slice(len(text))
        ids[row, at], mask[row, at] = text, 1
    return ids, mask


@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_logits_are_those_of_our_model(original: Model, model: Any, side: str) -> None:
    """Over more than two chunks of every chunked form; padding moves a text across their borders.

    Errors are relative to the greatest logit: in float32 either model is 1e-5 from itself in float64.
    """
    rows = texts(lengths=(150,) if side == "none" else (150, 91, 64))
    ids, mask = padded(rows, side)
    logits = model(ids, attention_mask=None if side == "none" else mask).logits
    for row, text in enumerate(rows):
        expected = original(text[None])[0]
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(logits[row][mask[row].bool()], expected, rtol=0, atol=atol)
        assert expected.std() > 0.1, "too flat to tell models apart"


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_row_of_a_padded_batch_is_what_it_is_alone(model: Any, side: str) -> None:
    rows = texts()
    ids, mask = padded(rows, side)
    logits = model(ids, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    for row, text in enumerate(rows):
        alone = model(text[None]).logits[0]
        # A norm behind DeltaNet's memory makes rounding of a small first output large.
        torch.testing.assert_close(logits[row][mask[row].bool()], alone, rtol=0, atol=1e-4)
        assert len(text) == 1 or alone.std() > 0.1, "too flat to tell rows apart"


class Sums(nn.Module):
    """A kind of another distribution that does nothing about padding."""

    def __init__(self, block: object, d_model: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, state: tuple[Tensor] | None, padding: object) -> tuple[Tensor, tuple[Tensor]]:
        total = x.cumsum(1) + (state[0] if state else 0)
        return total, (total[:, -1:],)


@torch.no_grad()
def test_mixers_are_given_zeros_at_padding(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["released.nn_kinds"].MODULES, "conv", Sums)
    config = own_config(Layout.parse("d64 v96 ffn=swiglu:64 [C3 A4/2]"))
    model: Any = code.HilnasForCausalLM(code.HilnasConfig(**config)).eval()
    rows = texts()
    ids, mask = padded(rows, "left")
    logits = model(ids, attention_mask=mask).logits
    for row, text in enumerate(rows):
        torch.testing.assert_close(logits[row][mask[row].bool()], model(text[None]).logits[0], rtol=0, atol=1e-5)


def check_continuation(model: Any, tokens: int, **options: object) -> None:
    """A padded batch is continued as each of its rows."""
    rows = texts(1)
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": tokens, "do_sample": False, **options}
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, text in enumerate(rows):
        alone = model.generate(text[None], attention_mask=torch.ones(1, len(text)), **options)[0, len(text) :]
        assert together[row].tolist() == alone.tolist()


def test_a_padded_batch_is_continued_as_each_of_its_rows(model: Any) -> None:
    check_continuation(model, 8)


# Without a cache each step is a forward pass of a padded batch, which the tests above have of every kind.
@pytest.mark.parametrize("layout", mostly_exhaustive(LAYOUTS, "mixed"), indirect=True)
def test_a_padded_batch_is_continued_without_a_cache(model: Any) -> None:
    check_continuation(model, 4, use_cache=False)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_the_cache_of_a_padded_batch_goes_on(model: Any, side: str) -> None:
    """Two padded chunks: padding lies between the tokens of a text, as after a first turn of a chat."""
    first, second = texts(2), texts(3)[::-1]
    (ids, mask), (more, more_mask) = padded(first, side), padded(second, "right")
    cache = model(ids, attention_mask=mask).past_key_values
    both = model(more, attention_mask=torch.cat([mask, more_mask], 1), past_key_values=cache).logits
    for row in range(len(first)):
        whole = model(torch.cat([first[row], second[row]])[None]).logits[0, len(first[row]) :]
        torch.testing.assert_close(both[row][more_mask[row].bool()], whole, rtol=0, atol=1e-5)


def test_beams_keep_their_own_padding(model: Any) -> None:
    check_continuation(model, 4, num_beams=3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(model: Any, reentrant: bool) -> None:
    model = copy.deepcopy(model)
    ids, mask = padded(texts(), "right")
    labels = ids.masked_fill(mask == 0, -100)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model.train()
    loss, grads = step()
    runs = count_runs(model)
    model._set_gradient_checkpointing(True, lambda run, x: checkpoint(run, x, use_reentrant=reentrant))
    again, checkpointed = step()
    assert any(count == 2 for count in runs.values()), "a layer was computed again for its gradient"
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(checkpointed[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def count_runs(model: Any) -> dict[str, int]:
    """Counts how often each layer's norm is computed from now on."""
    runs: dict[str, int] = {}

    def counted(name: str) -> Any:
        def hook(*_: object) -> None:
            runs[name] = runs.get(name, 0) + 1

        return hook

    for name, layer in model.layers.items():
        layer.mixer_norm.register_forward_hook(counted(name))
    return runs


@torch.no_grad()
def test_hidden_states_are_those_of_every_layer(model: Any, layout: Layout) -> None:
    ids, mask = padded(texts(), "left")
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == layout.depth + 1
    assert torch.equal(output.hidden_states[0], model.embed(ids))
    head = model.embed.weight if model.head is None else model.head.weight
    torch.testing.assert_close(output.hidden_states[-1] @ head.T, output.logits, rtol=0, atol=1e-5)
    assert model(ids, attention_mask=mask).hidden_states is None
    assert torch.equal(model(ids, attention_mask=mask, return_dict=False)[0], output.logits)


@torch.no_grad()
def test_padding_in_the_middle_of_a_chunk_is_refused(model: Any) -> None:
    """A convolution would take it for text that is zero."""
    ids, holes = torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(ValueError, match="padding must come before or after"):
        model(ids, attention_mask=holes)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match="padding must come before or after"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1]]), past_key_values=cache)


def test_masks_of_other_shapes_are_refused(model: Any) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    for mask in (torch.ones(1, 3), torch.ones(1, 1, 4, 4)):
        with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\]"):
            model(ids, attention_mask=mask)


def test_start_values_are_those_of_the_kinds(code: Any, layout: Layout) -> None:
    """A model without a checkpoint; what a checkpoint has filled stays as it is."""
    model = code.HilnasForCausalLM(code.HilnasConfig(**own_config(layout)))
    drawn = Model(layout, seed=0).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
        if name.startswith("layers.") and drawn[name].numel() > 500:
            assert tensor.std().item() == pytest.approx(drawn[name].std().item(), rel=0.35), name
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for module in model.modules():
        module._is_hf_initialized = False
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_epsilon_is_refused(code: Any) -> None:
    config = own_config(Layout.parse("d64 v96 ffn=swiglu:64 [C3 A4/2]"))
    with pytest.raises(ValueError, match="norm_eps must be 1e-05"):
        code.HilnasForCausalLM(code.HilnasConfig(**config | {"norm_eps": 1e-6}))
