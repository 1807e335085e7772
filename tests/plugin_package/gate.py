"""The plug-in's exports, run with it installed by tests/integration/test_plugin_export.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nas.core.layout import Layout
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.release.files import write_files
from nas.release.options import FileOptions
from nas.runtimes.executorch.build import build
from nas.testing.executorch_gate import gate
from nas.testing.planted_faults import Fault, checkpoint

LAYOUT = Layout.parse("d64 v300 ffn=sqrelu:96 [Y A2/1 Y+swiglu:64]")


def test_executorch_computes_what_pytorch_does(tmp_path: Path) -> None:
    report = gate(tmp_path, LAYOUT, build(log=print))
    assert report.passed, (report.error, report.limit)


def test_a_planted_fault_is_found(tmp_path: Path) -> None:
    def swapped(state: dict[str, torch.Tensor]) -> None:
        up = state["layers.0.ffn.up.weight"]
        up.copy_(up.flip(0))

    assert not gate(tmp_path, LAYOUT, build(log=print), Fault("hidden units in another order", swapped)).passed


@torch.no_grad()
def test_stock_transformers_loads_the_released_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained = checkpoint(LAYOUT, tmp_path / "weights.safetensors")
    write_files(tmp_path / "m", LAYOUT, trained, FileOptions(gguf=(), dtype="float32"), print)
    folder = tmp_path / "m" / "transformers"
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    ours = Model(LAYOUT, seed=None)
    load_weights(ours, trained.path)
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = ours.eval()(tokens)
    assert torch.allclose(theirs(tokens).logits, expected, atol=1e-4 * float(expected.abs().max()))
