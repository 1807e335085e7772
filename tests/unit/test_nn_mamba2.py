"""Mamba-2: the chunked form is the recurrence at any length, forwards and backwards, and transformers' mixer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.nn.mamba2 import Mamba2, reference_mamba2
from nas.nn.primitives import draw_weights
from nas.nn.ssd import ssd
from nas.testing.twins import twin_of

WIDTH, LENGTH = 32, 150


def mixer(text: str, width: int = WIDTH) -> Mamba2:
    """A module with no weight at a special value."""
    module = Mamba2(Block.parse(text, "mixer"), width)
    draw_weights(module, 0, depth=4)
    noise = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
    return module.eval()


def sequence(batch: int = 2, length: int = LENGTH, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 150])
@torch.no_grad()
def test_any_number_of_chunks_is_the_recurrence(length: int) -> None:
    module, x = mixer("M8(groups=2,heads=4)").double(), sequence(1, length).double()
    wanted = reference_mamba2(module.block, module.state_dict(), x[0])
    torch.testing.assert_close(module(x)[0][0], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cuts", [[64, 64, 22], [63, 1, 1, 85], [1, 149], [149, 1]], ids=str)
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(cuts: list[int]) -> None:
    module, x = mixer("M8(groups=2,heads=4)").double(), sequence().double()
    state, parts = None, []
    for part in torch.split(x, cuts, 1):
        y, state = module(part, state)
        parts.append(y)
    whole, end = module(x)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(state, end, rtol=0, atol=1e-10)


def test_gradients_are_those_of_the_recurrence() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 70, 4, 3), (1, 70, 4), (1, 70, 2, 5), (1, 70, 2, 5), (1, 4, 3, 5)]
    u, decay, b, c, memory = inputs = [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    found = ssd(u, -decay.exp(), b, c, memory)
    wanted = recurrence(u, -decay.exp(), b, c, memory)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    grads = [torch.autograd.grad(sum(part.square().sum() for part in pair), inputs) for pair in (found, wanted)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


def recurrence(u: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """What `ssd` says it computes."""
    repeat = u.shape[2] // b.shape[2]
    out = []
    for t in range(u.shape[1]):
        write, read = (part[:, t].repeat_interleave(repeat, 1) for part in (b, c))
        memory = log_decay[:, t].exp()[..., None, None] * memory + u[:, t, :, :, None] * write[:, :, None]
        out.append((memory @ read[..., None])[..., 0])
    return torch.stack(out, 1), memory


def test_a_memory_that_decays_at_once_has_finite_gradients() -> None:
    module, x = mixer("M8(heads=4)"), sequence()
    with torch.no_grad():
        module.dt_bias.fill_(80.0)
    y, _ = module(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())


@pytest.mark.parametrize("text", ["M16(heads=4)", "M(heads=8)", "M8(groups=2,heads=4)", "M8(conv=3,expand=3,heads=6)"])
@torch.no_grad()
def test_outputs_are_those_of_transformers(text: str) -> None:
    ours = mixer(text)
    theirs = twin_of(ours, WIDTH)
    x = sequence()
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=0, atol=1e-4)
    theirs.module.D += 0.1
    assert (ours(x)[0] - theirs(x)).abs().max() > 1e-3


def test_the_published_mamba2_has_as_many_weights() -> None:
    assert Layout.parse("d768 v50288 ffn=none [M*24]").params.total == 128_989_632


def test_state_is_that_of_the_convolution_and_the_heads() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [M]")
    assert layout.state_bytes() == 4 * (3 * (2048 + 2 * 128) + 32 * 64 * 128)
    assert layout.kv_bytes(1 << 20) == 0


def test_step_sizes_and_decays_start_in_the_published_ranges() -> None:
    module = Mamba2(Block.parse("M", "mixer"), 2048)
    draw_weights(module, 5, depth=2)
    step, rate = torch.nn.functional.softplus(module.dt_bias), module.A_log.exp()
    assert 0.9e-3 < step.min() < 2e-3 and 5e-2 < step.max() < 0.11
    assert 0.99 < rate.min() < 3 and 14 < rate.max() < 16.01
    assert torch.all(module.D == 1) and torch.all(module.conv.bias == 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d32 v64 ffn=none [M(expand=1)]", "inner width 32 is no multiple of 64; give the heads"),
        ("d64 v64 ffn=none [M(heads=3)]", "3 heads do not divide the inner width 128"),
        ("d64 v64 ffn=none [M(groups=3,heads=4)]", "3 groups do not divide 4 heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Layout.parse(text)
