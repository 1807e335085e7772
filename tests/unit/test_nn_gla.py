"""Gated linear attention: the chunked form is the recurrence at any length, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.nn.gla import GatedLinearAttention, gated_linear_attention, reference_gla
from nas.nn.primitives import draw_weights

WIDTH, LENGTH = 32, 150


def mixer(text: str) -> GatedLinearAttention:
    """A module with no weight at a special value."""
    module = GatedLinearAttention(Block.parse(text, "mixer"), WIDTH)
    draw_weights(module, 0, depth=4)
    noise = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
    return module.eval()


def sequence(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 150])
@torch.no_grad()
def test_any_number_of_chunks_is_the_recurrence(length: int) -> None:
    module, x = mixer("G2(rank=4)").double(), sequence(1, length).double()
    wanted = reference_gla(module.block, module.state_dict(), x[0])
    torch.testing.assert_close(module(x)[0][0], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cuts", [[64, 64, 22], [63, 1, 1, 85], [1, 149], [149, 1]], ids=str)
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(cuts: list[int]) -> None:
    module, x = mixer("G4").double(), sequence().double()
    state, parts = None, []
    for part in torch.split(x, cuts, 1):
        y, state = module(part, state)
        parts.append(y)
    whole, end = module(x)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(state, end, rtol=0, atol=1e-10)


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 3 of the paper (Yang et al. 2023), for a batch of heads."""
    out = []
    for t in range(q.shape[1]):
        memory = log_decay[:, t].exp()[..., None] * memory + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((memory.mT @ q[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1), memory


def test_gradients_are_those_of_the_recurrence() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 70, 2, 5), (1, 70, 2, 5), (1, 70, 2, 3), (1, 70, 2, 5), (1, 2, 5, 3)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    q, k, v, decay, memory = inputs
    results, grads = [], []
    for compute in (gated_linear_attention, recurrence):
        pair = compute(q, k, v, -decay.exp(), memory)
        results.append(pair)
        grads.append(torch.autograd.grad(sum(part.square().sum() for part in pair), inputs))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


def test_keys_that_decay_at_once_have_finite_gradients() -> None:
    """A decay of exp(-20) a token: its product over a chunk is zero in float32, and its inverse infinite."""
    module, x = mixer("G4"), sequence()
    with torch.no_grad():
        module.decay_bias.fill_(-320.0)
    y, _ = module(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())


def test_a_mixer_has_as_many_weights_as_in_the_paper() -> None:
    """Section 4.4 with keys as wide as values: five projections of d x d, and 16 d + 16 d to decays."""
    block = Block.parse("G4", "mixer")
    assert block.spec.count(block, 1024).total == 5 * 1024 * 1024 + 2 * 16 * 1024 + 1024 + 256


def test_state_is_that_of_the_heads() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [G8]")
    assert layout.state_bytes() == 4 * 8 * 128 * 128
    assert layout.kv_bytes(1 << 20) == 0


def test_proxies_have_narrower_heads_then_fewer() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [G8 G16:128]")
    assert narrow(layout, 256, 256).format() == "d256 v256 ffn=swiglu:1152 [G8 G16:32]"
    assert narrow(layout, 64, 256).format() == "d64 v256 ffn=swiglu:288 [G4 G8:16]"


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 heads do not divide d_model 32; give the head size"):
        Layout.parse("d32 v64 ffn=none [G3]")
