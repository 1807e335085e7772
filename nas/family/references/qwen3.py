"""Qwen3 (arXiv:2505.09388): attention with normalised queries and keys in heads wider than width / heads."""

from __future__ import annotations

from dataclasses import dataclass

from nas.family.references.decoder import Transformer
from nas.family.references.reference import Reference


@dataclass(frozen=True, kw_only=True)
class Qwen3(Transformer):
    """src/models/qwen3.cpp."""

    architecture = "qwen3"
    qk_norm = True

    vocab: int = 151936
    context: int = 40960
    rms_eps: float = 1e-6
    kv_heads: int = 8
    head_dim: int = 128
    rope_base: float = 1e6


_PAGE = "https://huggingface.co/Qwen/{}/blob/main/config.json"

MODELS = (
    Reference("Qwen3-0.6B", _PAGE.format("Qwen3-0.6B"), "0.6B", Qwen3(layers=28, width=1024, heads=16, ffn=3072)),
    Reference("Qwen3-1.7B", _PAGE.format("Qwen3-1.7B"), "1.7B", Qwen3(layers=28, width=2048, heads=16, ffn=6144)),
    Reference("Qwen3-4B", _PAGE.format("Qwen3-4B"), "4.0B", Qwen3(layers=36, width=2560, heads=32, ffn=9728)),
)
