"""The tensors of a GGUF file, in file order: their storage types, and their bytes from a state dict.

Names: gguf-py's constants and src/llama-arch.cpp. Types: `llama_tensor_get_type` and `tensor_type_fallback` of
src/llama-quant.cpp, without an importance matrix.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.measure.runtimes.base import StateDict
from nas.measure.runtimes.llama_cpp.kinds import (
    ATTENTION,
    KINDS,
    Part,
    Role,
    feed_forwards,
    feed_forwards_by_layer,
    mixers_by_layer,
    of_kind,
)
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import (
    EPSILONS,
    FACTORED,
    FALCON_H1,
    PATCHED,
    PHI3,
    QWEN35,
    SCALED,
    stored_types,
)
from nas.model.nn.rope import rope_divisors, turned_numbers

Type = GGMLQuantizationType
RMS_EPS = 1e-5
"""Of `nas.model.nn.primitives.RMSNorm`, and of the published LFM2."""
_PLAIN = {Type.F32: "<f4", Type.F16: "<f2"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file.

    Args:
        name: in the file.
        shape: slowest dimension first; the last is contiguous and is the axis of quantised blocks.
        role: what it is; only a matrix is quantised, the rest stays float32.
        layer: depth; None: outside the layers.
        source: what `nas.model.nn.model` calls it; empty for models that no layout describes.
        flat: whether its first two dimensions are one there.
        values: what it holds, where that follows from the layout; (): it has a source. A file of random weights has
            those of its role in their place, which takes the same time.
        factor: what its source is multiplied by, and not those below.
        below: sources whose rows follow those of `source`, and how many each has.
        equal: sources of other layers that must hold the same, since the architecture has one tensor for all.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "matrix"
    layer: int | None = None
    source: str = ""
    flat: bool = False
    values: tuple[float, ...] = ()
    factor: float = 1.0
    below: tuple[tuple[str, int], ...] = ()
    equal: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """The name without the layer and ".weight": "attn_q" of "blk.3.attn_q.weight", "ssm_dt.bias"."""
        return self.name.removeprefix(f"blk.{self.layer}.").removesuffix(".weight")

    @property
    def sources(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of the state dict that it is made of, in the order of its rows, and their shapes."""
        if self.values:
            return {}
        rows, *rest = (math.prod(self.shape[:2]), *self.shape[2:]) if self.flat else self.shape
        counts = {self.source: rows - sum(count for _, count in self.below), **dict(self.below)}
        return {name: (count, *rest) for name, count in counts.items()}


def tensors(layout: Layout, arch: str) -> Iterator[Tensor]:
    """Yields every tensor of the layout's file, in order."""
    width = layout.d_model
    # Norms see the same where the stream is divided by the root of what their epsilon is divided by.
    scale = math.sqrt(width) if arch in SCALED else math.sqrt(RMS_EPS / EPSILONS.get(arch, RMS_EPS))
    yield Tensor("token_embd.weight", (layout.vocab, width), source="embed.weight", factor=1 / scale)
    final_norm = "token_embd_norm" if arch in ("lfm2", "lfm2moe", PATCHED) else "output_norm"
    gain = scale if layout.tied else 1.0
    yield Tensor(f"{final_norm}.weight", (width,), "norm", source="norm.weight", factor=gain)
    if not layout.tied:
        yield Tensor("output.weight", (layout.vocab, width), source="head.weight")
    if arch == PHI3:
        yield from _phi3_tensors(layout)
        return
    # That of falcon-h1 has no ".weight" in llama.cpp's table; that of qwen35 is named for where it is.
    ffn_norm = {FALCON_H1: "ffn_norm", QWEN35: "post_attention_norm.weight"}.get(arch, "ffn_norm.weight")
    attention = of_kind((block for blocks in mixers_by_layer(layout) for block in blocks), *ATTENTION)
    if arch in FACTORED and attention[0].int("rope_tokens"):
        divisors = rope_divisors(attention[0])
        yield Tensor("rope_freqs.weight", (len(divisors),), "norm", values=divisors)
    for index, (mixers, ffns) in enumerate(zip(mixers_by_layer(layout), feed_forwards_by_layer(layout), strict=True)):
        if layout.layers[index].share is not None:
            continue
        places = [f"mixers.{j}." for j in range(len(mixers))]
        for norm, out_norm, half, blocks, prefixes in (
            ("attn_norm.weight", "post_attention_norm", "mixer", mixers, places),
            (ffn_norm, "post_ffw_norm", "ffn", ffns, ["ffn."]),
        ):
            if blocks and layout.norms != "behind":
                yield _tensor(index, Part(norm, (width,), f"{half}_norm.weight", "norm"))
            if blocks and layout.norms != "before":
                yield _tensor(index, Part(f"{out_norm}.weight", (width,), f"{half}_out_norm.weight", "norm"))
            for block, prefix in zip(blocks, prefixes, strict=False):
                for part in KINDS[block.kind].parts(block, width):
                    tensor = _tensor(index, part, prefix)
                    yield from _qwen35_tensor(tensor, scale) if arch == QWEN35 else (tensor,)
                if arch == PATCHED and block.kind in ATTENTION and (divisors := rope_divisors(block)):
                    yield Tensor(f"blk.{index}.rope_freqs.weight", (len(divisors),), "norm", index, values=divisors)


def _phi3_tensors(layout: Layout) -> Iterator[Tensor]:
    """Yields the layers as `phi3` has them: projections of one input are one tensor, divisors one for all layers."""
    width = layout.d_model
    (block,), (ffn,) = mixers_by_layer(layout)[0], feed_forwards_by_layer(layout)[0]
    q, kv = (block.int(heads) * block.int("head_dim") for heads in ("heads", "kv_heads"))
    hidden, depths = ffn.int("width"), range(layout.depth)
    for name in ("short", "long") if block.int("rope_long") else ():
        sources = [f"layers.{depth}.mixers.0.rope_{name}.weight" for depth in depths]
        pairs = (turned_numbers(block) // 2,)
        yield Tensor(f"rope_factors_{name}.weight", pairs, "norm", source=sources[0], equal=tuple(sources[1:]))
    for depth in depths:
        mixer, feed, name = f"layers.{depth}.mixers.0", f"layers.{depth}.ffn", f"blk.{depth}"
        yield _tensor(depth, Part("attn_norm.weight", (width,), "mixer_norm.weight", "norm"))
        below = ((f"{mixer}.k.weight", kv), (f"{mixer}.v.weight", kv))
        shape = (q + 2 * kv, width)
        yield Tensor(f"{name}.attn_qkv.weight", shape, layer=depth, source=f"{mixer}.q.weight", below=below)
        yield _tensor(depth, Part("attn_output.weight", (width, q), "o.weight"), "mixers.0.")
        yield _tensor(depth, Part("ffn_norm.weight", (width,), "ffn_norm.weight", "norm"))
        up, shape = ((f"{feed}.up.weight", hidden),), (2 * hidden, width)
        yield Tensor(f"{name}.ffn_up.weight", shape, layer=depth, source=f"{feed}.gate.weight", below=up)
        yield _tensor(depth, Part("ffn_down.weight", (width, hidden), "down.weight"), "ffn.")


def _qwen35_tensor(tensor: Tensor, scale: float) -> Iterator[Tensor]:
    """Yields a tensor of a block as `qwen35` has it: queries and gates are one, the stream is divided by `scale`."""
    if tensor.part == "attn_output_gate":
        return
    if tensor.part == "attn_q":
        rows, width = tensor.shape
        gates = (tensor.source.removesuffix("q.weight") + "gate.weight", rows)
        tensor = replace(tensor, shape=(2 * rows, width), below=(gates,))
    if tensor.part == "ssm_a":
        tensor = replace(tensor, shape=tensor.shape[:1], flat=False)
    # Norms of queries and keys have the same epsilon.
    scaled = tensor.part in ("attn_q", "attn_k", "attn_output", "ssm_out", "ffn_down")
    yield replace(tensor, factor=1 / scale) if scaled else tensor


def _tensor(index: int, part: Part, place: str = "") -> Tensor:
    source = f"layers.{index}.{place}{part.source}"
    return Tensor(f"blk.{index}.{part.name}", part.shape, part.role, index, source, part.flat)


def storage_type(tensor: Tensor, layout: Layout, quantisation: str) -> Type:
    """Returns the type a tensor is stored in: that of a file of the quantisation of its part."""
    place, *names = tensor.source.split(".")
    role = names[1] if place == "layers" else "embedding"
    name = stored_types(quantisation).at(role, tensor.layer, layout.depth)
    if tensor.role != "matrix" or name == "f32":
        return Type.F32
    return type_that_fits(_preferred_type(tensor, layout, GGMLQuantizationType[name.upper()]), tensor.shape[-1])


def _preferred_type(tensor: Tensor, layout: Layout, kind: Type) -> Type:
    if kind in (Type.F16, Type.Q8_0):
        return kind
    table_of_output = tensor.part == "output" or (tensor.part == "token_embd" and layout.tied)
    if table_of_output:
        return Type.Q6_K
    sparse = of_kind(feed_forwards(layout), "moe")
    if sparse and sparse[0].int("experts") == 8 and tensor.part in ("attn_k", "attn_v"):
        return Type.Q8_0  # a rule made for Mixtral that holds for every model of 8 experts
    return kind


_NARROWER = {
    Type.Q6_K: Type.Q8_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q4_K: Type.Q5_0,
    Type.Q3_K: Type.Q4_0,
    Type.IQ4_XS: Type.IQ4_NL,
}
"""Type of blocks of 256 -> what takes its place where rows are no multiple of that."""


def type_that_fits(preferred: Type, columns: int) -> Type:
    """Returns `preferred` if rows are multiples of its blocks; else that of blocks of 32 if it fits, else F16."""
    for candidate in (preferred, _NARROWER.get(preferred, Type.F16)):
        if columns % GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return Type.F16


def stored_bytes(shape: tuple[int, ...], storage: Type) -> int:
    """Returns the bytes of a tensor in the file, without padding."""
    block, size = GGML_QUANT_SIZES[storage]
    assert shape[-1] % block == 0
    return math.prod(shape) // block * size


class Quantiser:
    """`ggml_quantize_chunk` of a build's libggml-base: the blocks that llama.cpp's own tool would write.

    Args:
        library_folder: holds libggml-base.so.
    """

    def __init__(self, library_folder: Path) -> None:
        library = ctypes.CDLL(str(library_folder / "libggml-base.so"))
        self._chunk = library.ggml_quantize_chunk
        self._chunk.restype = ctypes.c_size_t
        floats, raw, count = ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_int64
        self._chunk.argtypes = [ctypes.c_int, floats, raw, count, count, count, floats]

    def quantise(self, values: NDArray[np.float32], storage: Type, size: int) -> NDArray[np.uint8]:
        """Returns the blocks of `values`, rows along the last dimension: [size] bytes."""
        source = np.ascontiguousarray(values)
        out = np.empty(size, np.uint8)
        columns = source.shape[-1]
        written = self._chunk(
            int(storage),
            source.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            out.ctypes.data_as(ctypes.c_void_p),
            0,
            source.size // columns,
            columns,
            None,
        )
        assert written == size, f"ggml wrote {written} bytes where the file has {size}"
        return out


class CheckpointTensors:
    """Contents for tensors, from a state dict.

    Args:
        state: an open checkpoint, most often.
    """

    def __init__(self, state: StateDict) -> None:
        self._state = state
        self._quantiser: Quantiser | None = None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuses a checkpoint of another layout before anything is written.

        Raises:
            InvalidInput: a tensor is missing, left over, or of another shape.
        """
        shapes = {name: shape for tensor in tensors for name, shape in tensor.sources.items()}
        shapes |= {name: tensor.shape for tensor in tensors for name in tensor.equal}
        if difference := sorted(self._state.names ^ shapes.keys()):
            state = "lacks" if difference[0] in shapes else "has, but the layout has not,"
            raise InvalidInput(f"checkpoint {state} {difference[0]}", where=self._state.place)
        for name, shape in shapes.items():
            if (stored := self._state.shape(name)) != shape:
                raise InvalidInput(f"{name} has shape {stored}, the layout needs {shape}", where=self._state.place)

    def data(self, tensor: Tensor, storage: Type) -> NDArray[np.uint8]:
        """Returns the bytes of `tensor`, shape [stored bytes].

        Raises:
            InvalidInput: values that are no float16 or float32, or not finite, or differ where they must be equal.
        """
        parts = [self._state.floats(name) for name in tensor.sources] or [np.array(tensor.values, np.float32)]
        if tensor.factor != 1.0:
            parts[0] = parts[0] * np.float32(tensor.factor)
        values = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if other := [name for name in tensor.equal if not np.array_equal(self._state.floats(name), values)]:
            raise InvalidInput(f"{other[0]} differs from {tensor.source}: the file has one", where=self._state.place)
        if tensor.role == "decay":
            values = -np.exp(values)  # GGUF stores A, the state dict its logarithm
        if storage in _PLAIN:
            with np.errstate(over="ignore"):  # infinite where float16 has no such number
                return np.ascontiguousarray(values, _PLAIN[storage]).reshape(-1).view(np.uint8)
        self._quantiser = self._quantiser or Quantiser(LLAMA_CPP.find_build(patched=None).folder)
        return self._quantiser.quantise(values, storage, stored_bytes(tensor.shape, storage))
