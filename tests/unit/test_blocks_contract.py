"""The built-in block kinds keep the contract of block kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.core.block import BLOCKS, Block
from nas.model.nn.base import Mixer
from nas.model.nn.cfc import reference_cfc
from nas.model.nn.conv import reference_gated_short_conv
from nas.model.nn.deltanet import reference_deltanet
from nas.model.nn.gdn import reference_gdn
from nas.model.nn.geglu import reference_geglu
from nas.model.nn.gla import reference_gla
from nas.model.nn.gqa import reference_gqa
from nas.model.nn.kinds import MODULES
from nas.model.nn.linear import reference_linear
from nas.model.nn.longconv import reference_longconv
from nas.model.nn.mamba import reference_mamba
from nas.model.nn.mamba2 import reference_mamba2
from nas.model.nn.mla import reference_mla
from nas.model.nn.mlstm import reference_mlstm
from nas.model.nn.moe import reference_moe
from nas.model.nn.primitives import draw_weights
from nas.model.nn.relu2 import reference_relu2
from nas.model.nn.rtf import reference_rtf
from nas.model.nn.s4 import reference_s4
from nas.model.nn.s5 import reference_s5
from nas.model.nn.swa import reference_swa
from nas.model.nn.swiglu import reference_swiglu
from nas.testing.block_contract import FeedForwardContract, MixerContract
from nas.testing.planted_faults import EVERY_KIND


class TestGatedShortConv(MixerContract):
    kind = "conv"
    examples = ("C2", "C3", "C8", "C9", "C32")
    reference = staticmethod(reference_gated_short_conv)


class TestGroupedQueryAttention(MixerContract):
    kind = "gqa"
    examples = (
        "A4/4",
        "A4/2",
        "A4/1",
        "A2/1:48",
        "A6/3:2",
        "A4/2(qk_norm=0)",
        "A4/2(rope_theta=0)",
        "A1/1(rope_theta=9)",
        "A4/2(canon=4)",
        "A4/1(canon=2,qk_norm=0)",
        "A4/2(qk_norm=0,qkv_bias=1)",
        "A4/2(rope_factor=8)",
        "A2/1:32(rope_dim=12,rope_factor=8,rope_theta=500,rope_tokens=24)",
        "A2/1:32(rope_factor=32,rope_theta=500000,rope_tokens=24)",
        "A2/1:32(rope_factor=8,rope_theta=500,rope_tokens=200,rope_yarn=1)",
        "A2/1:32(rope_dim=16,rope_long=4096)",
        "A4/2(qk_norm_wide=1)",
        "A4/2(softcap=0.5)",
        "A4/2(canon=3,gate=1)",
        "A4/2(gate=1,gate_wide=1)",
    )
    reference = staticmethod(reference_gqa)


class TestSlidingWindowAttention(MixerContract):
    kind = "swa"
    examples = (
        "W4/2@1",
        "W4/4@5",
        "W4/1@19",
        "W4/2@512",
        "W2/1@7:48",
        "W4/2@5(sink=1)",
        "W4/2@64(sink=1)",
        "W4/2@6(qk_norm=0)",
        "W4/2@6(rope_theta=0)",
        "W1/1@6(rope_theta=9,sink=1)",
        "W4/2@6(canon=4)",
        "W4/2@5(canon=3,sink=1)",
        "W4/2@6(qkv_bias=1)",
        "W4/2@6(rope_dim=4)",
        "W4/2@6(rope_factor=4,rope_theta=10000,rope_tokens=16)",
        "W4/1@6(qk_norm_wide=1)",
        "W4/2@6(softcap=0.5)",
        "W4/2@6(gate=1,sink=1)",
    )
    reference = staticmethod(reference_swa)


class TestMultiHeadLatentAttention(MixerContract):
    kind = "mla"
    examples = (
        "L4/32",
        "L4/16(query=24)",
        "L2/24:20",
        "L4/32(nope_dim=8,rope_dim=4)",
        "L4/8(rope_theta=0)",
        "L1/40(query=12,rope_theta=9)",
    )
    reference = staticmethod(reference_mla)


class TestMamba2(MixerContract):
    kind = "mamba2"
    examples = (
        "M",
        "M16",
        "M1",
        "M16(heads=8)",
        "M16(groups=2,heads=8)",
        "M16(groups=4,heads=4)",
        "M16(expand=1)",
        "M16(expand=3)",
        "M16(conv=2)",
        "M16(conv=12)",
        "M16(conv=0)",
    )
    reference = staticmethod(reference_mamba2)


class TestGatedDeltaNet(MixerContract):
    kind = "gdn"
    examples = (
        "D4",
        "D1",
        "D4/2",
        "D8/2:12",
        "D2:48",
        "D4(conv=2)",
        "D4/1(conv=12)",
        "D4/2(conv=0)",
        "D4/2(norm_eps=0.01)",
    )
    reference = staticmethod(reference_gdn)


class TestGatedLinearAttention(MixerContract):
    kind = "gla"
    examples = ("G4", "G1", "G2:12", "G3:48(rank=5)")
    reference = staticmethod(reference_gla)


class TestMatrixLSTM(MixerContract):
    kind = "mlstm"
    examples = ("X4", "X1", "X2:12", "X3:48(key_dim=7)")
    reference = staticmethod(reference_mlstm)


class TestLinearAttention(MixerContract):
    kind = "linear"
    examples = ("K4", "K1", "K2:12", "K4(conv=4)", "K3:48(conv=2)")
    reference = staticmethod(reference_linear)


class TestDeltaNet(MixerContract):
    kind = "deltanet"
    examples = ("N4", "N1", "N2:12", "N4(conv=0)", "N3:48(conv=2)")
    reference = staticmethod(reference_deltanet)


class TestMamba(MixerContract):
    kind = "mamba"
    examples = ("H", "H1", "H4(expand=1)", "H(conv=0)", "H8(rank=7)", "H2(conv=12,expand=3)")
    reference = staticmethod(reference_mamba)


class TestS4(MixerContract):
    kind = "s4"
    examples = ("S8", "S4(conv=4)", "S1(conv=2,liquid=1)")
    reference = staticmethod(reference_s4)


class TestS5(MixerContract):
    kind = "s5"
    examples = ("V", "V5(conv=4)")
    reference = staticmethod(reference_s5)


class TestCfC(MixerContract):
    kind = "cfc"
    examples = ("F", "F12(conv=4,units=40)")
    reference = staticmethod(reference_cfc)


class TestRTF(MixerContract):
    kind = "rtf"
    examples = ("R", "R1", "R40(conv=4)")
    reference = staticmethod(reference_rtf)


class TestLongConvolution(MixerContract):
    kind = "longconv"
    examples = ("Y", "Y100(bands=2,conv=0,units=7)")
    reference = staticmethod(reference_longconv)


class TestSwiGLU(FeedForwardContract):
    kind = "swiglu"
    examples = ("swiglu:1", "swiglu:160")
    reference = staticmethod(reference_swiglu)


class TestGeGLU(FeedForwardContract):
    kind = "geglu"
    examples = ("geglu:1", "geglu:160")
    reference = staticmethod(reference_geglu)


class TestSquaredReLU(FeedForwardContract):
    kind = "relu2"
    examples = ("relu2:1", "relu2:160")
    reference = staticmethod(reference_relu2)


class TestMixtureOfExperts(FeedForwardContract):
    kind = "moe"
    examples = (
        "moe:2x1:32",
        "moe:4x2:48",
        "moe:8x8:16",
        "moe:4x2:48(shared=1)",
        "moe:4x1:24(shared=3)",
        "moe:8x2:16(softmax=1)",
        "moe:8x3:16(norm_topk=0,softmax=1)",
        "moe:4x2:24(norm_topk=0,shared=2,shared_gate=1)",
    )
    reference = staticmethod(reference_moe)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("A4/2(canon=4)", reference_gqa),
        ("W4/2@32(sink=1)", reference_swa),
        ("L4/32(query=24)", reference_mla),
        ("moe:8x2:24(shared=1)", reference_moe),
    ],
)
@torch.no_grad()
def test_nothing_is_rounded_to_float32_on_the_way(text: str, reference: Callable[..., Tensor]) -> None:
    """Neither RoPE's angles nor the router's scores; test_nn_recurrences.py has the recurrences in float64."""
    block = Block.parse(text, "ffn" if text.startswith("moe") else "mixer")
    module: Any = MODULES[block.kind](block, 64)
    draw_weights(module, 0, depth=4)
    module.double().eval()
    x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    output = module(x)[0][0] if isinstance(module, Mixer) else module(x)[0]
    torch.testing.assert_close(output, reference(module.block, module.state_dict(), x[0]), rtol=0, atol=1e-13)


def test_the_layout_of_every_kind_lacks_none() -> None:
    """Except for kinds of one runtime alone (llama.cpp's stock architectures: GEGLU; ExecuTorch: sums and
    state spaces), and kinds that no runtime has."""
    assert {block.kind for layer in EVERY_KIND.layers for block in layer.blocks} == set(BLOCKS) - {
        "geglu",
        "linear",
        "deltanet",
        "mamba",
        "s4",
        "s5",
        "cfc",
        "rtf",
        "longconv",
    }
