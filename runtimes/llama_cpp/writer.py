"""Writes GGUF files: a layout's keys and values, then the names, shapes and types of its tensors, then their bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGUFValueType, GGUFWriter, Keys, PoolingType, RopeScalingType, TokenType
from gguf.utility import model_weight_count_rounded_notation
from numpy.typing import NDArray

from nas.core.block import BLOCKS, Block
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, Purpose, RandomWeights, StateDict, Vocabulary, Weights
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.llama_cpp.gguf_file import RETRIEVAL
from nas.measure.runtimes.llama_cpp.kinds import (
    ATTENTION,
    IN_EVERY_FILE,
    KINDS,
    add_used,
    feed_forwards,
    feed_forwards_by_layer,
    mixers,
    mixers_by_layer,
    of_kind,
)
from nas.measure.runtimes.llama_cpp.random_weights import ALIGNMENT, MAKES, random_recipe
from nas.measure.runtimes.llama_cpp.support import (
    EPSILONS,
    GRANITE_HYBRID,
    PAIRED,
    PATCHED,
    PROJECTED,
    QWEN35,
    ROPE_SECTIONS,
    WINDOWED,
    architecture,
    stored_types,
)
from nas.measure.runtimes.llama_cpp.tensors import (
    RMS_EPS,
    CheckpointTensors,
    Tensor,
    Type,
    storage_type,
    stored_bytes,
    tensors,
)
from nas.measure.runtimes.writing import Piece, Written, hashed, replacing, write_drawn

WRITER_VERSION = "3"
"""Raise it with every change of this package that changes the bytes of a file."""

FILE_TYPE = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q3_k": 11, "q4_k": 14},
    **{"q5_k": 16, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30},
}
"""`llama_ftype` of include/llama.h."""
QUANTISATION_VERSION = 2  # GGML_QNT_VERSION
CONTEXT = 32768

_Stored = list[tuple[Tensor, Type]]


PROJECTION = "hilnas.retrieval.projection"
"""Key of its projection, row after row, where llama.cpp does not apply one."""


TOWER = "hilnas.tower"
"""Key of the tower that a file of random weights goes with, so that equal files are measured with equal towers."""


@dataclass(frozen=True)
class TokenVectors:
    """What a file has that gives a vector to each token.

    Args:
        projection: of the last features, [width, d_model].
        settings: of the texts that it reads, JSON.
        bidirectional: whether tokens see those behind them, too.
    """

    projection: NDArray[np.float32]
    settings: str
    bidirectional: bool = False


@dataclass(frozen=True)
class Released:
    """What a file has that is made for others.

    Args:
        name: of the model.
        license: identifier of the licence; None: left open.
        vocabulary: for text.
        context: tokens that the model is meant for.
        vectors: of a late-interaction model; None: it generates text.
    """

    name: str
    license: str | None
    vocabulary: Vocabulary
    context: int
    vectors: TokenVectors | None = None


def write_gguf(
    layout: Layout,
    quantisation: str,
    weights: Weights | StateDict,
    destination: Path,
    *,
    recipe: bool = False,
    released: Released | None = None,
) -> Written:
    """Writes the file, or (`recipe`, random weights of types that the runner makes) its recipe, and renames it.

    `weights` are random, trained, or any state dict of `nas.model.nn.model`. `released` is what a model for others has
    besides them; without it the file knows token ids only, which is all that measuring needs.

    Raises:
        Unsupported: neither build carries the layout, or a weight is too large for float16.
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, most often for want of space.
    """
    arch = architecture(layout)
    listed = [*tensors(layout, arch), *_projection(layout, arch, weights, released)]
    stored = [(tensor, storage_type(tensor, layout, quantisation)) for tensor in listed]
    with replacing(destination) as partial:
        writer = _Writer(partial, arch)
        _add_metadata(writer, layout, quantisation, released)
        header = header_bytes(writer, partial, stored)
        if isinstance(weights, RandomWeights):
            makes = recipe and MAKES.issuperset(storage for _, storage in stored)
            return write_drawn(random_recipe(header, stored, weights.seed), partial, recipe=makes)
        with CheckpointFile(weights.verified()) if isinstance(weights, Checkpoint) else nullcontext(weights) as state:
            contents = CheckpointTensors(state)
            contents.check([tensor for tensor, _ in stored])
            return Written(hashed(_trained(header, layout, arch, stored, contents), partial))


def _projection(layout: Layout, arch: str, weights: Weights | StateDict, released: Released | None) -> Iterator[Tensor]:
    """Yields the projection to token vectors, in float32, where llama.cpp applies it."""
    if arch not in PROJECTED:
        return
    if layout.vectors and isinstance(weights, RandomWeights):
        yield Tensor("dense_2.weight", (layout.vectors, layout.d_model), "router")
    if released is not None and released.vectors is not None:
        rows = released.vectors.projection
        yield Tensor("dense_2.weight", rows.shape, "router", values=tuple(rows.ravel().tolist()))


def _trained(
    header: bytes, layout: Layout, arch: str, stored: _Stored, checkpoint: CheckpointTensors
) -> Iterator[Piece]:
    yield header
    for tensor, storage in stored:
        data = checkpoint.data(tensor, storage)
        if storage == Type.F16 and not np.isfinite(data.view("<f2")).all():
            raise Unsupported(f"{tensor.source} holds values that float16 does not")
        yield _turned(data, tensor, layout, arch).data
        yield bytes(-data.size % ALIGNMENT)


def _turned(data: NDArray[np.uint8], tensor: Tensor, layout: Layout, arch: str) -> NDArray[np.uint8]:
    """Reorders rows of heads as some architectures have them; blocks lie along rows, so stored rows can be.

    RoPE of `llama` and `arcee` turns neighbouring numbers of a head; the others (and nas.model.nn) number i and number
    i + head_dim / 2. `qwen35` has the gates of a head behind its queries.
    """
    size = of_kind(mixers(layout), *ATTENTION)[0].int("head_dim") if arch in (*PAIRED, QWEN35) else 0
    if arch in PAIRED and tensor.part in ("attn_q", "attn_k"):
        axes, parts = (1, 2), data.reshape(-1, 2, size // 2, data.size // tensor.shape[0])
    elif arch == QWEN35 and tensor.part == "attn_q":
        axes, parts = (0, 1), data.reshape(2, -1, size, data.size // tensor.shape[0])
    else:
        return data
    return parts.swapaxes(*axes).reshape(-1)


class _Writer(GGUFWriter):
    """A GGUF writer that accepts empty lists of strings, such as the merges of BPE without merges."""

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype == GGUFValueType.ARRAY and len(val) == 0:
            return struct.pack("<IIQ" if add_vtype else "<IQ", *((vtype,) * add_vtype), GGUFValueType.STRING, 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


def _add_metadata(writer: GGUFWriter, layout: Layout, quantisation: str, released: Released | None) -> None:
    """Describes `layout` to the architecture that the writer was opened for."""
    if released is not None:
        writer.add_name(released.name)
        if released.license is not None:
            writer.add_license(released.license)
        total = model_weight_count_rounded_notation(layout.params.total)
        active = model_weight_count_rounded_notation(layout.params.active)
        # 350M; 8.3B-A1.5B where fewer are active.
        writer.add_size_label(f"{total}-A{active}" if layout.params.active < layout.params.total else total)
        if released.vectors is not None:
            _add_vectors(writer, released.vectors)
    if layout.vectors and writer.arch in PROJECTED:
        writer.add_embedding_length_out(layout.vectors)
    if layout.tower:
        writer.add_string(TOWER, layout.tower.format())
    writer.add_file_type(FILE_TYPE[stored_types(quantisation).others])
    writer.add_quantization_version(QUANTISATION_VERSION)
    if released is None:
        writer.add_tokenizer_model("none")
    else:
        _add_vocabulary(writer, released.vocabulary)
    writer.add_vocab_size(layout.vocab)
    writer.add_block_count(layout.depth)
    writer.add_context_length(released.context if released else CONTEXT)
    writer.add_embedding_length(layout.d_model)
    writer.add_layer_norm_rms_eps(EPSILONS.get(writer.arch, RMS_EPS))
    if writer.arch == PATCHED:
        _add_patched(writer, layout)
    else:
        _add_stock(writer, layout)


def _add_vectors(writer: GGUFWriter, vectors: TokenVectors) -> None:
    writer.add_pooling_type(PoolingType.NONE)
    writer.add_string(RETRIEVAL, vectors.settings)
    if vectors.bidirectional:
        if writer.arch not in PROJECTED:
            raise Unsupported(
                f"a bidirectional {writer.arch}: llama.cpp reads both ways in {' and '.join(PROJECTED)} alone"
            )
        writer.add_causal_attention(False)
    if writer.arch in PROJECTED:
        writer.add_embedding_length_out(len(vectors.projection))
    else:
        writer.add_array(PROJECTION, vectors.projection.ravel().tolist())


def _add_stock(writer: GGUFWriter, layout: Layout) -> None:
    mixing, ffns = mixers(layout), feed_forwards(layout)
    convs, windows, scans = (of_kind(mixing, kind) for kind in ("conv", "swa", "mamba2"))
    attention = (of_kind(mixing, "gqa") or windows)[0]
    dense, sparse = [ffn for ffn in ffns if ffn.kind != "moe"], of_kind(ffns, "moe")
    writer.add_rope_freq_base(float(attention.get("rope_theta") or 10000))
    if (factor := float(attention.get("rope_factor") or 1)) != 1 and not attention.int("rope_tokens"):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    if part := attention.int("rope_dim") or (writer.arch == QWEN35 and attention.int("head_dim")):
        writer.add_rope_dimension_count(part)
    if tokens := attention.int("rope_long"):
        writer.add_rope_scaling_orig_ctx_len(tokens)
    writer.add_head_count(attention.int("heads"))
    counts = [block.int("kv_heads") if block.kind in ATTENTION else 0 for block in mixing]
    if convs:
        writer.add_shortconv_l_cache(convs[0].int("kernel"))
    writer.add_head_count_kv(counts if convs or writer.arch == GRANITE_HYBRID else attention.int("kv_heads"))
    if not convs:
        writer.add_key_length(attention.int("head_dim"))
        writer.add_value_length(attention.int("head_dim"))
    for key, size in KINDS["mamba2"].sizes if scans else ():
        writer.add_uint32(f"{writer.arch}.{key}", size(scans[0], layout.d_model))
    if writer.arch == GRANITE_HYBRID:
        writer.add_rope_scaling_finetuned(bool(attention.get("rope_theta")))
    if writer.arch == QWEN35:
        _add_qwen35(writer, mixing)
    if windows:
        writer.add_sliding_window(windows[0].int("window"))
    if windows and writer.arch in WINDOWED:
        writer.add_sliding_window_pattern([block.kind == "swa" for block in mixing])
        writer.add_rope_freq_base_swa(float(windows[0].get("rope_theta") or 0))
    if bound := float(attention.get("softcap") or 0):
        writer.add_attn_logit_softcapping(bound)
    if layout.softcap:
        writer.add_final_logit_softcapping(layout.softcap)
    if dense:
        writer.add_feed_forward_length(dense[0].int("width"))
    if sparse:
        writer.add_expert_count(sparse[0].int("experts"))
        writer.add_expert_used_count(sparse[0].int("top_k"))
        writer.add_expert_feed_forward_length(sparse[0].int("width"))
        writer.add_leading_dense_block_count(len(dense))
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _add_qwen35(writer: GGUFWriter, mixing: list[Block]) -> None:
    deltas = of_kind(mixing, "gdn")
    heads, size = deltas[0].int("heads"), deltas[0].int("head_dim")
    writer.add_rope_dimension_sections(list(ROPE_SECTIONS))
    writer.add_ssm_conv_kernel(deltas[0].int("conv"))
    writer.add_ssm_state_size(size)
    writer.add_ssm_group_count(deltas[0].int("key_heads"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * size)
    recurrent = [block.kind == "gdn" for block in mixing]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    every = 1 + recurrent.index(False)
    if recurrent == [(i + 1) % every != 0 for i in range(len(mixing))]:  # which older versions of llama.cpp read
        writer.add_full_attention_interval(every)


def _add_patched(writer: GGUFWriter, layout: Layout) -> None:
    """Adds a number per layer, 0 where the layer has no such block: patches/0001-hilnas.patch, `load_arch_hparams`."""
    mixing, feeding = mixers_by_layer(layout), feed_forwards_by_layer(layout)
    layers = [[*mixer, *ffn] for mixer, ffn in zip(mixing, feeding, strict=True)]
    used = dict.fromkeys(block.kind for block in (*mixers(layout), *feed_forwards(layout)))
    records = {name: KINDS[name] for name in (*IN_EVERY_FILE, *used)}
    for key in dict.fromkeys(key for record in records.values() for key, _ in record.sizes):
        sizes = [sum(_size(block, key, layout.d_model) for block in blocks) for blocks in layers]
        writer.add_array(f"{writer.arch}.{key}", sizes)
    # For each depth 1 + the depth whose weights run there again, 0 where they are its own.
    weight_layers = [0 if layer.share is None else 1 + layer.share for layer in layout.layers]
    add_used(writer, "attention.cache_layers", _cache_layers(layout))
    add_used(writer, "weight_layers", weight_layers)
    if layout.softcap:
        writer.add_final_logit_softcapping(layout.softcap)
    headers = [
        (header, BLOCKS[name].role) for name, record in records.items() if name in used for header in record.headers
    ]
    for header, role in dict.fromkeys(headers):
        header(writer, mixing if role == "mixer" else feeding)


def _cache_layers(layout: Layout) -> list[int]:
    """Returns for each depth 1 + the depth whose cache its attention reads, 0 where that is its own or none."""
    sources = [
        [layout.cache_source(depth, mixer) for mixer in range(len(layout.layer_at(depth).mixers))]
        for depth in range(layout.depth)
    ]
    return [sum(1 + source[0] for source in layer if source) for layer in sources]


def _size(block: Block, key: str, d_model: int) -> int:
    size = dict(KINDS[block.kind].sizes).get(key)
    return size(block, d_model) if size else 0


def header_bytes(writer: GGUFWriter, scratch: Path, stored: Iterable[tuple[Tensor, Type]]) -> bytes:
    """Returns the header, padding included; `writer` was opened for `scratch` and has the keys and values."""
    for tensor, storage in stored:
        # The dtype only has to differ from uint8, which would say that `shape` counts bytes.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), stored_bytes(tensor.shape, storage), raw_dtype=storage
        )
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    header = scratch.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2" if vocabulary.pieces is None else "llama")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([_token_type(i, vocabulary) for i in range(len(vocabulary.tokens))])
    if (pieces := vocabulary.pieces) is None:
        # Not by `add_token_merges`, which leaves out an empty list: llama.cpp wants to find one.
        writer.add_key_value(Keys.Tokenizer.MERGES, list(vocabulary.merges), GGUFValueType.ARRAY)
    else:
        writer.add_token_scores(list(pieces.scores))
        writer.add_add_space_prefix(pieces.prefix)
        if pieces.unknown is not None:
            writer.add_unk_token_id(pieces.unknown)
    writer.add_add_bos_token(vocabulary.starts_texts)
    writer.add_add_eos_token(False)
    for purpose, token in vocabulary.ids.items():
        writer.add_uint32(_KEYS[purpose], token)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


_KEYS: Mapping[Purpose, str] = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "eot": Keys.Tokenizer.EOT_ID,
    "pad": Keys.Tokenizer.PAD_ID,
    "fim_pre": Keys.Tokenizer.FIM_PRE_ID,
    "fim_suf": Keys.Tokenizer.FIM_SUF_ID,
    "fim_mid": Keys.Tokenizer.FIM_MID_ID,
}


def _token_type(token: int, vocabulary: Vocabulary) -> TokenType:
    if vocabulary.pieces is not None and token == vocabulary.pieces.unknown:
        return TokenType.UNKNOWN
    if vocabulary.pieces is not None and token in vocabulary.pieces.bytes:
        return TokenType.BYTE
    if token in vocabulary.special:
        return TokenType.CONTROL
    if token in vocabulary.added:
        return TokenType.USER_DEFINED
    return TokenType.UNUSED if token in vocabulary.unused else TokenType.NORMAL
