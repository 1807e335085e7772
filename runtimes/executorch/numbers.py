"""Number formats of 8da4w: 4-bit weights with a bfloat16 scale per group, an 8-bit embedding with a scale per row.

XNNPACK keeps group scales as bfloat16, so weights are rounded with the scale that will be used, not with a finer one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nas.runtimes.executorch.programs import GROUP

Floats = NDArray[np.float32]


def quantise_int4(weights: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Weights [O, I] as values in -8..7 [O, I] and scales [O, I / GROUP]; a group of zeros has scale 1."""
    groups = weights.reshape(len(weights), -1, GROUP)
    scales = round_bfloat16(np.abs(groups).max(-1) / np.float32(7.5))
    scales[scales == 0] = 1
    values = np.clip(np.rint(groups / scales[..., None]), -8, 7).astype(np.int8)
    return values.reshape(weights.shape), scales


def dequantise_int4(values: NDArray[np.int8], scales: Floats) -> Floats:
    """The weights that `quantise_int4` stands for."""
    groups = values.reshape(len(values), -1, GROUP).astype(np.float32)
    return (groups * scales[..., None]).reshape(values.shape)


def quantise_rows(table: Floats) -> tuple[NDArray[np.int8], Floats]:
    """A table [V, D] as values in -127..127 and scales [V]; a row of zeros has scale 1."""
    scales = (np.abs(table).max(-1) / np.float32(127)).astype(np.float32)
    scales[scales == 0] = 1
    return np.clip(np.rint(table / scales[:, None]), -127, 127).astype(np.int8), scales


def pack_int4(values: NDArray[np.int8]) -> bytes:
    """Two values a byte, the even column in the low half, each plus 8."""
    shifted = (values + 8).astype(np.uint8).reshape(-1)
    return (shifted[1::2] << 4 | shifted[::2]).tobytes()


def round_bfloat16(values: Floats) -> Floats:
    """To the nearest bfloat16, ties to even; finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).copy()


def bfloat16_bytes(values: Floats) -> bytes:
    """`values` as bfloat16, little endian."""
    return (round_bfloat16(values).view(np.uint32) >> 16).astype("<u2").tobytes()
