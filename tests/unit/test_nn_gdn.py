"""Gated DeltaNet: the chunked form is the recurrence at any length, forwards and backwards, and transformers' mixer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.nn.gdn import GatedDeltaNet, delta_rule, reference_gdn
from nas.nn.primitives import draw_weights
from nas.testing.twins import twin_of

WIDTH, LENGTH = 32, 150


def mixer(text: str, width: int = WIDTH) -> GatedDeltaNet:
    """A module with no weight at a special value."""
    module = GatedDeltaNet(Block.parse(text, "mixer"), width)
    draw_weights(module, 0, depth=4)
    noise = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
    return module.eval()


def sequence(batch: int = 2, length: int = LENGTH, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("length", [1, 64, 65, 150])
@torch.no_grad()
def test_any_number_of_chunks_is_the_recurrence(length: int) -> None:
    module, x = mixer("D2/1:8").double(), sequence(1, length).double()
    wanted = reference_gdn(module.block, module.state_dict(), x[0])
    torch.testing.assert_close(module(x)[0][0], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cuts", [[64, 64, 22], [63, 1, 1, 85], [1, 149], [149, 1]], ids=str)
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(cuts: list[int]) -> None:
    module, x = mixer("D4/2").double(), sequence().double()
    state, parts = None, []
    for part in torch.split(x, cuts, 1):
        y, state = module(part, state)
        parts.append(y)
    whole, end = module(x)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(state, end, rtol=0, atol=1e-10)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """What `delta_rule` says it computes."""
    out = []
    for t in range(q.shape[1]):
        memory = log_decay[:, t].exp()[..., None, None] * memory
        missing = v[:, t] - (memory.mT @ k[:, t, :, :, None])[..., 0]
        memory = memory + (beta[:, t, :, None] * k[:, t])[..., None] * missing[..., None, :]
        out.append((memory.mT @ q[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1), memory


def test_gradients_are_those_of_the_recurrence() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 70, 2, 5), (1, 70, 2, 5), (1, 70, 2, 3), (1, 70, 2), (1, 70, 2), (1, 2, 5, 3)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    q, k, v, decay, beta, memory = inputs
    results, grads = [], []
    for compute in (delta_rule, recurrence):
        pair = compute(q, torch.nn.functional.normalize(k, dim=-1), v, -decay.exp(), beta.sigmoid(), memory)
        results.append(pair)
        grads.append(torch.autograd.grad(sum(part.square().sum() for part in pair), inputs))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_key_that_repeats_is_written_as_often_as_it_comes() -> None:
    """The worst case of the triangular system: one key over and over, never forgotten."""
    k = torch.nn.functional.normalize(torch.ones(1, 1, 1, 8), dim=-1).expand(1, 200, 1, 8)
    v = torch.randn(1, 200, 1, 4, generator=torch.Generator().manual_seed(0))
    flat = torch.zeros(1, 200, 1)
    y, _ = delta_rule(k, k, v, flat, flat + 0.999, torch.zeros(1, 1, 8, 4))
    torch.testing.assert_close(y, v, rtol=0, atol=0.02)


def test_a_memory_that_decays_at_once_has_finite_gradients() -> None:
    module, x = mixer("D4"), sequence()
    with torch.no_grad():
        module.dt_bias.fill_(80.0)
    y, _ = module(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())


@pytest.mark.parametrize("text", ["D4/2:8", "D4", "D2/1:16(conv=3)"])
@torch.no_grad()
def test_outputs_are_those_of_transformers(text: str) -> None:
    ours = mixer(text)
    theirs = twin_of(ours, WIDTH)
    x = sequence()
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=0, atol=1e-5)
    theirs.module.A_log += 0.1
    assert (ours(x)[0] - theirs(x)).abs().max() > 1e-4


def test_a_mixer_has_as_many_weights_as_a_linear_layer_of_qwen3_next() -> None:
    """Of its config: width 2048, 16 key heads and 32 value heads of 128 numbers, 4 taps."""
    block = Block.parse("D32/16:128", "mixer")
    assert block.spec.count(block, 2048).total == 2048 * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 64 + 128 + 4096 * 2048


def test_state_is_that_of_the_convolution_and_the_heads() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [D8/4]")
    assert layout.state_bytes() == 4 * (3 * (2 * 4 + 8) * 128 + 8 * 128 * 128)
    assert layout.kv_bytes(1 << 20) == 0


def test_proxies_have_narrower_heads_then_fewer() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [D8 D16/8:128 A16/8]")
    assert narrow(layout, 256, 256).format() == "d256 v256 ffn=swiglu:1152 [D8 D16/8:32 A16/8]"
    assert narrow(layout, 64, 256).format() == "d64 v256 ffn=swiglu:288 [D4 D8/4:16 A8/4]"


def test_decays_start_as_those_of_mamba2() -> None:
    module = GatedDeltaNet(Block.parse("D64:4", "mixer"), 64)
    draw_weights(module, 5, depth=2)
    step, rate = torch.nn.functional.softplus(module.dt_bias), module.A_log.exp()
    assert 0.9e-3 < step.min() < 2e-3 and 5e-2 < step.max() < 0.11
    assert 0.99 < rate.min() < 3 and 14 < rate.max() < 16.01


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d32 v64 ffn=none [D3]", "3 heads do not divide d_model 32; give the head size"),
        ("d64 v64 ffn=none [D4/3]", "3 heads of queries and keys do not divide 4 heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Layout.parse(text)
