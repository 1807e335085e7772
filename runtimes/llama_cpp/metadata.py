"""The key-value part of a GGUF file: what the loader of each architecture reads."""

from __future__ import annotations

from gguf import ExpertGatingFuncType, GGUFWriter

from nas.core.block import Block
from nas.core.layout import Layout
from nas.runtimes.llama_cpp.layers import ATTENTION, feed_forwards, mixers, of_kind
from nas.runtimes.llama_cpp.support import PATCHED, Quantisation
from nas.runtimes.llama_cpp.vocabulary import Vocabulary, add_vocabulary

_FILE_TYPE = {"f32": 0, "f16": 1, "q4_0": 2}  # llama_ftype of include/llama.h
_QUANTISATION_VERSION = 2  # GGML_QNT_VERSION
CONTEXT = 32768
_RMS_EPS = 1e-5  # of nas.nn.primitives.RMSNorm, and of the published LFM2

_SIZES = (
    ("attention.head_count", ATTENTION, "heads"),
    ("attention.head_count_kv", ATTENTION, "kv_heads"),
    ("shortconv.l_cache", ("conv",), "kernel"),
    ("ssm.conv_kernel", ("mamba2",), "conv"),
    ("ssm.state_size", ("mamba2",), "state"),
    ("ssm.time_step_rank", ("mamba2",), "heads"),
    ("ssm.group_count", ("mamba2",), "groups"),
)
"""Key of our architecture, the mixers it is about, and their argument."""


def add_metadata(
    writer: GGUFWriter, layout: Layout, quantisation: Quantisation, vocabulary: Vocabulary | None, context: int
) -> None:
    """Describes `layout` to the architecture that the writer was opened for; without a vocabulary it has ids only."""
    writer.add_file_type(_FILE_TYPE[quantisation])
    writer.add_quantization_version(_QUANTISATION_VERSION)
    if vocabulary is None:
        writer.add_tokenizer_model("none")
    else:
        add_vocabulary(writer, vocabulary)
    writer.add_vocab_size(layout.vocab)
    writer.add_block_count(layout.depth)
    writer.add_context_length(context)
    writer.add_embedding_length(layout.d_model)
    writer.add_layer_norm_rms_eps(_RMS_EPS)
    if writer.arch == PATCHED:
        _add_patched(writer, layout)
    else:
        _add_stock(writer, layout)


def _add_stock(writer: GGUFWriter, layout: Layout) -> None:
    own, ffns = mixers(layout), feed_forwards(layout)
    convs, attention = of_kind(own, "conv"), of_kind(own, *ATTENTION)[0]
    dense, sparse = of_kind(ffns, "swiglu"), of_kind(ffns, "moe")
    writer.add_rope_freq_base(float(attention.get("rope_theta") or 0))
    writer.add_head_count(attention.int("heads"))
    if convs:
        writer.add_shortconv_l_cache(convs[0].int("kernel"))
        writer.add_head_count_kv([_size(block, ATTENTION, "kv_heads") for block in own])
    else:
        writer.add_head_count_kv(attention.int("kv_heads"))
        writer.add_key_length(attention.int("head_dim"))
        writer.add_value_length(attention.int("head_dim"))
    if attention.kind == "swa":
        writer.add_sliding_window(attention.int("window"))
    if dense:
        writer.add_feed_forward_length(dense[0].int("width"))
    if sparse:
        writer.add_expert_count(sparse[0].int("experts"))
        writer.add_expert_used_count(sparse[0].int("top_k"))
        writer.add_expert_feed_forward_length(sparse[0].int("width"))
        writer.add_leading_dense_block_count(len(dense))
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _add_patched(writer: GGUFWriter, layout: Layout) -> None:
    """One number per layer, 0 where the layer has no such block: patches/0001-hilnas.patch, `load_arch_hparams`."""
    own, ffns = mixers(layout), feed_forwards(layout)
    for key, kinds, argument in _SIZES:
        _add_sizes(writer, key, [_size(block, kinds, argument) for block in own])
    _add_sizes(writer, "ssm.inner_size", [layout.d_model * _size(block, ("mamba2",), "expand") for block in own])
    _add_sizes(writer, "feed_forward_length", [_size(block, ("swiglu",), "width") for block in ffns])
    if attention := of_kind(own, *ATTENTION):
        # The key-value cache asks layer 0 for the head size, whatever that layer is.
        first = attention[0].int("head_dim")
        _add_sizes(writer, "attention.head_sizes", [_size(block, ATTENTION, "head_dim") or first for block in own])
        _add_sizes(writer, "attention.rope_pattern", [int(bool(_theta(block))) for block in own])
        writer.add_rope_freq_base(_base(of_kind(own, "gqa")))
    if windowed := of_kind(own, "swa"):
        writer.add_sliding_window(windowed[0].int("window"))
        _add_sizes(writer, "attention.sliding_window_pattern", [int(block.kind == "swa") for block in own])
        writer.add_rope_freq_base_swa(_base(windowed))
    if sparse := of_kind(ffns, "moe"):
        writer.add_expert_count(sparse[0].int("experts"))
        _add_sizes(writer, "expert_used_count", [_size(block, ("moe",), "top_k") for block in ffns])
        _add_sizes(writer, "expert_feed_forward_length", [_size(block, ("moe",), "width") for block in ffns])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _add_sizes(writer: GGUFWriter, key: str, sizes: list[int]) -> None:
    writer.add_array(f"{writer.arch}.{key}", sizes)


def _size(block: Block, kinds: tuple[str, ...], name: str) -> int:
    return block.int(name) if block.kind in kinds else 0


def _theta(block: Block) -> float:
    return float(block.get("rope_theta") or 0) if block.kind in ATTENTION else 0.0


def _base(attention: list[Block]) -> float:
    """The RoPE base of layers that share one; any where none has positions."""
    return max(map(_theta, attention), default=0.0) or 1e4
