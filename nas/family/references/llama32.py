"""Llama 3.2 (arXiv:2407.21783 and its model card)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.family.references.decoder import Transformer
from nas.family.references.reference import Reference
from nas.runtimes.llama_cpp.tensors import Tensor


@dataclass(frozen=True, kw_only=True)
class Llama(Transformer):
    """src/models/llama.cpp."""

    architecture = "llama"

    vocab: int = 128256
    context: int = 131072
    kv_heads: int = 8
    ffn: int = 8192
    rope_base: float = 5e5

    def extra(self) -> Iterator[Tensor]:
        """Factors of the rotary frequencies: ones here, which cost the same as those of the long-context scaling."""
        yield Tensor("rope_freqs.weight", (self.head_dim // 2,), "norm")


_PAGE = "https://huggingface.co/meta-llama/{}/blob/main/config.json"

MODELS = (
    Reference(
        "Llama-3.2-1B", _PAGE.format("Llama-3.2-1B"), "1.23B", Llama(layers=16, width=2048, heads=32, head_dim=64)
    ),
    Reference(
        "Llama-3.2-3B", _PAGE.format("Llama-3.2-3B"), "3.21B", Llama(layers=28, width=3072, heads=24, head_dim=128)
    ),
)
