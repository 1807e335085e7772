"""Granite 4.0 H (IBM, October 2025): Mamba-2 layers, a few of attention without positions, dense or with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.family.references.decoder import Part, Transformer, attention, norm, swiglu
from nas.family.references.granite4 import PAGE, Multipliers
from nas.family.references.mamba2_mixer import Mamba2Mixer
from nas.family.references.reference import Reference
from nas.runtimes.llama_cpp.stock_model import Value


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture beside a feed-forward that every token passes; `ffn` of the model is the width of an expert.

    Args:
        count: of experts.
        used: per token.
        shared: width of what every token passes.
    """

    count: int
    used: int
    shared: int

    def metadata(self) -> dict[str, Value]:
        """Keys without the architecture's prefix."""
        return {
            "expert_count": self.count,
            "expert_used_count": self.used,
            "expert_shared_feed_forward_length": self.shared,
        }

    def parts(self, width: int, hidden: int) -> Iterator[Part]:
        """The router, the experts, and what is shared."""
        yield "ffn_gate_inp.weight", (self.count, width), "router"
        for name, shape, role in swiglu(width, hidden, "_exps"):
            yield name, (self.count, *shape), role
        yield from swiglu(width, self.shared, "_shexp")


@dataclass(frozen=True, kw_only=True)
class GraniteHybrid(Transformer):
    """src/models/granite-hybrid.cpp: a layer without key-value heads is a Mamba-2 layer.

    Args:
        multipliers: fixed factors.
        attention_layers: which have attention.
        mamba_heads: of the other layers.
        experts: None: dense.
    """

    architecture = "granitehybrid"

    vocab: int = 100352
    context: int = 1 << 20
    rope_base: float = 1e4
    multipliers: Multipliers
    attention_layers: tuple[int, ...] = (5, 15, 25, 35)
    mamba_heads: int = 48
    experts: Experts | None = None

    def metadata(self) -> dict[str, Value]:
        kv_heads = tuple(self.kv_heads * (index in self.attention_layers) for index in range(self.layers))
        return (
            super().metadata()
            | {"attention.head_count_kv": kv_heads, "rope.scaling.finetuned": False}
            | self.multipliers.metadata()
            | self._mixer.metadata()
            | (self.experts.metadata() if self.experts else {})
        )

    def layer(self, index: int) -> Iterator[Part]:
        yield norm("attn_norm", self.width)
        if index in self.attention_layers:
            yield from attention(self.width, self.heads, self.kv_heads, self.head_dim)
        else:
            yield from self._mixer.parts()
        yield norm("ffn_norm", self.width)
        yield from self.experts.parts(self.width, self.ffn) if self.experts else swiglu(self.width, self.ffn)

    @property
    def _mixer(self) -> Mamba2Mixer:
        return Mamba2Mixer(width=self.width, heads=self.mamba_heads)


MODELS = (
    Reference(
        "Granite-4.0-H-350M", PAGE.format("granite-4.0-h-350m"), "340M",
        GraniteHybrid(
            layers=32, width=768, heads=12, kv_heads=4, head_dim=64, ffn=2048, attention_layers=(10, 13, 17, 27),
            multipliers=Multipliers(attention=0.015625, residual=0.246, logits=3.0),
        ),
    ),
    Reference(
        "Granite-4.0-H-1B", PAGE.format("granite-4.0-h-1b"), "1.5B",
        GraniteHybrid(
            layers=40, width=1536, heads=12, kv_heads=4, head_dim=128, ffn=4096,
            multipliers=Multipliers(attention=0.0078125, residual=0.22, logits=6.0),
        ),
    ),
    Reference(
        "Granite-4.0-H-Micro", PAGE.format("granite-4.0-h-micro"), "3.2B",
        GraniteHybrid(
            layers=40, width=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, mamba_heads=64,
            multipliers=Multipliers(attention=0.015625, residual=0.22, logits=8.0),
        ),
    ),
    Reference(
        "Granite-4.0-H-Tiny", PAGE.format("granite-4.0-h-tiny"), "6.9B",
        GraniteHybrid(
            layers=40, width=1536, heads=12, kv_heads=4, head_dim=128, ffn=512,
            experts=Experts(count=64, used=6, shared=1024),
            multipliers=Multipliers(attention=0.0078125, residual=0.22, logits=6.0),
        ),
    ),
)  # fmt: skip
