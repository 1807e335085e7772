"""mLSTM: the chunked form is the recurrence with its running maximum, and transformers' layer of xLSTM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.nn.mlstm import MatrixLSTM, reference_mlstm
from nas.nn.primitives import draw_weights
from nas.testing.twins import twin_of

WIDTH, LENGTH = 32, 150


def mixer(text: str) -> MatrixLSTM:
    """A module with no weight at a special value."""
    module = MatrixLSTM(Block.parse(text, "mixer"), WIDTH)
    draw_weights(module, 0, depth=4)
    noise = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
    return module.eval()


def sequence(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("gates", [0.0, 30.0])
@pytest.mark.parametrize("length", [1, 64, 65, 150])
@torch.no_grad()
def test_any_number_of_chunks_is_the_recurrence(length: int, gates: float) -> None:
    """Also where input gates reach their cap, whose exponential is 3 million."""
    module, x = mixer("X2(key_dim=5)").double(), sequence(1, length).double()
    module.gate_bias[:2] += gates
    wanted = reference_mlstm(module.block, module.state_dict(), x[0])
    torch.testing.assert_close(module(x)[0][0], wanted, rtol=0, atol=1e-8)


@torch.no_grad()
def test_gates_at_their_cap_are_exact_in_float32() -> None:
    module, x = mixer("X2"), sequence(1)
    module.gate_bias += 30.0  # all comes in, nothing is forgotten
    exact = mixer("X2").double()
    exact.gate_bias += 30.0
    torch.testing.assert_close(module(x)[0], exact(x.double())[0].float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("cuts", [[64, 64, 22], [63, 1, 1, 85], [149, 1]], ids=str)
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(cuts: list[int]) -> None:
    module, x = mixer("X4").double(), sequence().double()
    state, parts = None, []
    for part in torch.split(x, cuts, 1):
        y, state = module(part, state)
        parts.append(y)
    whole, end = module(x)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(state, end, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("text", ["X4", "X2(key_dim=16)"])
@torch.no_grad()
def test_outputs_are_those_of_transformers(text: str) -> None:
    ours = mixer(text)
    theirs = twin_of(ours, WIDTH)
    x = sequence()
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=0, atol=1e-4)
    theirs.module.fgate_preact.bias += 0.5
    assert (ours(x)[0] - theirs(x)).abs().max() > 1e-3


def test_a_mixer_has_as_many_weights_as_a_layer_of_xlstm_7b() -> None:
    """Of its config: width 4096, 8 heads, keys of half the width of values."""
    block = Block.parse("X8", "mixer")
    assert block.spec.count(block, 4096).total == 4096 * (2048 * 2 + 4096 * 3 + 16) + 16 + 4096


def test_state_is_that_of_the_heads() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [X4]")
    assert layout.state_bytes() == 4 * 4 * 128 * 257
    assert layout.kv_bytes(1 << 20) == 0


def test_proxies_keep_the_share_of_keys() -> None:
    layout = Layout.parse("d1024 v65536 ffn=swiglu:4608 [X4 X8(key_dim=128)]")
    assert narrow(layout, 256, 256).format() == "d256 v256 ffn=swiglu:1152 [X4 X8(key_dim=32)]"


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 heads do not divide d_model 32; give the head size"):
        Layout.parse("d32 v64 ffn=none [X3]")
