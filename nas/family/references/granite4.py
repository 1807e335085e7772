"""Granite 4.0 without state-space layers (IBM, October 2025): attention and SwiGLU with fixed multipliers."""

from __future__ import annotations

from dataclasses import dataclass

from nas.family.references.decoder import Transformer
from nas.family.references.reference import Reference
from nas.runtimes.llama_cpp.stock_model import Value

PAGE = "https://huggingface.co/ibm-granite/{}/blob/main/config.json"


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors that Granite puts on parts of its graph."""

    attention: float
    residual: float
    logits: float
    embedding: float = 12.0

    def metadata(self) -> dict[str, Value]:
        """Keys without the architecture's prefix."""
        return {
            "attention.scale": self.attention,
            "residual_scale": self.residual,
            "logit_scale": self.logits,
            "embedding_scale": self.embedding,
        }


@dataclass(frozen=True, kw_only=True)
class Granite(Transformer):
    """src/models/granite.cpp.

    Args:
        multipliers: fixed factors.
    """

    architecture = "granite"

    vocab: int = 100352
    rope_base: float = 1e7
    multipliers: Multipliers

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | self.multipliers.metadata()


MODELS = (
    Reference(
        "Granite-4.0-350M", PAGE.format("granite-4.0-350m"), "350M",
        Granite(
            layers=28, width=1024, context=32768, heads=16, kv_heads=4, head_dim=64, ffn=2048,
            multipliers=Multipliers(attention=0.015625, residual=0.263, logits=4.0),
        ),
    ),
    Reference(
        "Granite-4.0-1B", PAGE.format("granite-4.0-1b"), "1.6B",
        Granite(
            layers=40, width=2048, context=131072, heads=16, kv_heads=4, head_dim=128, ffn=4096,
            multipliers=Multipliers(attention=0.0078125, residual=0.22, logits=8.0),
        ),
    ),
    Reference(
        "Granite-4.0-Micro", PAGE.format("granite-4.0-micro"), "3.4B",
        Granite(
            layers=40, width=2560, context=131072, heads=40, kv_heads=8, head_dim=64, ffn=8192,
            multipliers=Multipliers(attention=0.015625, residual=0.22, logits=10.0),
        ),
    ),
)  # fmt: skip
