"""The mixture's router: what chooses, what weighs, what is counted, and how the bias balances."""

from __future__ import annotations

import torch

from nas.core.block import Block
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.moe import MixtureOfExperts, balance_experts
from nas.model.nn.primitives import draw_weights
from nas.model.nn.seeds import stacked


def mixture(text: str = "moe:8x2:16", seed: int = 0) -> MixtureOfExperts:
    module = MixtureOfExperts(Block.parse(text, "ffn"), 32)
    draw_weights(module, seed, depth=1)
    return module


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(0))


def test_bias_chooses_but_does_not_weigh() -> None:
    module = mixture()
    tokens = inputs(50)[0]
    module.bias.weight[:2] = torch.tensor([10.0, 20.0])
    weights, chosen = module.route(tokens)
    assert torch.equal(chosen, torch.tensor([[1, 0]]).expand(50, 2))
    scores = module.router(tokens).sigmoid()[:, [1, 0]]
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True), rtol=1e-4, atol=0)


def test_loads_are_counted_in_training_only() -> None:
    module = mixture()
    x = inputs(40)
    module.eval()(x)
    assert module.bias.load.sum() == 0
    module.train()(x)
    module(x)
    chosen = module.route(x[0])[1]
    assert torch.equal(module.bias.load, 2.0 * chosen.flatten().bincount(minlength=8))


def test_all_experts_for_every_token_are_the_same_as_the_chosen_ones_alone() -> None:
    """GPUs take the former form with stacked seeds, which is slower on a CPU."""
    tokens = torch.cat([inputs(40), inputs(40) + 0.1])
    results = []
    for dense in (False, True):
        module = stacked([mixture(seed=1), mixture(seed=2)])
        assert isinstance(module, MixtureOfExperts)
        rows = tokens.flatten(0, 1)
        y = module._dense(rows, *module.route(rows)) if dense else module(tokens).flatten(0, 1)
        y.square().sum().backward()
        assert module.bias.load.sum(1).tolist() == [80.0, 80.0]
        results.append([y, module.bias.load, *(weight.grad for weight in module.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_bias_moves_towards_starved_experts_by_the_rate() -> None:
    module = mixture("moe:4x1:16")
    module.bias.update(torch.tensor([10.0, 0.0, 5.0, 5.0]), rate=0.25)
    assert module.bias.weight.tolist() == [-0.25, 0.25, 0.0, 0.0]


def test_balancing_evens_out_loads() -> None:
    module = mixture(seed=4)
    x = inputs(512) + 0.5  # a common part in all tokens makes some experts everyone's favourite
    module(x)
    before = balance_experts(module, 0.0)[0]
    for _ in range(150):
        module(x)
        load = balance_experts(module, 0.01)[0]
    assert before.max() > 1.5 * before.mean(), "nothing to balance"
    assert load.max() < 1.2 * load.mean()
    assert module.bias.load.sum() == 0


def test_balancing_reaches_every_mixture_of_a_model() -> None:
    model = Model(Layout.parse("d32 v64 ffn=moe:4x2:16 [C3 C3+swiglu:32 C3 ^0]"), seed=0)
    model(torch.arange(60).view(2, 30))
    loads = balance_experts(model, 0.5)
    assert [int(load.sum()) for load in loads] == [2 * 2 * 60, 2 * 60]
    biases = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("ffn.bias.weight")}
    assert set(biases) == {"layers.0.ffn.bias.weight", "layers.2.ffn.bias.weight"}
    assert all(bias.abs().max() == 0.5 for bias in biases.values())


def test_no_gradient_reaches_the_bias_but_the_router_learns() -> None:
    module = mixture()
    module(inputs(20)).square().sum().backward()
    assert module.router.weight.grad is not None and module.router.weight.grad.abs().max() > 0
    assert "bias.weight" not in dict(module.named_parameters())
    assert set(module.state_dict()) == {"router.weight", "bias.weight", "gate.weight", "up.weight", "down.weight"}
