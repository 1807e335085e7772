"""Sliding-window attention: what is seen, what the sinks take away, and transformers' gpt-oss attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.layout import Layout
from nas.model.nn.gqa import GroupedQueryAttention
from nas.model.nn.primitives import draw_weights
from nas.model.nn.swa import SlidingWindowAttention
from tests.support.twins import twin_of

WIDTH, LENGTH = 64, 60


def mixer(text: str) -> SlidingWindowAttention:
    """A module whose sinks are not zero."""
    module = SlidingWindowAttention(Block.parse(text, "mixer"), WIDTH)
    draw_weights(module, 0, depth=4)
    if module.sinks is not None:
        module.sinks.weight.data = torch.linspace(-1, 2, module.heads)
    return module.eval()


def sequence(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("text", ["W4/2@7", "W4/2@7(sink=1)", "W4/2@1"])
def test_a_token_sees_itself_and_window_minus_one_before(text: str) -> None:
    module, x = mixer(text), sequence().requires_grad_()
    window = module.window
    for t in (3, 20, LENGTH - 1):
        (gradient,) = torch.autograd.grad(module(x)[0][:, t].square().sum(), x)
        reached = gradient.abs().amax((0, 2)) > 0
        assert reached.nonzero()[:, 0].tolist() == list(range(max(0, t - window + 1), t + 1))


@pytest.mark.parametrize("window", [LENGTH, 512])
@torch.no_grad()
def test_a_window_as_long_as_the_sequence_is_full_attention(window: int) -> None:
    module = mixer(f"W4/2@{window}")
    full = GroupedQueryAttention(Block.parse("A4/2", "mixer"), WIDTH)
    full.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(sequence())[0], full(sequence())[0], rtol=0, atol=2e-6)


@torch.no_grad()
def test_decoding_far_behind_the_window_equals_the_whole() -> None:
    module, x = mixer("W4/2@16(rope_theta=10000,sink=1)"), sequence(1500)
    whole, _ = module(x)
    _, state = module(x[:, :1490])
    for t in range(1490, 1500):
        y, state = module.step(x[:, t], state)
        torch.testing.assert_close(y, whole[:, t], rtol=0, atol=1e-4)
        assert state[0].shape[2] == 16


@torch.no_grad()
def test_sinks_take_attention_away() -> None:
    with_sinks, x = mixer("W4/2@7(sink=1)"), sequence()
    without = mixer("W4/2@7")
    assert with_sinks.sinks is not None
    with_sinks.sinks.weight.fill_(-1e4)
    torch.testing.assert_close(with_sinks(x)[0], without(x)[0], rtol=0, atol=1e-6)
    with_sinks.sinks.weight.fill_(1e4)
    assert with_sinks(x)[0].abs().max() == 0


@pytest.mark.parametrize("window", [1, 8, LENGTH])
@torch.no_grad()
def test_outputs_are_those_of_transformers(window: int) -> None:
    module, x = mixer(f"W4/2@{window}(qk_norm=0,rope_theta=10000,sink=1)"), sequence()
    torch.testing.assert_close(module(x)[0], twin_of(module, WIDTH)(x), rtol=0, atol=1e-4)


def test_caches_hold_a_window_at_most() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [W16/4@512 W16/4@512(sink=1)]")
    assert layout.kv_bytes(100) == 2 * 2 * 4 * 64 * 100 * 2
    assert layout.kv_bytes(4096) == layout.kv_bytes(512) == 2 * 2 * 4 * 64 * 512 * 2
    assert layout.flops(4096) == layout.flops(512) > layout.flops(511)


def test_sinks_count_one_weight_per_head() -> None:
    plain, sinks = (Layout.parse(f"d64 v256 ffn=none [W4/2@8{end}]").params.total for end in ("", "(sink=1)"))
    assert sinks - plain == 4
