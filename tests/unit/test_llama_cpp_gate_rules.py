"""The gate's arithmetic, and the rounding rules against independent ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import GateReport, RandomWeights
from nas.measure.runtimes.llama_cpp.gate import (
    CHUNKS,
    TEXTS,
    compare,
    first_passed,
    judge_choices,
    settle,
    settled_experts,
)
from nas.measure.runtimes.llama_cpp.oracle import FollowedExperts, attend_f16, dot_f16, round_q8_0, round_q8_k
from nas.measure.runtimes.llama_cpp.writer import write_gguf
from nas.model.nn.model import Model

RNG = np.random.default_rng(0)


def logits() -> np.ndarray:
    return RNG.standard_normal((8, 50)).astype(np.float32)


def test_a_graph_fails_with_every_text() -> None:
    def checked(*errors: float) -> tuple[GateReport, list[int]]:
        seeds: list[int] = []

        def check(seed: int) -> GateReport:
            seeds.append(seed)
            return GateReport((errors[seed],), errors[seed], 0.1)

        return first_passed(check), seeds

    assert checked(0.05) == (GateReport((0.05,), 0.05, 0.1), [0])
    assert checked(0.12, 0.06) == (GateReport((0.06,), 0.06, 0.1), [0, 1])
    failed, seeds = checked(0.2, *[0.3] * (TEXTS - 1))
    assert not failed.passed and failed.error == 0.2 and len(seeds) == TEXTS


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
def test_logits_that_are_not_finite_fail(bad: float) -> None:
    oracle, noise = logits(), 0.01 * logits()
    measured = oracle + noise
    measured[2:, 3] = bad
    assert not compare(measured, oracle, oracle + noise).passed


def scores() -> np.ndarray:
    return np.array([[0.9, 0.5, 0.1], [0.5, 0.9, 0.1]], np.float32)


def test_another_expert_that_scores_alike_is_rounding() -> None:
    near = scores()
    near[0] = [0.505, 0.5, 0.1]
    assert judge_choices({3: np.array([[1], [1]])}, [near], [near + 0.002]) == ""


def test_another_expert_that_scores_less_is_a_fault() -> None:
    fault = judge_choices({3: np.array([[1], [1]])}, [scores()], [scores() + 0.002])
    assert "layer 3" in fault and "1 of 2 positions" in fault
    report = GateReport((0.0,), 0.0, 1.0, fault)
    with pytest.raises(CandidateFailed, match="layer 3"):
        report.require()


def test_followed_experts_are_the_ones_that_compute() -> None:
    layout = Layout.parse("d64 v100 ffn=moe:4x2:32 [C3 A4/2]")
    model = Model(layout, seed=0).eval()
    ids = torch.from_numpy(RNG.integers(0, layout.vocab, 20))
    with torch.no_grad():
        expected = model(ids[None])
        with RecordedExperts() as recorded:
            model(ids[None])
        with FollowedExperts(recorded.choices) as followed:
            assert torch.equal(model(ids[None]), expected)
        with FollowedExperts([(chosen + 1) % 4 for chosen in recorded.choices]):
            assert not torch.allclose(model(ids[None]), expected)
    for scores_of, chosen in zip(followed.scores, recorded.choices, strict=True):
        assert torch.equal(scores_of.topk(2, -1).indices, chosen)


class RecordedExperts(TorchFunctionMode):
    """Keeps what `topk` answers."""

    def __enter__(self) -> RecordedExperts:
        self.choices: list[torch.Tensor] = []
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.topk:
            self.choices.append(result.indices)
        return result


def test_settled_experts_win_in_every_layer(tmp_path: Path) -> None:
    layout = Layout.parse("d64 v256 ffn=moe:4x2:32 [C3 A4/2 C3]")
    write_gguf(layout, "f32", RandomWeights(), tmp_path / "m.gguf")
    experts = settled_experts(layout, 5)
    assert [chosen[0].tolist() for chosen in experts.values()] == [[0, 1], [2, 3], [0, 1]]
    reader = gguf.GGUFReader(settle(tmp_path / "m.gguf", experts, tmp_path / "settled"))
    biases = [t.data.tolist() for t in reader.tensors if t.name.endswith("exp_probs_b.bias")]
    assert biases == [[2, 2, 0, 0], [0, 0, 2, 2], [2, 2, 0, 0]]
    assert (tmp_path / "m.gguf").stat().st_size == (tmp_path / "settled").stat().st_size


@pytest.mark.parametrize("content", [b"", b"no model", b"GGUF" + bytes(60)])
def test_what_cannot_be_settled_is_the_candidates_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CandidateFailed, match="experts"):
        settle(tmp_path / "m.gguf", {0: np.array([[0, 1]])}, tmp_path / "settled")


def test_state_that_is_not_written_back_fails() -> None:
    """Steps that continue from the state before the last chunk, as in a runtime that forgot to write it back."""
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


def test_sums_in_f16_are_numpys_lane_by_lane() -> None:
    x, y = RNG.standard_normal((2, 70)).astype(np.float16)
    lanes = (x[:32] * y[:32]).astype(np.float16)
    exact = lanes.astype(np.float64) + x[32:64].astype(np.float64) * y[32:64]  # rounded once, as a fused step is
    four = exact.astype(np.float16).reshape(4, 8)
    eight = (four[0] + four[2]) + (four[1] + four[3])
    expected = eight.astype(np.float32).sum() + (x[64:].astype(np.float32) * y[64:].astype(np.float32)).sum()
    inputs = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))
    np.testing.assert_allclose(float(dot_f16(*inputs, lanes=32)), expected, rtol=1e-6)
    running = np.float16(0)
    for product in x.astype(np.float64) * y:
        running = np.float16(running + product)
    assert float(dot_f16(*inputs, lanes=1)) == running


@pytest.mark.parametrize("half_sums", [0, 32, 1])
def test_attention_in_f16_is_attention(half_sums: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 16, generator=g), *torch.randn(2, 1, 2, 9, 16, generator=g)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend_f16(q, k, v, half_sums=half_sums), exact, rtol=1e-2, atol=3e-3)
