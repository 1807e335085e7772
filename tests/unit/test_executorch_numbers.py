"""Number formats of 8da4w."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nas.measure.runtimes.executorch.contents import (
    bfloat16_bytes,
    constant_sizes,
    decoded,
    dequantise,
    encoded,
    pack_int4,
    quantise,
    quantise_int4,
    quantise_rows,
    round_bfloat16,
)
from nas.measure.runtimes.executorch.programs import FORMATS, Constant, Format, Program

RNG = np.random.default_rng(0)


def test_bfloat16_is_torchs() -> None:
    values = np.concatenate([RNG.standard_normal(4096), [0.0, -0.0, 1.00390625, 1.01171875, 1e-30, 3e38]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(round_bfloat16(values), expected.float().numpy())
    assert bfloat16_bytes(values) == expected.view(torch.int16).numpy().tobytes()


def test_int4_error_is_at_most_half_a_step() -> None:
    weights = RNG.standard_normal((8, 96)).astype(np.float32)
    values, scales = quantise_int4(weights)
    assert values.min() >= -8 and values.max() <= 7 and scales.shape == (8, 3)
    step = np.repeat(scales, 32, 1)
    # The greatest weight of a group is 7.5 steps away from zero and is cut to 7 where it is positive.
    assert (np.abs(dequantise(values, scales) - weights) <= 0.55 * step).all()


def test_zeros_stay_zeros() -> None:
    values, scales = quantise_int4(np.zeros((2, 32), np.float32))
    assert not dequantise(values, scales).any() and np.isfinite(scales).all()
    rows, row_scales = quantise_rows(np.zeros((2, 32), np.float32))
    assert not rows.any() and np.isfinite(row_scales).all()


def test_packing_puts_the_even_column_low() -> None:
    assert pack_int4(np.array([[-8, 7, 0, 1]], np.int8)) == bytes([0xF0, 0x98])


def test_rows_round_to_the_nearest() -> None:
    table = RNG.standard_normal((5, 64)).astype(np.float32)
    rows, scales = quantise_rows(table)
    assert (np.abs(rows * scales[:, None] - table) <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_read_again(name: str) -> None:
    form, weights = FORMATS[name], RNG.standard_normal((6, 256)).astype(np.float32)
    values, scales = quantise(weights, form)
    parts = encoded(values, scales, form)
    assert tuple(map(len, parts)) == constant_sizes(Constant("one", (6, 256), "int4"), form)
    stored = decoded(parts, (6, 256), form)
    np.testing.assert_array_equal(dequantise(*stored), dequantise(values, scales))
    error = np.abs(dequantise(values, scales) - weights).mean()
    assert error < (0.01 if form.bits == 8 else 0.2)


def test_groups_are_as_large_as_all_rows_of_a_program_allow() -> None:
    def program(*rows: int) -> Program:
        constants = tuple(Constant(f"one{row}", (8, row), "int4") for row in rows)
        return Program("test", "module:Class", (), constants)

    assert program(256, 128).stored_as("8da4w_128").format == Format(4, 128)
    assert program(256, 576).stored_as("8da4w_128").format == Format(4, 64)
    assert program(256, 96).stored_as("8da4w_128").format == Format(4, 32)
    assert program(256, 96).stored_as("8da8w").format == Format(8, 0)
    assert program(64) == program(64).stored_as("8da4w") != program(64).stored_as("8da4w_64")
    assert program().stored_as("8da8w") == program(), "nothing is quantised"
