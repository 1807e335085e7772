"""A model that others published, as something to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from nas.core.layout import Layout
from nas.family.references.decoder import Decoder


@dataclass(frozen=True)
class Reference:
    """A published model; its weights are random here, which speed and memory do not depend on.

    Args:
        name: as the LFM2 report writes it.
        source: page of the published configuration.
        told: how many parameters it has, in its publisher's words.
        config: its sizes; a layout where ours describes it.
        flash_attn: whether its stock graph works with fused attention.
    """

    name: str
    source: str
    told: str
    config: Decoder | Layout
    flash_attn: bool = True

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        if isinstance(self.config, Decoder):
            return self.config.architecture
        from nas.runtimes.llama_cpp.support import architecture

        return architecture(self.config)

    @property
    def parameters(self) -> int:
        """All of them, counted from the shapes of its tensors."""
        return self.config.params.total if isinstance(self.config, Layout) else self.config.model().parameters

    @property
    def active(self) -> int:
        """Those that one token uses."""
        return self.config.params.active if isinstance(self.config, Layout) else self.config.model().active
