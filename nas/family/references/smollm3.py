"""SmolLM3 (huggingface.co/blog/smollm3): every fourth layer's attention has no positions."""

from __future__ import annotations

from dataclasses import dataclass

from nas.family.references.decoder import Transformer
from nas.family.references.reference import Reference


@dataclass(frozen=True, kw_only=True)
class SmolLM3(Transformer):
    """src/models/smollm3.cpp, which knows the layers without positions by itself."""

    architecture = "smollm3"

    vocab: int = 128256
    context: int = 65536
    rms_eps: float = 1e-6
    rope_base: float = 5e6


MODELS = (
    Reference(
        "SmolLM3-3B",
        "https://huggingface.co/HuggingFaceTB/SmolLM3-3B/blob/main/config.json",
        "3.08B",
        SmolLM3(layers=36, width=2048, heads=16, kv_heads=4, head_dim=128, ffn=11008),
    ),
)
