"""The tensors of a GGUF file, in file order, and the type that llama.cpp's quantiser gives each.

Names: gguf-py's constants and src/llama-arch.cpp. Types: `llama_tensor_get_type` and `tensor_type_fallback` of
src/llama-quant.cpp, without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nas.core.block import Block
from nas.core.layout import Layout
from nas.runtimes.llama_cpp.layers import feed_forwards, mixers, of_kind
from nas.runtimes.llama_cpp.support import PATCHED, Quantisation

Type = GGMLQuantizationType
Role = Literal["matrix", "norm", "conv", "router", "bias", "decay"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file.

    Args:
        name: in the file.
        shape: slowest dimension first; the last is contiguous and is what quantised blocks lie along.
        role: what it is; only a matrix is quantised, the rest stays float32.
        layer: depth; None: outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "matrix"
    layer: int | None = None

    @property
    def part(self) -> str:
        """The name without the layer and ".weight": "attn_q" of "blk.3.attn_q.weight", "ssm_dt.bias"."""
        return self.name.removeprefix(f"blk.{self.layer}.").removesuffix(".weight")


def tensors(layout: Layout, arch: str) -> Iterator[Tensor]:
    """Every tensor of the layout's file, in order."""
    width = layout.d_model
    yield Tensor("token_embd.weight", (layout.vocab, width))
    final_norm = "token_embd_norm" if arch in ("lfm2", "lfm2moe", PATCHED) else "output_norm"
    yield Tensor(f"{final_norm}.weight", (width,), "norm")
    if not layout.tied:
        yield Tensor("output.weight", (layout.vocab, width))
    for index, (mixer, ffn) in enumerate(zip(mixers(layout), feed_forwards(layout), strict=True)):
        for name, shape, role in (
            ("attn_norm.weight", (width,), "norm"),
            *_PARTS[mixer.kind](mixer, width),
            ("ffn_norm.weight", (width,), "norm"),
            *_PARTS[ffn.kind](ffn, width),
        ):
            yield Tensor(f"blk.{index}.{name}", shape, role, index)


_Part = tuple[str, tuple[int, ...], Role]


def _attention(block: Block, width: int) -> Iterator[_Part]:
    heads, head_dim = block.int("heads"), block.int("head_dim")
    q, kv = heads * head_dim, block.int("kv_heads") * head_dim
    yield "attn_q.weight", (q, width), "matrix"
    yield "attn_k.weight", (kv, width), "matrix"
    yield "attn_v.weight", (kv, width), "matrix"
    yield "attn_output.weight", (width, q), "matrix"
    if block.get("qk_norm"):
        yield "attn_q_norm.weight", (head_dim,), "norm"
        yield "attn_k_norm.weight", (head_dim,), "norm"
    if block.kind == "swa" and block.get("sink"):
        yield "attn_sinks.weight", (heads,), "bias"


def _conv(block: Block, width: int) -> Iterator[_Part]:
    yield "shortconv.conv.weight", (width, block.int("kernel")), "conv"
    yield "shortconv.in_proj.weight", (3 * width, width), "matrix"
    yield "shortconv.out_proj.weight", (width, width), "matrix"


def _mamba2(block: Block, width: int) -> Iterator[_Part]:
    inner, heads, groups = block.int("expand") * width, block.int("heads"), block.int("groups")
    mixed = inner + 2 * groups * block.int("state")
    yield "ssm_in.weight", (inner + mixed + heads, width), "matrix"
    yield "ssm_conv1d.weight", (mixed, block.int("conv")), "conv"
    yield "ssm_conv1d.bias", (mixed,), "bias"
    yield "ssm_dt.bias", (heads,), "bias"
    yield "ssm_a", (heads, 1), "decay"
    yield "ssm_d", (heads, 1), "norm"
    yield "ssm_norm.weight", (groups, inner // groups), "norm"
    yield "ssm_out.weight", (width, inner), "matrix"


def _dense(block: Block, width: int) -> Iterator[_Part]:
    hidden = block.int("width")
    yield "ffn_gate.weight", (hidden, width), "matrix"
    yield "ffn_up.weight", (hidden, width), "matrix"
    yield "ffn_down.weight", (width, hidden), "matrix"


def _experts(block: Block, width: int) -> Iterator[_Part]:
    experts, hidden = block.int("experts"), block.int("width")
    yield "ffn_gate_inp.weight", (experts, width), "router"
    yield "exp_probs_b.bias", (experts,), "bias"
    yield "ffn_gate_exps.weight", (experts, hidden, width), "matrix"
    yield "ffn_up_exps.weight", (experts, hidden, width), "matrix"
    yield "ffn_down_exps.weight", (experts, width, hidden), "matrix"


_PARTS = {
    "conv": _conv,
    "gqa": _attention,
    "swa": _attention,
    "mamba2": _mamba2,
    "swiglu": _dense,
    "moe": _experts,
}


def storage_type(tensor: Tensor, layout: Layout, quantisation: Quantisation) -> Type:
    """The type a tensor is stored in."""
    if tensor.role != "matrix" or quantisation == "f32":
        return Type.F32
    if quantisation == "f16":
        return Type.F16
    return type_that_fits(_wanted(tensor, layout), tensor.shape[-1])


def _wanted(tensor: Tensor, layout: Layout) -> Type:
    table_of_output = tensor.part == "output" or (tensor.part == "token_embd" and layout.tied)
    if table_of_output:
        return Type.Q6_K
    sparse = of_kind(feed_forwards(layout), "moe")
    if sparse and sparse[0].int("experts") == 8 and tensor.part in ("attn_k", "attn_v"):
        return Type.Q8_0  # a rule made for Mixtral that holds for every model of 8 experts
    return Type.Q4_0


def type_that_fits(wanted: Type, columns: int) -> Type:
    """Blocks lie along rows: where rows are no multiple of a block, Q6_K falls back to Q8_0, and 32-blocks to F16."""
    for candidate in (wanted, Type.Q8_0) if wanted == Type.Q6_K else (wanted,):
        if columns % GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return Type.F16


def stored_bytes(shape: tuple[int, ...], storage: Type) -> int:
    """Bytes of a tensor in the file, without padding."""
    block, size = GGML_QUANT_SIZES[storage]
    count = 1
    for length in shape:
        count *= length
    assert shape[-1] % block == 0
    return count // block * size
