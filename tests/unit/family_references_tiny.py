"""The reference models, made small: the same code with other sizes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from nas.family.references import REFERENCES
from nas.family.references.decoder import Decoder
from nas.family.references.granite4_hybrid import Experts
from nas.family.references.reference import Reference

_SIZES: dict[str, Any] = {
    "layers": 4, "width": 256, "vocab": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "window": 64,
    "latent": 64, "nope": 32, "rope": 32, "value": 32, "mamba_heads": 8, "attention_layers": (1, 3),
}  # fmt: skip
_OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "gemma3": {"layers": 7, "width": 288},  # a whole period of windows, and a width that Q6_K does not divide
}


def tiny(reference: Reference) -> Reference:
    """The same kind of model with a million weights."""
    config = reference.config
    assert isinstance(config, Decoder)
    wanted = _SIZES | _OF_ARCHITECTURE.get(config.architecture, {})
    changes = {each.name: wanted[each.name] for each in fields(config) if each.name in wanted}
    if getattr(config, "experts", None):
        changes["experts"] = Experts(count=6, used=2, shared=128)
    return replace(reference, config=replace(config, **changes))


def kinds() -> dict[str, Reference]:
    """One reference model of each kind of graph."""
    found: dict[tuple[str, bool, bool], Reference] = {}
    for reference in REFERENCES.values():
        if isinstance(reference.config, Decoder):
            metadata = reference.config.model().metadata
            kind = (reference.architecture, "expert_count" in metadata, "rope.scaling.type" in metadata)
            found.setdefault(kind, reference)
    return {reference.name: reference for reference in found.values()}
