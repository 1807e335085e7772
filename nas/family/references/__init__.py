"""Reference models: what a family is compared with, a file per kind of model."""

from __future__ import annotations

from nas.core.errors import UnknownName, Unsupported
from nas.family.references import gemma3, granite4, granite4_hybrid, lfm2, llama32, mamba2, plm, qwen3, smollm3
from nas.family.references.reference import Reference

REFERENCES: dict[str, Reference] = {
    reference.name: reference
    for module in (lfm2, granite4, granite4_hybrid, qwen3, llama32, gemma3, smollm3, plm, mamba2)
    for reference in module.MODELS
}
"""Name -> model, LFM2 first."""

NOT_CARRIED = {
    "Zebra-Llama": (
        "its layers are multi-head latent attention and Mamba-2: no stock architecture of llama.cpp mixes the two, "
        "and no block of ours is latent attention, which its PyTorch and ExecuTorch forms would need"
    ),
}
"""Name -> why it is not compared."""


def find_reference(name: str) -> Reference:
    """The reference model called `name`, in any case.

    Raises:
        Unsupported: it is known, but nothing here carries it.
        UnknownName: no such model; the message offers the nearest.
    """
    by_folded = {known.casefold(): reference for known, reference in REFERENCES.items()}
    if found := by_folded.get(name.casefold()):
        return found
    for known, reason in NOT_CARRIED.items():
        if name.casefold().startswith(known.casefold()):
            raise Unsupported(f"{known} is not carried: {reason}", where="--reference")
    raise UnknownName("reference model", name, REFERENCES, where="--reference")
