"""PyTorch's side of the equivalence gate: a checkpoint as its GGUF file stores it, activations exact or rounded.

Rounding follows llama.cpp. A product with weights in blocks of 32 reads activations as Q8_0 or Q8_1 (blocks of 32, 8
bits), with weights in blocks of 256 as Q8_K (blocks of 256), with F16 weights as F16: `vec_dot_type` in
ggml/src/ggml-cpu/ggml-cpu.c, `quantize_row_*_ref` in ggml-quants.c. The key-value cache is F16, and flash attention
adds up values in F16. GELU is a table from F16 to F16 (`ggml_table_gelu_f16`). Convolutions and state-space scans are
float32. Arm processors with float16 arithmetic and GPUs also add up products of F16 numbers in F16.

Where two experts score alike, rounding picks another one and all that follows differs. Held to the same choices, two
computations differ by rounding alone; whether the choices were right is then a question of their own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gguf import quants
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nas.core.block import Block
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, Floats
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.llama_cpp.binding import Choices
from nas.measure.runtimes.llama_cpp.gate import Computed
from nas.measure.runtimes.llama_cpp.kinds import KINDS
from nas.measure.runtimes.llama_cpp.support import architecture
from nas.measure.runtimes.llama_cpp.tensors import CheckpointTensors, Type, storage_type, tensors
from nas.measure.runtimes.llama_cpp.tensors import Tensor as FileTensor
from nas.model.nn.gqa import attend_bounded
from nas.model.nn.model import Model
from nas.model.nn.primitives import bounded


class Oracle:
    """A layout with a checkpoint's weights, dequantised.

    It rounds the checkpoint again and reads nothing of the GGUF file, so a file with tensors in wrong places differs.

    Args:
        layout: what to compute.
        quantisation: of the file that it is compared with.
        checkpoint: the trained weights.
        half_sums: in how many lanes the processor adds up products of F16 numbers in float16; 0: in float32.

    Attributes:
        model: computes in float32 with the dequantised weights.

    Raises:
        InvalidInput: the checkpoint does not fit the layout.
        Unsupported: neither build carries the layout.
    """

    def __init__(self, layout: Layout, quantisation: str, checkpoint: Checkpoint, *, half_sums: int = 0) -> None:
        self._half_sums = half_sums
        listed = [tensor for tensor in tensors(layout, architecture(layout)) if not tensor.values]
        self.model = Model(layout, seed=None).eval()
        state = self.model.state_dict()
        self._types: dict[int, Type] = {}
        with CheckpointFile(checkpoint.verified()) as file:
            contents = CheckpointTensors(file)
            contents.check(listed)
            for tensor in listed:
                storage = storage_type(tensor, layout, quantisation)
                values = _rounded(contents, tensor, storage)
                sources = [*tensor.sources, *tensor.equal]
                parts = torch.split(values, [state[name].numel() for name in tensor.sources])
                for name, part in zip(sources, [*parts, *[parts[0]] * len(tensor.equal)], strict=True):
                    state[name].copy_(part.view(state[name].shape))
                    self._types[state[name].untyped_storage().data_ptr()] = storage

    @torch.no_grad()
    def exact(self, ids: NDArray[np.int64], experts: Choices | None = None) -> Computed:
        """Computes ids [T] in float32; mixtures follow `experts`, or choose for themselves and give no scores."""
        followed = FollowedExperts([torch.from_numpy(chosen) for _, chosen in sorted((experts or {}).items())])
        with followed if experts else contextlib.nullcontext():
            logits = self.model(torch.from_numpy(ids)[None])[0]
        return Computed(logits.numpy(), tuple(scores.numpy() for scores in followed.scores))

    def rounded(self, ids: NDArray[np.int64], experts: Choices | None = None) -> Computed:
        """Computes the same with activations rounded where llama.cpp rounds them."""
        with RoundedActivations(self._types, half_sums=self._half_sums):
            return self.exact(ids, experts)


def rounded_block(layout: Layout, block: Block, quantisation: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of a block of `layout` with the values that a file has."""
    contents = CheckpointTensors(_BlockWeights(weights))
    place = "mixers" if block.spec.role == "mixer" else "ffn"
    rounded = dict(weights)
    for part in KINDS[block.kind].parts(block.resolve(layout.d_model), layout.d_model):
        tensor = FileTensor(part.name, part.shape, part.role, 0, f"layers.0.{place}.{part.source}", part.flat)
        storage = storage_type(tensor, layout, quantisation)
        values = _rounded(contents, replace(tensor, source=part.source), storage)
        rounded[part.source] = values.view(weights[part.source].shape)
    return rounded


def _rounded(contents: CheckpointTensors, tensor: FileTensor, storage: Type) -> Tensor:
    """Returns a tensor with the values that it has in the file, in one row."""
    values = quants.dequantize(contents.data(tensor, storage), storage)
    if tensor.role == "decay":
        values = np.log(-values)
    flat = torch.from_numpy(values.reshape(-1))
    count = math.prod(tensor.sources[tensor.source])
    return torch.cat([flat[:count] / tensor.factor, flat[count:]])


class _BlockWeights:
    """A block's state dict, as `nas.measure.runtimes.base.StateDict`."""

    place = "the library"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights, self.names = weights, frozenset(weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self._weights[name].shape)

    def floats(self, name: str, cut: tuple[Any, ...] = ()) -> Floats:
        """Returns the values of a tensor."""
        values: Floats = self._weights[name].detach().float().cpu().numpy()[cut]
        return values


class FollowedExperts(TorchFunctionMode):
    """A context in which `nas.model.nn.moe` sends tokens to the experts of `choices`, whatever their scores.

    Args:
        choices: expert numbers [T, top_k] of each mixture, in the order of depth.

    Attributes:
        scores: what each mixture would have chosen by, [T, experts]: score and bias.
    """

    def __init__(self, choices: Sequence[Tensor]) -> None:
        super().__init__()
        self._choices = iter(choices)
        self.scores: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers `topk` with the next choice, passes every other call on."""
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, chosen = args[0], next(self._choices)
        self.scores.append(scores)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def round_q8_0(x: Tensor) -> Tensor:
    """Rounds x [..., N] to 8 bits in blocks of 32; the stored scale is float16."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (steps * _f16(scale)).flatten(-2)


def round_q8_k(x: Tensor) -> Tensor:
    """Rounds x [..., N] to 8 bits in blocks of 256; the value of greatest magnitude becomes -127."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    greatest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = greatest / -127
    steps = torch.where(scale != 0, blocks / scale, 0.0).round().clamp(max=127)
    rounded: Tensor = steps * scale
    return rounded.flatten(-2)


def dot_f16(x: Tensor, y: Tensor, lanes: int) -> Tensor:
    """Returns products of x and y, [..., N] each, added up in float16 in so many lanes: [...].

    32 lanes are those of `ggml_vec_dot_f16` in ggml/src/ggml-cpu/vec.cpp, with GGML_F16_STEP 32 and GGML_F16x8_REDUCE
    of simd-mappings.h; one lane is a thread of a GPU, where ACC_TYPE of ggml-vulkan's mul_mm.comp is float16.
    """
    whole = x.shape[-1] - x.shape[-1] % lanes
    sums = torch.zeros(lanes)
    for start in range(0, whole, lanes):
        sums = _f16(sums + x[..., start : start + lanes] * y[..., start : start + lanes])
    while (half := sums.shape[-1] // 2) > 4:
        sums = _f16(sums[..., :half] + sums[..., half:])
    return sums.sum(-1) + (x[..., whole:] * y[..., whole:]).sum(-1)


def attend_f16(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    half_sums: int = 0,
) -> Tensor:
    """Computes attention as ggml's flash attention does for fewer than 64 tokens, one key at a time.

    `ggml_compute_forward_flash_attn_ext_f16_one_chunk` in ggml/src/ggml-cpu/ops.cpp: a running maximum, and the sum of
    values in float16.

    Args:
        q: [B, H, T, head_dim].
        keys: [B, KV, S, head_dim]; query head h reads head h // (H / KV).
        values: [B, KV, S, v], as keys.
        mask: what `F.scaled_dot_product_attention` takes, [.., T, S]; None: causal, T = S.
        scale: of scores; None: 1 / sqrt(head_dim).
        softcap: bound of scores; 0: none.
        half_sums: in how many lanes scores are added up in float16; 0: in float32.

    Returns:
        [B, H, T, v].
    """
    groups = q.shape[1] // keys.shape[1]
    keys, values = (_f16(x).repeat_interleave(groups, 1) for x in (keys, values))
    products = (
        dot_f16(_f16(q)[..., None, :], keys[..., None, :, :], half_sums)
        if half_sums
        else _f16(q) @ keys.transpose(-1, -2)
    )
    scores = products / q.shape[-1] ** 0.5 if scale is None else products * scale
    scores = bounded(scores, softcap)
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    greatest = torch.full_like(scores[..., :1], -torch.inf)
    total, mixed = torch.zeros_like(greatest), values.new_zeros(*q.shape[:-1], values.shape[-1])
    for key in range(scores.shape[-1]):
        score = scores[..., key, None]
        is_visible = score > -torch.inf
        before, greatest = greatest, torch.maximum(greatest, score)
        shrink = torch.where(is_visible, (before - greatest).exp(), 1.0)
        weight = torch.where(is_visible, (score - greatest).exp(), 0.0)
        mixed = _f16(_f16(mixed * shrink) + values[..., key, None, :] * weight)
        total = total * shrink + weight
    return mixed / total


def _f16(x: Tensor) -> Tensor:
    return x.half().float()


_ROUNDING: dict[Type, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys((Type.Q8_0, Type.Q5_1, Type.Q5_0, Type.Q4_1, Type.Q4_0, Type.IQ4_NL), round_q8_0),
    **dict.fromkeys((Type.Q6_K, Type.Q5_K, Type.Q4_K, Type.IQ4_XS, Type.Q3_K), round_q8_k),
    Type.F16: _f16,
}


class RoundedActivations(TorchFunctionMode):
    """Inside it, `F.linear`, GELU and attention see activations as llama.cpp does.

    Args:
        types: storage pointer of a weight -> its type in the file; other weights keep float32 activations.
        half_sums: in how many lanes products of F16 numbers are added up in float16; 0: in float32.
    """

    def __init__(self, types: Mapping[int, Type], *, half_sums: int = 0) -> None:
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
        """Rounds the activations of these functions, passes every other call on."""
        if func is F.linear:
            x, weight, *rest = args
            storage = self._types.get(weight.untyped_storage().data_ptr(), Type.F32)
            rounding = _ROUNDING.get(storage)
            if self._half_sums and storage == Type.F16:
                return dot_f16(_f16(x)[..., None, :], weight, self._half_sums)
            args = (rounding(x) if rounding else x, weight, *rest)
        elif func is F.scaled_dot_product_attention:
            q, keys, values = args
            about = kwargs or {}
            scale = about.get("scale")
            return attend_f16(q, keys, values, about.get("attn_mask"), scale=scale, half_sums=self._half_sums)
        elif func is attend_bounded:
            q, keys, values, mask, softcap = args
            return attend_f16(q, keys, values, mask, softcap=softcap, half_sums=self._half_sums)
        elif func is F.gelu:
            return _f16(func(_f16(args[0]), **(kwargs or {})))
        return func(*args, **(kwargs or {}))
