"""PLM-1.8B (arXiv:2503.12167): multi-head latent attention and a squared-ReLU feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.family.references.decoder import Decoder, Part, matrix, norm
from nas.family.references.reference import Reference
from nas.runtimes.llama_cpp.stock_model import Value


@dataclass(frozen=True, kw_only=True)
class PLM(Decoder):
    """src/models/plm.cpp, which caches the keys and values of all heads and not their latent form.

    Args:
        heads: of attention.
        latent: numbers that keys and values of a token are made from.
        nope: numbers of a head's key without positions.
        rope: numbers with positions, which all heads share.
        value: numbers of a head's value.
        ffn: width of the feed-forward.
        rope_base: of the rotary positions.
    """

    architecture = "plm"

    rms_eps: float = 1e-6
    heads: int
    latent: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    ffn: int
    rope_base: float = 1e5

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | {
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.heads,
            "attention.kv_lora_rank": self.latent,
            "attention.key_length": self.nope + self.rope,
            "attention.value_length": self.value,
            "rope.dimension_count": self.rope,
            "rope.freq_base": self.rope_base,
        }

    def layer(self, index: int) -> Iterator[Part]:
        yield norm("attn_norm", self.width)
        yield matrix("attn_q", self.heads * (self.nope + self.rope), self.width)
        yield matrix("attn_kv_a_mqa", self.latent + self.rope, self.width)
        yield norm("attn_kv_a_norm", self.latent)
        yield matrix("attn_kv_b", self.heads * (self.nope + self.value), self.latent)
        yield matrix("attn_output", self.width, self.heads * self.value)
        yield norm("ffn_norm", self.width)
        yield matrix("ffn_up", self.ffn, self.width)
        yield matrix("ffn_down", self.width, self.ffn)


MODELS = (
    Reference(
        "PLM-1.8B",
        "https://huggingface.co/PLM-Team/PLM-1.8B-Base/blob/main/config.json",
        "1.83B",
        PLM(layers=32, width=2048, vocab=151936, context=4096, heads=16, ffn=8192),
        flash_attn=False,
    ),
)
"""With fused attention llama.cpp 0c1e57098 aborts: its graph hands the cache values that are not split into heads."""
