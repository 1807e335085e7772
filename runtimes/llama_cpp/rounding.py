"""How llama.cpp rounds activations, in torch.

A product with Q4_0 or Q8_0 weights reads activations as Q8_0 (blocks of 32, 8 bits), with Q6_K weights as Q8_K (blocks
of 256), with F16 weights as F16: `vec_dot_type` in ggml/src/ggml-cpu/ggml-cpu.c, `quantize_row_*_ref` in ggml-quants.c.
The key-value cache is F16, and flash attention adds up values in F16. Convolutions and state-space scans are float32.
Arm processors with float16 arithmetic also add up products of F16 numbers in F16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch.overrides import TorchFunctionMode


def round_q8_0(x: Tensor) -> Tensor:
    """X [..., N] to 8 bits in blocks of 32; the stored scale is float16."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (steps * _f16(scale)).flatten(-2)


def round_q8_k(x: Tensor) -> Tensor:
    """X [..., N] to 8 bits in blocks of 256; the value of greatest magnitude becomes -127."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    greatest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = greatest / -127
    steps = torch.where(scale != 0, blocks / scale, 0.0).round().clamp(max=127)
    rounded: Tensor = steps * scale
    return rounded.flatten(-2)


def dot_f16(x: Tensor, y: Tensor) -> Tensor:
    """Products of x and y, [..., N] each, added up in float16 in 32 lanes: [...].

    `ggml_vec_dot_f16` in ggml/src/ggml-cpu/vec.cpp with GGML_F16_STEP 32 and GGML_F16x8_REDUCE of simd-mappings.h.
    """
    whole = x.shape[-1] - x.shape[-1] % 32
    lanes = torch.zeros(32)
    for start in range(0, whole, 32):
        lanes = _f16(lanes + x[..., start : start + 32] * y[..., start : start + 32])
    quarters = lanes.reshape(*lanes.shape[:-1], 4, 8)
    halves = _f16(quarters[..., :2, :] + quarters[..., 2:, :])
    eight = _f16(halves[..., 0, :] + halves[..., 1, :])
    return eight.sum(-1) + (x[..., whole:] * y[..., whole:]).sum(-1)


def attend_f16(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, *, half_sums: bool = False
) -> Tensor:
    """Attention as ggml's flash attention does it for fewer than 64 tokens, one key at a time.

    `ggml_compute_forward_flash_attn_ext_f16_one_chunk` in ggml/src/ggml-cpu/ops.cpp: a running maximum, and the sum of
    values in float16.

    Args:
        q: [B, H, T, head_dim].
        keys: [B, KV, S, head_dim]; query head h reads head h // (H / KV).
        values: as keys.
        mask: what `F.scaled_dot_product_attention` takes, [.., T, S]; None: causal, T = S.
        half_sums: whether scores are added up in float16 too.

    Returns:
        [B, H, T, head_dim].
    """
    groups = q.shape[1] // keys.shape[1]
    keys, values = (_f16(x).repeat_interleave(groups, 1) for x in (keys, values))
    products = dot_f16(_f16(q)[..., None, :], keys[..., None, :, :]) if half_sums else _f16(q) @ keys.transpose(-1, -2)
    scores = products / q.shape[-1] ** 0.5
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    greatest = torch.full_like(scores[..., :1], -torch.inf)
    total, mixed = torch.zeros_like(greatest), torch.zeros_like(q)
    for key in range(scores.shape[-1]):
        score = scores[..., key, None]
        seen = score > -torch.inf
        before, greatest = greatest, torch.maximum(greatest, score)
        shrink = torch.where(seen, (before - greatest).exp(), 1.0)
        weight = torch.where(seen, (score - greatest).exp(), 0.0)
        mixed = _f16(_f16(mixed * shrink) + values[..., key, None, :] * weight)
        total = total * shrink + weight
    return mixed / total


def _f16(x: Tensor) -> Tensor:
    return x.half().float()


_ROUNDING: dict[Type, Callable[[Tensor], Tensor]] = {
    Type.Q4_0: round_q8_0,
    Type.Q8_0: round_q8_0,
    Type.Q6_K: round_q8_k,
    Type.F16: _f16,
}


class RoundedActivations(TorchFunctionMode):
    """Inside it, `F.linear` and attention see activations as llama.cpp does.

    Args:
        types: storage pointer of a weight -> its type in the file; other weights keep float32 activations.
        half_sums: whether products of F16 numbers are added up in float16.
    """

    def __init__(self, types: Mapping[int, Type], *, half_sums: bool = False) -> None:
        super().__init__()
        self._types = types
        self._half_sums = half_sums

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Rounds the activations of the two functions, passes every other call on."""
        if func is F.linear:
            x, weight, *rest = args
            storage = self._types.get(weight.untyped_storage().data_ptr(), Type.F32)
            rounding = _ROUNDING.get(storage)
            if self._half_sums and storage == Type.F16:
                return dot_f16(_f16(x)[..., None, :], weight)
            args = (rounding(x) if rounding else x, weight, *rest)
        elif func is F.scaled_dot_product_attention:
            q, keys, values = args
            return attend_f16(q, keys, values, (kwargs or {}).get("attn_mask"), half_sums=self._half_sums)
        return func(*args, **(kwargs or {}))
