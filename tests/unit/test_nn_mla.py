"""Latent attention: both forms are the formula, the cache is latent, and DeepSeek's own class computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.nn.mla import MultiHeadLatentAttention, reference_mla
from nas.nn.primitives import draw_weights

EXAMPLES = ("L4/32", "L4/24(query=16,nope_dim=8)")


def module(text: str) -> MultiHeadLatentAttention:
    made = MultiHeadLatentAttention(Block.parse(text, "mixer"), 64)
    draw_weights(made, 3, 1)
    noise = torch.Generator().manual_seed(5)
    for name, weight in made.state_dict().items():
        if "norm" in name:
            weight += 0.3 * torch.randn(weight.shape, generator=noise)
    return made


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
    found = []
    for training in (True, False):
        mixer.train(training).zero_grad()
        mixer(x)[0].square().sum().backward()
        found.append(
            {name: weight.grad.clone() for name, weight in mixer.named_parameters() if weight.grad is not None}
        )
    assert found[0].keys() == found[1].keys() == dict(mixer.named_parameters()).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_the_cache_is_a_latent_and_one_key_per_token() -> None:
    mixer = module("L4/24(rope_dim=6)")
    _, state = mixer(inputs(2, 11, 64))
    assert [tuple(part.shape) for part in state] == [(2, 11, 24), (2, 11, 6)]
    block = mixer.block
    assert block.spec.kv_bytes(block, 64, 11, 2.0) == 11 * (24 + 6) * 2


@pytest.mark.parametrize("rank", [0, 24])
def test_parity_with_deepseek_v2(rank: int) -> None:
    """Of transformers' class, whose RoPE pairs neighbours, and whose keys and values are one projection."""
    import transformers
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as theirs

    heads, latent, nope, rope, value = 4, 32, 16, 8, 12
    given = f"head_dim={value},nope_dim={nope},rope_dim={rope},query={rank},rope_theta=10000"
    ours = module(f"L{heads}/{latent}({given})").eval()
    config = transformers.DeepseekV2Config(
        hidden_size=64,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=rank or None,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    layer = theirs.DeepseekV2Attention(config, layer_idx=0).eval()
    pairs = torch.arange(rope).view(2, -1).T.flatten()  # number i of the first half comes next to i of the second
    weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    asked = weights["q_up.weight" if rank else "q.weight"].view(heads, nope + rope, -1)
    asked = torch.cat([asked[:, :nope], asked[:, nope:][:, pairs]], 1).flatten(0, 1)
    down = torch.cat([weights["kv_down.weight"][:latent], weights["kv_down.weight"][latent:][pairs]])
    keys = weights["k_up.weight"].view(heads, latent, nope).transpose(1, 2)
    both = torch.cat([keys, weights["v_up.weight"].view(heads, value, latent)], 1).flatten(0, 1)
    state = {
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_layernorm.weight": weights["kv_norm.weight"],
        "kv_b_proj.weight": both,
        "o_proj.weight": weights["o.weight"],
    }
    if rank:
        state |= {
            "q_a_proj.weight": weights["q_down.weight"],
            "q_a_layernorm.weight": weights["q_norm.weight"],
            "q_b_proj.weight": asked,
        }
    else:
        state["q_proj.weight"] = asked
    layer.load_state_dict(state)
    for name, part in layer.named_children():
        if name.endswith("_layernorm"):
            part.variance_epsilon = 1e-5
    x, length = inputs(1, 13, 64), 13
    turns = theirs.DeepseekV2RotaryEmbedding(config)(x, torch.arange(length)[None])
    mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
    with torch.no_grad():
        expected = layer(x, position_embeddings=turns, attention_mask=mask)[0]
        torch.testing.assert_close(ours(x)[0], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
