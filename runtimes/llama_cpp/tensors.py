"""The tensors of a GGUF file, in file order, and the type that llama.cpp's quantiser gives each.

Names: gguf-py's constants and src/llama-arch.cpp. Types: `llama_tensor_get_type` and `tensor_type_fallback` of
src/llama-quant.cpp, without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nas.core.layout import Layout
from nas.runtimes.llama_cpp.support import Quantisation, Stock

Type = GGMLQuantizationType
Role = Literal["matrix", "norm", "conv", "router", "bias"]


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
        """The name without the layer: "attn_q" of "blk.3.attn_q.weight"."""
        return self.name.removeprefix(f"blk.{self.layer}.").rpartition(".")[0]


def tensors(layout: Layout, stock: Stock) -> Iterator[Tensor]:
    """Every tensor of the layout's file, in order."""
    width = layout.d_model
    yield Tensor("token_embd.weight", (layout.vocab, width))
    final_norm = "token_embd_norm" if stock.arch.startswith("lfm2") else "output_norm"
    yield Tensor(f"{final_norm}.weight", (width,), "norm")
    if not layout.tied:
        yield Tensor("output.weight", (layout.vocab, width))
    for index, kv_heads in enumerate(stock.kv_heads):
        for name, shape, role in (
            *(_attention(stock, width, kv_heads) if kv_heads else _conv(stock, width)),
            *(_experts(stock, width) if stock.experts and index >= stock.dense_lead else _dense(stock, width)),
        ):
            yield Tensor(f"blk.{index}.{name}", shape, role, index)


_Part = tuple[str, tuple[int, ...], Role]


def _attention(stock: Stock, width: int, kv_heads: int) -> Iterator[_Part]:
    q, kv = stock.heads * stock.head_dim, kv_heads * stock.head_dim
    yield "attn_norm.weight", (width,), "norm"
    yield "attn_q.weight", (q, width), "matrix"
    yield "attn_k.weight", (kv, width), "matrix"
    yield "attn_v.weight", (kv, width), "matrix"
    yield "attn_output.weight", (width, q), "matrix"
    if stock.arch != "llama":
        yield "attn_q_norm.weight", (stock.head_dim,), "norm"
        yield "attn_k_norm.weight", (stock.head_dim,), "norm"


def _conv(stock: Stock, width: int) -> Iterator[_Part]:
    yield "attn_norm.weight", (width,), "norm"
    yield "shortconv.conv.weight", (width, stock.kernel), "conv"
    yield "shortconv.in_proj.weight", (3 * width, width), "matrix"
    yield "shortconv.out_proj.weight", (width, width), "matrix"


def _dense(stock: Stock, width: int) -> Iterator[_Part]:
    yield "ffn_norm.weight", (width,), "norm"
    yield "ffn_gate.weight", (stock.ff, width), "matrix"
    yield "ffn_up.weight", (stock.ff, width), "matrix"
    yield "ffn_down.weight", (width, stock.ff), "matrix"


def _experts(stock: Stock, width: int) -> Iterator[_Part]:
    assert stock.experts is not None
    experts, _, hidden = stock.experts
    yield "ffn_norm.weight", (width,), "norm"
    yield "ffn_gate_inp.weight", (experts, width), "router"
    yield "exp_probs_b.bias", (experts,), "bias"
    yield "ffn_gate_exps.weight", (experts, hidden, width), "matrix"
    yield "ffn_up_exps.weight", (experts, hidden, width), "matrix"
    yield "ffn_down_exps.weight", (experts, width, hidden), "matrix"


def storage_type(tensor: Tensor, layout: Layout, stock: Stock, quantisation: Quantisation) -> Type:
    """The type a tensor is stored in."""
    if tensor.role != "matrix" or quantisation == "f32":
        return Type.F32
    if quantisation == "f16":
        return Type.F16
    return _that_fits(_wanted(tensor, layout, stock), tensor.shape[-1])


def _wanted(tensor: Tensor, layout: Layout, stock: Stock) -> Type:
    table_of_output = tensor.part == "output" or (tensor.part == "token_embd" and layout.tied)
    if table_of_output:
        return Type.Q6_K
    if stock.experts and stock.experts[0] == 8 and tensor.part in ("attn_k", "attn_v"):
        return Type.Q8_0  # a rule made for Mixtral that holds for every model of 8 experts
    return Type.Q4_0


def _that_fits(wanted: Type, columns: int) -> Type:
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
