"""Which layouts llama.cpp carries, and on which build; that the carried ones run is shown in tests/integration."""

from __future__ import annotations

import pytest

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import PATCHED, architecture

LFM2_350M = "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]"


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        (LFM2_350M, "lfm2"),
        ("d256 v512 ffn=swiglu:512 [C5 A8/4 C5 A8/2 A8/1]", "lfm2"),
        ("d256 v512 untied ffn=swiglu:512 [C3 A8/4]", "lfm2"),
        ("d256 v512 ffn=swiglu:512 [C3 W8/4@64 W8/2@64]", "lfm2"),
        ("d256 v512 ffn=moe:8x2:64 [C3+swiglu:512*2 A8/4]", "lfm2moe"),
        ("d256 v512 ffn=moe:8x2:64 [C3 A8/4]", "lfm2moe"),
        ("d256 v512 ffn=swiglu:512 [A8/4*4]", "qwen3"),
        ("d256 v512 ffn=swiglu:512 [A6/2:64*4]", "qwen3"),
        ("d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0)*4]", "llama"),
        ("d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0,rope_factor=8,rope_tokens=8192)*4]", "llama"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(rope_factor=8)]", "lfm2"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(rope_dim=16)]", "lfm2"),
        ("d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0)*3 A8/4(qk_norm=0,rope_theta=0) A8/4(qk_norm=0)]", "smollm3"),
        ("d256 v512 ffn=swiglu:512 [M16 A8/4(qk_norm=0,rope_theta=0) M16]", "granitehybrid"),
        ("d256 v512 untied ffn=swiglu:512 [A8/4(qk_norm=0) M16(groups=2)]", "granitehybrid"),
        ("d256 v512 ffn=relu2:512 [A8/4(qk_norm=0)*4]", "arcee"),
        ("d256 v512 ffn=geglu:512 [A4/1:256(qk_norm=0)*4]", "gemma"),
        ("d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0,rope_dim=16)*4]", "phi3"),
        ("d256 v512 untied ffn=swiglu:512 [A8/8(qk_norm=0,rope_long=4096)*4]", "phi3"),
        (
            "d256 v512 norms=both softcap=30 ffn=geglu:512 [W4/2@64(qk_norm=0,softcap=50) A4/2(qk_norm=0,softcap=50)]",
            "gemma2",
        ),
        ("d256 v512 norms=both ffn=geglu:512 [W4/1@64:256(rope_theta=10000)*5 A4/1:256(rope_factor=8)]", "gemma3"),
        ("d256 v512 norms=behind ffn=swiglu:512 [A8/4*4]", "exaone4"),
        ("d256 v512 ffn=swiglu:512 [D8/4(norm_eps=1e-06) A8/4:64(gate=1,gate_wide=1,rope_dim=8)]", "qwen35"),
        ("d256 v512 ffn=swiglu:512 [M16(groups=2)&A8/4:16(qk_norm=0)*2]", "falcon-h1"),
        ("d256 v512 untied ffn=swiglu:512 [A8/4(qk_norm=0,rope_factor=2)&M16(inner=192,norm=0)]", "falcon-h1"),
        ("d256 v512 untied norms=behind ffn=swiglu:512 [W8/8@64(qk_norm_wide=1) A8/8(qk_norm_wide=1)]", "olmo2"),
    ],
)
def test_stock(text: str, arch: str) -> None:
    support = LLAMA_CPP.supports(Layout.parse(text))
    assert (support.verdict, support.arch, support.reasons) == ("stock", arch, ())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d256 v512 ffn=swiglu:512 [C3 C5 A8/4]", "more than one convolution kernel (3, 5)"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4+swiglu:768]", "more than one dense feed-forward width (512, 768)"),
        ("d256 v512 ffn=moe:8x2:64 [C3 A8/4+moe:8x2:96]", "more than one expert width"),
        ("d256 v512 ffn=moe:8x2:64 [C3 A8/4+moe:8x4:64]", "more than one experts per token"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 A4/4]", "more than one head count (8, 4)"),
        ("d256 v512 ffn=swiglu:512 [A8/4 A8/2]", "more than one key-value head count"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(rope_theta=0)]", "attention without positions"),
        ("d256 v512 ffn=swiglu:512 [M16(norm=0) A8/4(qk_norm=0)]", "Mamba-2 without a norm: granitehybrid"),
        ("d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0) A8/4(qk_norm=0,rope_theta=0)]", "smollm3 has it in every fourth"),
        ("d256 v512 ffn=swiglu:512 [C3*4]", "no attention layer"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(qk_norm=0)]", "attention without QK-norm"),
        ("d256 v512 ffn=swiglu:512 [A8/4 A8/4(qk_norm=0)]", "more than one choice of QK-norm"),
        ("d256 v512 ffn=swiglu:512 [C3 A6/2:32]", "do not make d_model 256"),
        ("d256 v512 ffn=moe:8x2:64 [A8/4*2]", "experts without a convolution layer"),
        ("d256 v512 ffn=moe:8x2:64 [C3 A8/4 C3+swiglu:512]", "a dense feed-forward after experts"),
        ("d256 v512 ffn=swiglu:512 [C3 M16 A8/4]", "Mamba-2"),
        ("d256 v512 ffn=swiglu:512 [M16*2]", "Mamba-2"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 W8/4@64]", "full and sliding-window attention"),
        ("d256 v512 ffn=swiglu:512 [C3 W8/4@64(sink=1)]", "attention sinks"),
        ("d256 v512 ffn=swiglu:512 [W8/4@64*2]", "sliding windows without a convolution layer"),
        ("d256 v512 ffn=moe:8x2:64 [C3 W8/4@64]", "sliding windows together with experts"),
        ("d256 v512 ffn=swiglu:512 [A8/4 W8/4@64(rope_theta=10000)]", "more than one RoPE base"),
        ("d256 v512 ffn=relu2:512 [C3 A8/4]", "relu2 feed-forwards next to convolutions: lfm2 has none"),
        ("d256 v512 ffn=moe:8x2:64(shared=1) [C3 A8/4]", "shared experts: lfm2moe has none"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(canon=4)]", "a convolution in front of attention (canon)"),
        ("d256 v512 ffn=swiglu:512 [C3 W8/4@64(canon=4)]", "a convolution in front of attention (canon)"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 ^0]", "layer 2 shares weights with layer 0"),
        ("d256 v512 ffn=swiglu:512 [C3&A8/4 A8/4]", "layer 0 has parallel mixers"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 -]", "layer 2 has no mixer"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4+none]", "layer 1 has no feed-forward"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 A8/4(kv=1)]", "layer 2 reuses the cache of layer 1"),
        (
            "d256 v512 ffn=swiglu:512 [A8/4(rope_factor=8,rope_tokens=32)]",
            "qwen3 has no factors of frequencies, llama, arcee, exaone4 have",
        ),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(rope_factor=8,rope_tokens=32)]", "lfm2 has no factors of frequencies"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 A8/4(rope_factor=8)]", "more than one scaling of RoPE (rope_factor)"),
        ("d256 v512 ffn=swiglu:512 [A8/4(rope_dim=16)]", "with QK-norm or biases: phi3 has neither"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 A8/4(rope_dim=16)]", "more than one part of a head that RoPE turns"),
        ("d256 v512 ffn=swiglu:512 [A8/4:64(qk_norm=0,rope_dim=16)]", "do not make d_model 256: phi3 needs that"),
        (
            "d256 v512 ffn=swiglu:512 [W8/4@8(qk_norm=0,rope_dim=16)]",
            "sliding windows without a convolution layer: phi3",
        ),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(rope_long=64)]", "(rope_long): phi3 alone has them"),
        ("d256 v512 ffn=geglu:512 [A8/4*2]", "geglu feed-forwards, norms before blocks, one QK-norm, without biases"),
        ("d256 v512 ffn=geglu:512 [C3 A8/4]", "geglu feed-forwards next to convolutions: lfm2 has none"),
        ("d256 v512 ffn=geglu:512 [A8/4(qk_norm=0) A8/4(qk_norm=0)+swiglu:512]", "more than one kind of feed-forward"),
        ("d256 v512 untied ffn=geglu:512 [A8/4(qk_norm=0)]", "a head of its own: gemma has tied embeddings"),
        ("d256 v512 norms=both ffn=geglu:512 [A8/4(qk_norm=0)]", "gemma2 bounds both, each by one number"),
        ("d256 v512 norms=both ffn=geglu:512 [A8/4(qk_norm=0)]", "no sliding windows: gemma2 always has them"),
        ("d256 v512 norms=both ffn=geglu:512 [A8/4 W8/4@8(rope_factor=2)]", "gemma3 has none"),
        ("d256 v512 norms=both ffn=geglu:512 [W8/4@8]", "sliding windows in every layer: gemma3"),
        ("d256 v512 norms=both ffn=geglu:512 [A8/4:16*62]", "62 layers: gemma3 scales scores by another size"),
        ("d256 v512 norms=both ffn=geglu:512 [A8/4(softcap=5)]", "bounded scores (softcap): gemma3 has none"),
        (
            "d256 v512 norms=behind ffn=swiglu:512 [A8/4(qk_norm_wide=1)]",
            "tied embeddings: olmo2 has a head of its own",
        ),
        ("d256 v512 norms=behind ffn=swiglu:512 [A8/4:64]", "heads that do not make d_model 256: exaone4 needs that"),
        ("d256 v512 norms=behind ffn=swiglu:512 [A8/4 W8/4@8]", "sliding windows without a convolution layer: exaone4"),
        ("d256 v512 norms=behind softcap=9 ffn=swiglu:512 [A8/4]", "bounded logits (softcap): exaone4 has none"),
        ("d256 v512 norms=behind ffn=swiglu:512 [C3 A8/4]", "norms behind blocks, or bounded logits, next to conv"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4(qk_norm_wide=1)]", "qk_norm_wide next to convolutions: lfm2 has none"),
        ("d256 v512 ffn=swiglu:512 [M16&A8/4]", "qk_norm of attention: falcon-h1 has none"),
        ("d256 v512 ffn=swiglu:512 [M16&A8/4(qk_norm=0) M32&A8/4(qk_norm=0)]", "more than one shape of mamba2"),
        ("d256 v512 ffn=swiglu:512 [M16&A8/4(qk_norm=0) M16]", "layer 0 has parallel mixers"),
        ("d256 v512 ffn=swiglu:512 [M16&A8/4(qk_norm=0) ^0]", "layer 1 shares weights with layer 0"),
        ("d256 v512 ffn=geglu:512 [M16&A8/4(qk_norm=0)]", "geglu feed-forwards: falcon-h1 has none"),
        ("d256 v512 softcap=4 ffn=swiglu:512 [M16&A8/4(qk_norm=0)]", "bounded logits: falcon-h1 has neither"),
        (
            "d256 v512 ffn=swiglu:512 [M16&A8/4(qk_norm=0,rope_factor=8,rope_tokens=32)]",
            "rope_tokens of attention: falcon-h1 has none",
        ),
        ("d256 v512 ffn=swiglu:512 [D8 A8/4(gate=1,gate_wide=1)]", "than that of its queries and keys, 1e-6: qwen35"),
        (
            "d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) A8/4(gate=1,gate_wide=1,qk_norm=0)]",
            "attention without QK-norm: qwen35",
        ),
        (
            "d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) D4(norm_eps=1e-06) A8/4(gate=1,gate_wide=1)]",
            "more than one shape of gdn",
        ),
        (
            "d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) C3 A8/4(gate=1,gate_wide=1)]",
            "short convolutions: qwen35 has none",
        ),
        (
            "d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) W8/4@64(gate=1,gate_wide=1)]",
            "sliding windows: qwen35 has none",
        ),
        ("d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) A8/4(gate=1)]", "next to attention with wide gates (qwen35)"),
        ("d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) A8/4:16(gate=1,gate_wide=1)]", "heads of fewer than 32 numbers"),
        ("d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06)*2]", "no attention layer"),
        (
            "d256 v512 ffn=swiglu:512 [D8(norm_eps=1e-06) A8/4(gate=1,gate_wide=1,rope_theta=0)]",
            "attention without positions",
        ),
        ("d256 v512 ffn=swiglu:512 [A8/4(gate=1)]", "gates on heads: stock architectures have none"),
    ],
)
def test_patched_by_name(text: str, reason: str) -> None:
    support = LLAMA_CPP.supports(Layout.parse(text))
    assert (support.verdict, support.arch) == ("patched", PATCHED)
    assert any(reason in message for message in support.reasons), support.reasons


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d256 v512 ffn=moe:8x2:64 [C3 A8/4+moe:4x2:64]", "more than one expert count"),
        ("d256 v512 ffn=swiglu:512 [C3 A8/4 A8/4(rope_theta=10000)]", "more than one RoPE base of attention"),
        ("d256 v512 ffn=swiglu:512 [W8/4@64 W8/4@64(rope_theta=10000)]", "more than one RoPE base of sliding windows"),
        ("d256 v512 ffn=swiglu:512 [C3 W8/4@64 W8/4@128]", "more than one window (64, 128)"),
        ("d256 v512 ffn=swiglu:512 [W8/4@64&A8/4 C3]", "layer 0 has two kinds of attention in parallel"),
        ("d256 v512 ffn=swiglu:512 [A8/4 S V]", "s4 blocks: neither the stock build nor the patched one has them"),
        ("d256 v512 ffn=swiglu:512 [F R Y]", "longconv blocks: neither the stock build nor the patched one has them"),
        ("d256 v512 ffn=swiglu:512 [A8/4 C3&M16]", "layer 1 has two recurrent mixers in parallel"),
        ("d256 v512 ffn=swiglu:512 [A8/4(canon=4)&M16]", "one of two parallel mixers (canon)"),
        ("d256 v512 ffn=swiglu:512 [C3*512 A8/4]", "513 layers: at most 512"),
        ("d256 v512 ffn=swiglu:512 [A8/4(softcap=5) A8/4]", "more than one bound of scores (5.0, 0.0)"),
        ("d256 v512 ffn=swiglu:512 [A8/4(softcap=5) L4/64]", "more than one bound of scores (5.0, 0.0)"),
        (
            "d256 v512 ffn=moe:8x2:64 [A8/4 A8/4+moe:8x2:64(norm_topk=0)]",
            "more than one sum of experts' weights (norm_topk)",
        ),
    ],
)
def test_refused_by_name(text: str, reason: str) -> None:
    layout = Layout.parse(text)
    support = LLAMA_CPP.supports(layout)
    assert not support
    assert any(reason in message for message in support.reasons), support.reasons
    with pytest.raises(Unsupported) as error:
        architecture(layout)
    assert all(message in str(error.value) for message in support.reasons)


def test_everything_that_needs_the_patch_is_told() -> None:
    reasons = LLAMA_CPP.supports(Layout.parse("d256 v512 ffn=swiglu:512 [C3 C5 A8/4(qk_norm=0)+swiglu:768]")).reasons
    assert len(reasons) == 3


def test_reference_model_is_small_stock_lfm2() -> None:
    reference = LLAMA_CPP.reference_models()[0]
    assert LLAMA_CPP.supports(reference).arch == "lfm2"
    assert 25e6 < reference.params.total < 40e6
