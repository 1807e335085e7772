"""What the gate concludes from logits, and the ids that the runner feeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nas.measure.runtimes.executorch.gate import FACTOR, compare, round_per_token
from nas.measure.runtimes.runner import Feed

RNG = np.random.default_rng(0)
ORACLE = RNG.standard_normal((33, 50)).astype(np.float32)


def off(by: float, at: slice = slice(None)) -> np.ndarray:
    logits = ORACLE.copy()
    logits[at] *= 1 + by
    return logits


def test_limit_is_twice_the_worst_disturbance() -> None:
    report = compare(off(0.015), ORACLE, [off(0.01), off(0.008)], ORACLE)
    np.testing.assert_allclose([report.error, report.limit], [0.015, 0.02], rtol=1e-4)
    assert report.passed and not compare(off(0.021), ORACLE, [off(0.01)], ORACLE).passed


def test_noise_that_meets_no_tie_is_no_limit() -> None:
    assert not compare(off(0.015), ORACLE, [ORACLE], ORACLE).passed
    assert compare(off(0.015), ORACLE, [ORACLE], off(0.016)).limit == pytest.approx(0.016, rel=1e-4)


def test_a_tie_is_turned_in_every_row() -> None:
    x = torch.tensor([[0.0, 255.0, 100.4, 3.1], [0.0, 255.0, 9.9, 77.45]])
    assert round_per_token(x).tolist() == [[0, 255, 100, 3], [0, 255, 10, 77]]
    assert round_per_token(x, turn_tie=True).tolist() == [[0, 255, 101, 3], [0, 255, 10, 78]]


def test_one_wrong_position_fails_where_nothing_is_routed() -> None:
    measured = off(0.5, slice(7, 8))
    assert not compare(measured, ORACLE, [off(0.01)], ORACLE).passed
    assert compare(measured, ORACLE, [off(0.01)], ORACLE, routed=True).passed


def test_half_of_the_positions_wrong_fails_where_experts_are_routed() -> None:
    assert not compare(off(0.5, slice(16, 33)), ORACLE, [off(0.01)], ORACLE, routed=True).passed


def test_what_is_not_finite_fails() -> None:
    assert not compare(off(np.nan, slice(0, 1)), ORACLE, [off(0.01)], ORACLE, routed=True).passed
    assert FACTOR == 2.0


def test_ids_are_splitmix64() -> None:
    """First numbers of the stream of seed 1234567, as published with the generator."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert Feed(3, 1, 8, 1234567).ids(1 << 32).tolist() == [number % (1 << 32) for number in expected]


def test_rounding_per_token_is_torchaos() -> None:
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x[1] = x[1].abs() + 1
    block, kind = (1, 64), torch.int8
    scale, zero = choose_qparams_affine(x, MappingType.ASYMMETRIC, block, kind, zero_point_dtype=torch.int8)
    steps = quantize_affine(x, block, scale, zero, kind)
    torch.testing.assert_close(round_per_token(x), dequantize_affine(steps, block, scale, zero, kind))
