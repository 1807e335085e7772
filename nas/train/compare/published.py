"""Published models for comparisons: their shapes as data, and the tensors of a shape.

Shapes are those of the models' configurations on Hugging Face (`source` of each); names of keys and tensors are those
of llama.cpp's loaders, src/models/ARCHITECTURE.cpp. Weights are random: speed and memory do not depend on
their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from nas.core.errors import UnknownName
from nas.core.layout import Layout
from nas.core.published import LFM2, PLM, ZEBRA_LLAMA
from nas.measure.runtimes.llama_cpp.kinds import Role
from nas.measure.runtimes.llama_cpp.stock_model import StockModel, Value
from nas.measure.runtimes.llama_cpp.tensors import Tensor

_Part = tuple[str, tuple[int, ...], Role]
"""A tensor of a layer: name without "blk.N.", shape with the slowest dimension first, role."""

_MAMBA_STATE, _MAMBA_EXPAND, _MAMBA_CONV = 128, 2, 4
"""Of Mamba-2 (Dao and Gu 2024) in all models below: state size, inner width / width, taps of the convolution."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape of a decoder with tied embeddings that no layout describes.

    A size of 0 means that the model has no such part. A layer without key-value heads is a Mamba-2 layer.

    Args:
        architecture: llama.cpp's name.
        layers: depth.
        width: of the residual stream.
        vocab: tokens, padding included.
        context: tokens that it was trained for; llama.cpp only warns about more.
        rms_eps: of the norms.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: numbers of a head.
        ffn: width of the feed-forward, or of one expert.
        rope_base: of the rotary positions.
        qk_norm: queries and keys are normalised.
        rope_factors: the file has factors of the rotary frequencies (ones here: they cost what the published ones do).
        post_norms: norms also follow attention and feed-forward.
        attention_layers: layers with attention, if the others are Mamba-2; None: all, or none.
        mamba_heads: of Mamba-2 layers.
        experts: number, number per token, and width of the shared feed-forward of a mixture.
        latent: sizes of multi-head latent attention: a token's latent, a head's key without and with positions
            (shared by all heads), and a head's value.
        extra: further metadata, without the architecture's prefix.
    """

    architecture: str
    layers: int
    width: int
    vocab: int
    context: int
    rms_eps: float = 1e-5
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    rope_base: float = 0.0
    qk_norm: bool = False
    rope_factors: bool = False
    post_norms: bool = False
    attention_layers: tuple[int, ...] | None = None
    mamba_heads: int = 0
    experts: tuple[int, int, int] | None = None
    latent: tuple[int, int, int, int] | None = None
    extra: Mapping[str, Value] = field(default_factory=dict)

    def model(self) -> StockModel:
        """Returns architecture, metadata and tensors of a GGUF file."""
        return StockModel(self.architecture, self._metadata(), tuple(self._tensors()))

    def _metadata(self) -> dict[str, Value]:
        """Returns key without the architecture's prefix -> value, in file order."""
        found: dict[str, Value] = {
            "vocab_size": self.vocab,
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
        }
        if self.heads:
            found["attention.head_count_kv"] = (
                self.kv_heads if self.attention_layers is None else tuple(map(self._kv_heads, range(self.layers)))
            )
            key = value = rope = self.head_dim
            if self.latent:
                found["attention.kv_lora_rank"], nope, rope, value = self.latent
                key = nope + rope
            found |= {
                "attention.key_length": key,
                "attention.value_length": value,
                "rope.dimension_count": rope,
                "rope.freq_base": self.rope_base,
            }
        found |= self.extra
        if self.mamba_heads:
            found |= {
                "ssm.conv_kernel": _MAMBA_CONV,
                "ssm.inner_size": _MAMBA_EXPAND * self.width,
                "ssm.state_size": _MAMBA_STATE,
                "ssm.time_step_rank": self.mamba_heads,
                "ssm.group_count": 1,
            }
        if self.experts:
            names = ("expert_count", "expert_used_count", "expert_shared_feed_forward_length")
            found |= dict(zip(names, self.experts, strict=True))
        return found

    def _kv_heads(self, layer: int) -> int:
        return self.kv_heads if self.attention_layers is None or layer in self.attention_layers else 0

    def _tensors(self) -> Iterator[Tensor]:
        yield Tensor("token_embd.weight", (self.vocab, self.width))
        yield Tensor("output_norm.weight", (self.width,), "norm")
        if self.rope_factors:
            yield Tensor("rope_freqs.weight", (self.head_dim // 2,), "norm")
        for index in range(self.layers):
            for name, shape, role in self._layer(index):
                yield Tensor(f"blk.{index}.{name}", shape, role, index)

    def _layer(self, index: int) -> Iterator[_Part]:
        yield _norm("attn_norm", self.width)
        if self.latent:
            yield from self._latent_attention(*self.latent)
        elif self._kv_heads(index):
            yield from self._attention()
        else:
            yield from self._mamba2()
        if self.ffn:
            yield _norm("ffn_norm", self.width)
            yield from self._feed_forward()
        if self.post_norms:
            yield _norm("post_attention_norm", self.width)
            yield _norm("post_ffw_norm", self.width)

    def _attention(self) -> Iterator[_Part]:
        yield _matrix("attn_q", self.heads * self.head_dim, self.width)
        yield _matrix("attn_k", self.kv_heads * self.head_dim, self.width)
        yield _matrix("attn_v", self.kv_heads * self.head_dim, self.width)
        yield _matrix("attn_output", self.width, self.heads * self.head_dim)
        if self.qk_norm:
            yield _norm("attn_q_norm", self.head_dim)
            yield _norm("attn_k_norm", self.head_dim)

    def _latent_attention(self, latent: int, nope: int, rope: int, value: int) -> Iterator[_Part]:
        """Yields latent attention; llama.cpp caches the keys and values of all heads, not their latent form."""
        yield _matrix("attn_q", self.heads * (nope + rope), self.width)
        yield _matrix("attn_kv_a_mqa", latent + rope, self.width)
        yield _norm("attn_kv_a_norm", latent)
        yield _matrix("attn_kv_b", self.heads * (nope + value), latent)
        yield _matrix("attn_output", self.width, self.heads * value)

    def _mamba2(self) -> Iterator[_Part]:
        """Yields a mixer as in `build_mamba2_layer` of src/models/mamba-base.cpp; small tensors stay float32."""
        inner, heads = _MAMBA_EXPAND * self.width, self.mamba_heads
        mixed = inner + 2 * _MAMBA_STATE
        yield _matrix("ssm_in", inner + mixed + heads, self.width)
        yield "ssm_conv1d.weight", (mixed, _MAMBA_CONV), "conv"
        yield "ssm_conv1d.bias", (mixed,), "bias"
        yield "ssm_dt.bias", (heads,), "bias"
        yield "ssm_a", (heads, 1), "decay"
        yield "ssm_d", (heads, 1), "norm"
        yield "ssm_norm.weight", (1, inner), "norm"
        yield _matrix("ssm_out", self.width, inner)

    def _feed_forward(self) -> Iterator[_Part]:
        if self.latent:  # PLM squares a ReLU instead of gating
            yield _matrix("ffn_up", self.ffn, self.width)
            yield _matrix("ffn_down", self.width, self.ffn)
        elif self.experts:
            count, _, shared = self.experts
            yield "ffn_gate_inp.weight", (count, self.width), "router"
            for name, shape, role in _swiglu(self.width, self.ffn, "_exps"):
                yield name, (count, *shape), role
            yield from _swiglu(self.width, shared, "_shexp")
        else:
            yield from _swiglu(self.width, self.ffn)


def _norm(name: str, size: int) -> _Part:
    return f"{name}.weight", (size,), "norm"


def _matrix(name: str, rows: int, columns: int) -> _Part:
    return f"{name}.weight", (rows, columns), "matrix"


def _swiglu(width: int, hidden: int, suffix: str = "") -> Iterator[_Part]:
    yield _matrix(f"ffn_gate{suffix}", hidden, width)
    yield _matrix(f"ffn_up{suffix}", hidden, width)
    yield _matrix(f"ffn_down{suffix}", width, hidden)


@dataclass(frozen=True)
class ReferenceModel:
    """A published model to compare with.

    Args:
        name: as the LFM2 report writes it.
        source: page of the published configuration, or the paper.
        stated: number of parameters in its publication.
        shape: its sizes; a layout if ours describes it.
        flash_attn: whether its graph in llama.cpp works with fused attention.
    """

    name: str
    source: str
    stated: str
    shape: Decoder | Layout
    flash_attn: bool = True

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        if isinstance(self.shape, Decoder):
            return self.shape.architecture
        from nas.measure.runtimes.llama_cpp.support import architecture

        return architecture(self.shape)

    @property
    def patched(self) -> bool:
        """Whether it needs our build of llama.cpp."""
        from nas.measure.runtimes.llama_cpp.support import PATCHED

        return self.architecture == PATCHED

    @property
    def parameters(self) -> int:
        """All parameters, counted from the shapes of its tensors."""
        return self.shape.params.total if isinstance(self.shape, Layout) else self.shape.model().parameters

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.shape.params.active if isinstance(self.shape, Layout) else self.shape.model().active


def _granite(attention: float, residual: float, logits: float) -> dict[str, Value]:
    """Returns Granite's fixed multipliers on parts of its graph."""
    return {
        "attention.scale": attention, "residual_scale": residual, "logit_scale": logits, "embedding_scale": 12.0
    }  # fmt: skip


def _hybrid(attention: float, residual: float, logits: float) -> dict[str, Value]:
    return {"rope.scaling.finetuned": False, **_granite(attention, residual, logits)}


# Shared values of the models of one publisher.
_GRANITE = partial(Decoder, architecture="granite", vocab=100352, rope_base=1e7)
_GRANITE_H = partial(
    Decoder, architecture="granitehybrid", vocab=100352, context=1 << 20, rope_base=1e4,
    attention_layers=(5, 15, 25, 35), mamba_heads=48,
)  # fmt: skip
_QWEN3 = partial(
    Decoder, architecture="qwen3", vocab=151936, context=40960, rms_eps=1e-6, kv_heads=8, head_dim=128, rope_base=1e6,
    qk_norm=True,
)  # fmt: skip
_LLAMA = partial(
    Decoder, architecture="llama", vocab=128256, context=131072, kv_heads=8, ffn=8192, rope_base=5e5, rope_factors=True
)  # fmt: skip
_GEMMA3 = partial(
    Decoder, architecture="gemma3", rms_eps=1e-6, head_dim=256, rope_base=1e6, qk_norm=True, post_norms=True
)  # fmt: skip
_MAMBA2 = partial(Decoder, architecture="mamba2", layers=48, vocab=50288, context=1 << 20)


# Name, page (on Hugging Face, where none is named), published number of parameters, shape.
_MODELS: tuple[tuple[str, str, str, Decoder | Layout], ...] = (
    # LFM2 (arXiv:2511.23404) as layouts: the same code writes them as any member of a family.
    *(
        (name, f"LiquidAI/{name}", stated, Layout.parse(LFM2[name]))
        for name, stated in {
            "LFM2-350M": "350M", "LFM2-700M": "740M", "LFM2-1.2B": "1.17B", "LFM2-2.6B": "2.57B", "LFM2-8B-A1B": "8.3B"
        }.items()
    ),
    # Granite 4.0 (IBM, October 2025): attention and SwiGLU; H: Mamba-2 layers and a few of attention without positions.
    ("Granite-4.0-350M", "ibm-granite/granite-4.0-350m", "350M", _GRANITE(
        layers=28, width=1024, context=32768, heads=16, kv_heads=4, head_dim=64, ffn=2048,
        extra=_granite(0.015625, 0.263, 4.0))),
    ("Granite-4.0-1B", "ibm-granite/granite-4.0-1b", "1.6B", _GRANITE(
        layers=40, width=2048, context=131072, heads=16, kv_heads=4, head_dim=128, ffn=4096,
        extra=_granite(0.0078125, 0.22, 8.0))),
    ("Granite-4.0-Micro", "ibm-granite/granite-4.0-micro", "3.4B", _GRANITE(
        layers=40, width=2560, context=131072, heads=40, kv_heads=8, head_dim=64, ffn=8192,
        extra=_granite(0.015625, 0.22, 10.0))),
    ("Granite-4.0-H-350M", "ibm-granite/granite-4.0-h-350m", "340M", _GRANITE_H(
        layers=32, width=768, heads=12, kv_heads=4, head_dim=64, ffn=2048, attention_layers=(10, 13, 17, 27),
        extra=_hybrid(0.015625, 0.246, 3.0))),
    ("Granite-4.0-H-1B", "ibm-granite/granite-4.0-h-1b", "1.5B", _GRANITE_H(
        layers=40, width=1536, heads=12, kv_heads=4, head_dim=128, ffn=4096, extra=_hybrid(0.0078125, 0.22, 6.0))),
    ("Granite-4.0-H-Micro", "ibm-granite/granite-4.0-h-micro", "3.2B", _GRANITE_H(
        layers=40, width=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, mamba_heads=64,
        extra=_hybrid(0.015625, 0.22, 8.0))),
    ("Granite-4.0-H-Tiny", "ibm-granite/granite-4.0-h-tiny", "6.9B", _GRANITE_H(
        layers=40, width=1536, heads=12, kv_heads=4, head_dim=128, ffn=512, experts=(64, 6, 1024),
        extra=_hybrid(0.0078125, 0.22, 6.0))),
    # Qwen3 (arXiv:2505.09388)
    ("Qwen3-0.6B", "Qwen/Qwen3-0.6B", "0.6B", _QWEN3(layers=28, width=1024, heads=16, ffn=3072)),
    ("Qwen3-1.7B", "Qwen/Qwen3-1.7B", "1.7B", _QWEN3(layers=28, width=2048, heads=16, ffn=6144)),
    ("Qwen3-4B", "Qwen/Qwen3-4B", "4.0B", _QWEN3(layers=36, width=2560, heads=32, ffn=9728)),
    # Llama 3.2 (arXiv:2407.21783 and its model card)
    ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B", "1.23B", _LLAMA(layers=16, width=2048, heads=32, head_dim=64)),
    ("Llama-3.2-3B", "meta-llama/Llama-3.2-3B", "3.21B", _LLAMA(layers=28, width=3072, heads=24, head_dim=128)),
    # Gemma 3 (arXiv:2503.19786): five layers with a window, then one with full attention; llama.cpp knows the pattern.
    ("Gemma-3-1B", "google/gemma-3-1b-it", "1.00B", _GEMMA3(
        layers=26, width=1152, vocab=262144, context=32768, heads=4, kv_heads=1, ffn=6912,
        extra={"attention.sliding_window": 512, "rope.freq_base_swa": 1e4})),
    # Of its 4.30B, 0.42B see pictures: llama.cpp keeps those in another file.
    ("Gemma-3-4B", "google/gemma-3-4b-it", "3.88B", _GEMMA3(
        layers=34, width=2560, vocab=262208, context=131072, heads=8, kv_heads=4, ffn=10240,
        extra={"attention.sliding_window": 1024, "rope.freq_base_swa": 1e4, "rope.scaling.type": "linear",
               "rope.scaling.factor": 8.0})),
    # SmolLM3 (huggingface.co/blog/smollm3): no positions in every fourth layer, which llama.cpp knows.
    ("SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B", "3.08B", Decoder(
        architecture="smollm3", layers=36, width=2048, vocab=128256, context=65536, rms_eps=1e-6, heads=16, kv_heads=4,
        head_dim=128, ffn=11008, rope_base=5e6)),
    # PLM (arXiv:2503.12167): multi-head latent attention and a squared-ReLU feed-forward.
    ("PLM-1.8B", "PLM-Team/PLM-1.8B-Base", "1.83B", Decoder(
        architecture="plm", layers=32, width=2048, vocab=151936, context=4096, rms_eps=1e-6, heads=16, kv_heads=16,
        latent=(512, 128, 64, 128), ffn=8192, rope_base=1e5)),
    # The same with the latent cache of the paper, which llama.cpp's own graph of PLM has not: on our patched build.
    ("PLM-1.8B-latent", "https://arxiv.org/abs/2503.12167", "1.83B", Layout.parse(PLM)),
    # Zebra-Llama (arXiv:2505.17272): latent attention and Mamba-2, on our patched build.
    *(
        (name, "https://arxiv.org/abs/2505.17272", stated, Layout.parse(ZEBRA_LLAMA[name]))
        for name, stated in {"Zebra-Llama-1B-8MLA": "1.27B", "Zebra-Llama-3B-14MLA": "3.27B"}.items()
    ),
    # Mamba-2 (arXiv:2405.21060), without attention or feed-forwards; 50,277 tokens, padded to a multiple of 16.
    ("Mamba2-130M", "state-spaces/mamba2-130m", "130M", _MAMBA2(layers=24, width=768, mamba_heads=24)),
    ("Mamba2-370M", "state-spaces/mamba2-370m", "370M", _MAMBA2(width=1024, mamba_heads=32)),
    ("Mamba2-780M", "state-spaces/mamba2-780m", "780M", _MAMBA2(width=1536, mamba_heads=48)),
    ("Mamba2-1.3B", "state-spaces/mamba2-1.3b", "1.3B", _MAMBA2(width=2048, mamba_heads=64)),
)  # fmt: skip

_WITHOUT_FLASH = ("PLM-1.8B",)
"""With fused attention llama.cpp 0c1e57098 aborts: its graph gives the cache values that are not split into heads."""

REFERENCES: dict[str, ReferenceModel] = {
    name: ReferenceModel(
        name,
        page if page.startswith("https:") else f"https://huggingface.co/{page}/blob/main/config.json",
        stated,
        shape,
        name not in _WITHOUT_FLASH,
    )
    for name, page, stated, shape in _MODELS
}
"""Name -> model, LFM2 first."""


def find_reference(name: str) -> ReferenceModel:
    """Returns the reference model `name`; case is ignored.

    Raises:
        UnknownName: no such model; the message offers the nearest.
    """
    by_folded = {known.casefold(): reference for known, reference in REFERENCES.items()}
    if found := by_folded.get(name.casefold()):
        return found
    raise UnknownName("reference model", name, REFERENCES, where="--reference")
