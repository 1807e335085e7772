"""The gate's arithmetic, and the rounding rules against independent ones."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.nn.model import Model
from nas.runtimes.llama_cpp.gate import CHUNKS, compare
from nas.runtimes.llama_cpp.rounding import attend_f16, round_q8_0, round_q8_k

RNG = np.random.default_rng(0)


def logits() -> np.ndarray:
    return RNG.standard_normal((8, 50)).astype(np.float32)


def test_rounding_noise_passes_and_twice_as_much_does_not() -> None:
    oracle, noise = logits(), 0.01 * logits()
    assert compare(oracle + 1.9 * noise, oracle, oracle + noise).passed
    report = compare(oracle + 2.1 * noise, oracle, oracle + noise)
    assert not report.passed
    with pytest.raises(CandidateFailed) as failure:
        report.require()
    assert failure.value.reason == "gate"


def test_one_wrong_position_fails() -> None:
    oracle, noise = logits(), 0.01 * logits()
    measured = oracle + noise
    measured[5] = oracle[4]
    report = compare(measured, oracle, oracle + noise)
    assert not report.passed and int(np.argmax(report.errors)) == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("routed", [False, True])
def test_logits_that_are_not_finite_fail(bad: float, routed: bool) -> None:
    oracle, noise = logits(), 0.01 * logits()
    measured = oracle + noise
    measured[2:, 3] = bad
    assert not compare(measured, oracle, oracle + noise, routed=routed).passed


def test_another_expert_at_one_position_is_rounding() -> None:
    oracle, noise = logits(), 0.01 * logits()
    measured = oracle + noise
    measured[5] = oracle[4]
    assert compare(measured, oracle, oracle + noise, routed=True).passed


def test_stale_state_fails() -> None:
    """Steps that go on from the state before the last chunk, as a runtime would that forgot to write it back."""
    layout = Layout.parse("d64 v100 ffn=swiglu:96 [C3 A4/2 C3]")
    model = Model(layout, seed=0).eval()
    ids = torch.from_numpy(RNG.integers(0, layout.vocab, sum(CHUNKS)))
    with torch.no_grad():
        oracle = model(ids[None])[0]
        simulated = oracle * (1 + 0.02 * torch.randn(oracle.shape, generator=torch.Generator().manual_seed(0)))
        measured, state, stale, done = [], None, None, 0
        for length in CHUNKS:
            chunk, after = model.prefill(ids[None, done : done + length], state)
            measured.append(chunk[0])
            if stale is not None and state is not None:  # convolutions one chunk behind, attention up to date
                after = [s if len(s[0]) > 1 else old for s, old in zip(after, stale, strict=True)]
            stale, state, done = after, after, done + length
    good = compare(oracle.numpy(), oracle.numpy(), simulated.numpy())
    bad = compare(torch.cat(measured).numpy(), oracle.numpy(), simulated.numpy())
    assert good.passed and not bad.passed


def test_q8_0_is_ggufs() -> None:
    x = RNG.standard_normal((3, 96)).astype(np.float32)
    blocks = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(round_q8_0(torch.from_numpy(x)).numpy(), expected, rtol=1e-6)


def test_q8_k_one_block_at_a_time() -> None:
    x = RNG.standard_normal((2, 512)).astype(np.float32)
    expected = np.empty_like(x)
    for row in range(2):
        for start in (0, 256):
            block = x[row, start : start + 256]
            scale = np.float32(-127.0) / block[np.abs(block).argmax()]
            expected[row, start : start + 256] = np.minimum(np.rint(scale * block), 127) / scale
    np.testing.assert_allclose(round_q8_k(torch.from_numpy(x)).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("rounding", [round_q8_0, round_q8_k])
def test_zeros_stay_zeros(rounding: object) -> None:
    assert callable(rounding) and (rounding(torch.zeros(2, 256)) == 0).all()


def test_attention_in_f16_is_attention() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 16, generator=g), *torch.randn(2, 1, 2, 9, 16, generator=g)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend_f16(q, k, v), exact, rtol=1e-2, atol=3e-3)
