"""Number formats of 8da4w, and random weights made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nas.core.layout import Layout
from nas.runtimes.executorch.chain import build_chain
from nas.runtimes.executorch.contents import constant_sizes
from nas.runtimes.executorch.numbers import (
    bfloat16_bytes,
    dequantise_int4,
    pack_int4,
    quantise_int4,
    quantise_rows,
    round_bfloat16,
)
from nas.runtimes.executorch.random_weights import _POOL_BYTES, RandomContents

RNG = np.random.default_rng(0)


def test_bfloat16_is_torchs() -> None:
    values = np.concatenate([RNG.standard_normal(4096), [0.0, -0.0, 1.00390625, 1.01171875, 1e-30, 3e38]])
    values = values.astype(np.float32)
    theirs = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(round_bfloat16(values), theirs.float().numpy())
    assert bfloat16_bytes(values) == theirs.view(torch.int16).numpy().tobytes()


def test_int4_error_is_at_most_half_a_step() -> None:
    weights = RNG.standard_normal((8, 96)).astype(np.float32)
    values, scales = quantise_int4(weights)
    assert values.min() >= -8 and values.max() <= 7 and scales.shape == (8, 3)
    step = np.repeat(scales, 32, 1)
    # The greatest weight of a group is 7.5 steps away from zero and is cut to 7 where it is positive.
    assert (np.abs(dequantise_int4(values, scales) - weights) <= 0.55 * step).all()


def test_zeros_stay_zeros() -> None:
    values, scales = quantise_int4(np.zeros((2, 32), np.float32))
    assert not dequantise_int4(values, scales).any() and np.isfinite(scales).all()
    rows, row_scales = quantise_rows(np.zeros((2, 32), np.float32))
    assert not rows.any() and np.isfinite(row_scales).all()


def test_packing_puts_the_even_column_low() -> None:
    assert pack_int4(np.array([[-8, 7, 0, 1]], np.int8)) == bytes([0xF0, 0x98])


def test_rows_round_to_the_nearest() -> None:
    table = RNG.standard_normal((5, 64)).astype(np.float32)
    rows, scales = quantise_rows(table)
    assert (np.abs(rows * scales[:, None] - table) <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("text", ["d64 v100 ffn=swiglu:96 [C3 A2/1 M16]", "d64 v70 ffn=moe:4x2:32 [W2/1@8(sink=1)]"])
def test_random_contents_have_the_size_asked_for(text: str) -> None:
    contents = RandomContents(3)
    for method in build_chain(Layout.parse(text)).methods:
        for constant in method.program.constants:
            made = contents.constant(method, constant)
            assert tuple(map(len, made)) == constant_sizes(constant)
            if constant.role != "int4":
                assert np.isfinite(np.frombuffer(made[0], "<f4")).all()


def test_random_slices_wrap_around_the_pool() -> None:
    contents = RandomContents(0)
    long = contents._slice("x", 2 * _POOL_BYTES + 100)
    assert len(long) == 2 * _POOL_BYTES + 100
    assert long[:100] == long[_POOL_BYTES : _POOL_BYTES + 100] == contents._slice("x", 100)
    assert contents._slice("x", 100) != contents._slice("y", 100)
