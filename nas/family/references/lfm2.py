"""LFM2 itself (arXiv:2511.23404): layouts, so the same code writes them as any member of a family."""

from __future__ import annotations

from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.family.references.reference import Reference

_TOLD = {"LFM2-350M": "350M", "LFM2-700M": "740M", "LFM2-1.2B": "1.17B", "LFM2-2.6B": "2.57B", "LFM2-8B-A1B": "8.3B"}

MODELS = tuple(
    Reference(
        name,
        f"https://huggingface.co/LiquidAI/{name}/blob/main/config.json",
        _TOLD[name],
        Layout.parse(text),
    )
    for name, text in LFM2.items()
)
