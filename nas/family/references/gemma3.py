"""Gemma 3 (arXiv:2503.19786), text only: five layers with a sliding window, then one with full attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.family.references.decoder import Part, Transformer, norm
from nas.family.references.reference import Reference
from nas.runtimes.llama_cpp.stock_model import Value


@dataclass(frozen=True, kw_only=True)
class Gemma3(Transformer):
    """src/models/gemma3.cpp, which knows the pattern of windows by itself.

    Args:
        window: tokens.
        rope_factor: by which positions of full attention are divided.
    """

    architecture = "gemma3"
    qk_norm = True

    rms_eps: float = 1e-6
    head_dim: int = 256
    rope_base: float = 1e6
    window: int
    rope_factor: float = 1.0

    def metadata(self) -> dict[str, Value]:
        told = super().metadata() | {"attention.sliding_window": self.window, "rope.freq_base_swa": 1e4}
        if self.rope_factor != 1:
            told |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.rope_factor}
        return told

    def layer(self, index: int) -> Iterator[Part]:
        yield from super().layer(index)
        yield norm("post_attention_norm", self.width)
        yield norm("post_ffw_norm", self.width)


_PAGE = "https://huggingface.co/google/{}/blob/main/config.json"

MODELS = (
    Reference(
        "Gemma-3-1B", _PAGE.format("gemma-3-1b-it"), "1.00B",
        Gemma3(layers=26, width=1152, vocab=262144, context=32768, heads=4, kv_heads=1, ffn=6912, window=512),
    ),
    Reference(
        "Gemma-3-4B", _PAGE.format("gemma-3-4b-it"), "3.88B",
        Gemma3(
            layers=34, width=2560, vocab=262208, context=131072, heads=8, kv_heads=4, ffn=10240, window=1024,
            rope_factor=8.0,
        ),
    ),
)  # fmt: skip
"""Of the 4.30B of Gemma 3 4B, 0.42B see pictures: llama.cpp keeps those in another file."""
