"""Published models for comparisons: their shapes (published.json), and the tensors of a shape.

Shapes are those of the models' configurations on Hugging Face (`source` of each); names of keys and tensors are those
of llama.cpp's loaders, src/models/ARCHITECTURE.cpp. Weights are random: speed and memory do not depend on
their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from nas.core.errors import UnknownName
from nas.core.layout import Layout
from nas.core.published import MODELS
from nas.measure.runtimes.llama_cpp.kinds import Role
from nas.measure.runtimes.llama_cpp.stock_model import StockModel, Value
from nas.measure.runtimes.llama_cpp.tensors import Tensor

_Part = tuple[str, tuple[int, ...], Role]
"""A tensor of a layer: name without "blk.N.", shape with the slowest dimension first, role."""

_MAMBA_STATE = 128
"""State size of Mamba-2 (Dao and Gu 2024) in all published models here."""
_MAMBA_EXPAND = 2
"""Inner width / width of their Mamba-2 layers."""
_MAMBA_CONV = 4
"""Taps of their convolutions."""


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

    def layout(self) -> Layout | None:
        """Returns the layout of these sizes; None for latent attention, whose cache llama.cpp keeps otherwise."""
        if self.latent:
            return None
        window = self.extra.get("attention.sliding_window")
        size, arguments = f"{self.heads}/{self.kv_heads}", "" if self.qk_norm else "(qk_norm=0)"
        layers = []
        for layer in range(self.layers):
            if not self._kv_heads(layer):
                mixer = f"M{_MAMBA_STATE}(heads={self.mamba_heads})"
            elif window and layer % 6 != 5:  # Gemma 3: every sixth layer sees everything
                mixer = f"W{size}@{window}:{self.head_dim}{arguments}"
            else:
                mixer = f"A{size}:{self.head_dim}{arguments}"
            layers.append(mixer if self.ffn else f"{mixer}+none")
        ffn = f"swiglu:{self.ffn or self.width}"
        if self.experts:
            count, top_k, shared = self.experts
            ffn = f"moe:{count}x{top_k}:{self.ffn}(shared={shared // self.ffn})"
        return Layout.parse(f"d{self.width} v{self.vocab} ffn={ffn} [{' '.join(layers)}]")

    def _metadata(self) -> dict[str, Value]:
        """Returns key without the architecture's prefix -> value, in file order."""
        metadata: dict[str, Value] = {
            "vocab_size": self.vocab,
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
        }
        if self.heads:
            metadata["attention.head_count_kv"] = (
                self.kv_heads if self.attention_layers is None else tuple(map(self._kv_heads, range(self.layers)))
            )
            key = value = rope = self.head_dim
            if self.latent:
                metadata["attention.kv_lora_rank"], nope, rope, value = self.latent
                key = nope + rope
            metadata |= {
                "attention.key_length": key,
                "attention.value_length": value,
                "rope.dimension_count": rope,
                "rope.freq_base": self.rope_base,
            }
        metadata |= self.extra
        if self.mamba_heads:
            metadata |= {
                "ssm.conv_kernel": _MAMBA_CONV,
                "ssm.inner_size": _MAMBA_EXPAND * self.width,
                "ssm.state_size": _MAMBA_STATE,
                "ssm.time_step_rank": self.mamba_heads,
                "ssm.group_count": 1,
            }
        if self.experts:
            names = ("expert_count", "expert_used_count", "expert_shared_feed_forward_length")
            metadata |= dict(zip(names, self.experts, strict=True))
        return metadata

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
    def layout(self) -> Layout | None:
        """The layout of its shape, with as many weights; None: it has sizes that no layout says.

        Factors of scores and positions, which cost no time, are left out.
        """
        return self.shape if isinstance(self.shape, Layout) else self.shape.layout()

    @property
    def parameters(self) -> int:
        """All parameters, counted from the shapes of its tensors."""
        return self.shape.params.total if isinstance(self.shape, Layout) else self.shape.model().parameters

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.shape.params.active if isinstance(self.shape, Layout) else self.shape.model().active


class _Entry(BaseModel):
    """A model of published.json; one without a shape has the layout of its name in `nas.core.published`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    stated: str
    note: str = ""
    flash_attn: bool = True
    shape: Decoder | None = None

    def reference(self) -> ReferenceModel:
        shape = self.shape or Layout.parse(MODELS[self.name])
        return ReferenceModel(self.name, self.source, self.stated, shape, self.flash_attn)


REFERENCES: dict[str, ReferenceModel] = {
    entry.name: entry.reference()
    for entry in TypeAdapter(list[_Entry]).validate_json(Path(__file__).with_name("published.json").read_bytes())
}
"""Name -> model, LFM2 first."""


def find_reference(name: str) -> ReferenceModel:
    """Returns the reference model `name`; case is ignored.

    Raises:
        UnknownName: no such model; the message offers the nearest.
    """
    for reference in REFERENCES.values():
        if reference.name.casefold() == name.casefold():
            return reference
    raise UnknownName("reference model", name, REFERENCES, where="--reference")
