"""Latent attention: both forms are the formula, the cache is latent, and DeepSeek's own class computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.mla import MultiHeadLatentAttention, reference_mla
from nas.model.nn.primitives import draw_weights
from tests.support.twins import twin_of

EXAMPLES = ("L4/32", "L4/24(query=16,nope_dim=8)")


def module(text: str) -> MultiHeadLatentAttention:
    mixer = MultiHeadLatentAttention(Block.parse(text, "mixer"), 64)
    draw_weights(mixer, 3, 1)
    noise = torch.Generator().manual_seed(5)
    for name, weight in mixer.state_dict().items():
        if "norm" in name:
            weight += 0.3 * torch.randn(weight.shape, generator=noise)
    return mixer


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("text", EXAMPLES)
def test_expanded_and_absorbed_forms_are_the_formula(text: str, training: bool) -> None:
    mixer, x = module(text).train(training), inputs(1, 19, 64)
    y, state = mixer(x[:, :7])
    rest, state = mixer(x[:, 7:], state)
    expected = reference_mla(mixer.block, mixer.state_dict(), x[0])
    torch.testing.assert_close(torch.cat([y, rest], 1)[0], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_gradients_of_both_forms_agree() -> None:
    mixer, x = module("L4/24(query=16,nope_dim=8)"), inputs(2, 9, 64)
    gradients = []
    for training in (True, False):
        mixer.train(training).zero_grad()
        mixer(x)[0].square().sum().backward()
        gradients.append(
            {name: weight.grad.clone() for name, weight in mixer.named_parameters() if weight.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys() == dict(mixer.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_the_cache_is_a_latent_and_one_key_per_token() -> None:
    mixer = module("L4/24(rope_dim=6)")
    _, state = mixer(inputs(2, 11, 64))
    assert [tuple(part.shape) for part in state] == [(2, 11, 24), (2, 11, 6)]
    block = mixer.block
    assert block.spec.kv_bytes(block, 64, 11, 2.0) == 11 * (24 + 6) * 2


@pytest.mark.parametrize("rank", [0, 24])
def test_parity_with_deepseek_v2(rank: int) -> None:
    mixer = module(f"L4/32(head_dim=12,nope_dim=16,rope_dim=8,query={rank},rope_theta=10000)").eval()
    x = inputs(1, 13, 64)
    with torch.no_grad():
        expected = twin_of(mixer, 64)(x)
        torch.testing.assert_close(mixer(x)[0], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
