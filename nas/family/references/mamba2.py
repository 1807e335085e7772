"""Mamba-2 without attention or feed-forwards (arXiv:2405.21060)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.family.references.decoder import Decoder, Part, norm
from nas.family.references.mamba2_mixer import Mamba2Mixer
from nas.family.references.reference import Reference
from nas.runtimes.llama_cpp.stock_model import Value

_HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class Mamba2(Decoder):
    """src/models/mamba2.cpp. The vocabulary of 50,277 tokens is padded to a multiple of 16."""

    architecture = "mamba2"

    layers: int = 48
    vocab: int = 50288
    context: int = 1 << 20

    def metadata(self) -> dict[str, Value]:
        # The loader wants the two zeros although nothing reads them.
        return super().metadata() | {"feed_forward_length": 0, "attention.head_count": 0} | self._mixer.metadata()

    def layer(self, index: int) -> Iterator[Part]:
        yield norm("attn_norm", self.width)
        yield from self._mixer.parts()

    @property
    def _mixer(self) -> Mamba2Mixer:
        return Mamba2Mixer(width=self.width, heads=2 * self.width // _HEAD_DIM)


_PAGE = "https://huggingface.co/state-spaces/{}/blob/main/config.json"

MODELS = (
    Reference("Mamba2-130M", _PAGE.format("mamba2-130m"), "130M", Mamba2(layers=24, width=768)),
    Reference("Mamba2-370M", _PAGE.format("mamba2-370m"), "370M", Mamba2(width=1024)),
    Reference("Mamba2-780M", _PAGE.format("mamba2-780m"), "780M", Mamba2(width=1536)),
    Reference("Mamba2-1.3B", _PAGE.format("mamba2-1.3b"), "1.3B", Mamba2(width=2048)),
)
