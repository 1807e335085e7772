"""Checkpoints with weights that a wrong graph cannot hide behind, and the gate on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from nas.core.layout import Layout
from nas.nn.model import Model
from nas.nn.weights import save_weights
from nas.runtimes.base import Checkpoint, GateReport
from nas.runtimes.llama_cpp.builds import find_build
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP

State = dict[str, torch.Tensor]
Edit = Callable[[State], None]


def unchanged(state: State) -> None:
    """No fault."""


def checkpoint(layout: Layout, path: Path, edit: Edit = unchanged) -> Checkpoint:
    """Fresh weights; norms and biases are drawn apart from one and zero, so that a forgotten one shows."""
    model, generator = Model(layout, seed=1), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.rand(weight.shape, generator=generator)
            if "norm" in name or name.endswith(".D"):
                weight.copy_(0.5 + drawn)
            elif name.endswith(("sinks.weight", "conv.bias", "dt_bias")):
                weight.add_(2 * drawn - 1)
        edit(dict(model.named_parameters()))
    save_weights(model, path)
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


def gate(
    folder: Path, quantisation: str, right: Layout, exported: Layout | None = None, edit: Edit = unchanged
) -> GateReport:
    """Exports `exported` (else `right`) with edited weights, and holds it against `right` with the unedited ones."""
    exported = exported or right
    artifact = LLAMA_CPP.export(exported, quantisation, checkpoint(exported, folder / "wrong", edit), folder / "m.gguf")
    runner = find_build(patched=artifact.patched).runner
    return LLAMA_CPP.gate(right, quantisation, checkpoint(right, folder / "right"), folder / "m.gguf", runner)
