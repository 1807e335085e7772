"""The plug-in's exports, run with it installed by tests/integration/test_plugin_export.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hilnas_plugin.faults import S4D_FAULTS, altered

from nas.core.layout import Layout
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.model.nn.model import Model
from nas.model.nn.weights import load_weights
from nas.testing.executorch_gate import gate
from nas.testing.planted_faults import Fault, checkpoint
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

LAYOUT = Layout.parse("d64 v300 ffn=reglu:96 [Z4 A2/1 Z4+swiglu:64]")


def test_executorch_computes_what_pytorch_does(tmp_path: Path) -> None:
    report = gate(tmp_path, LAYOUT, EXECUTORCH.build(log=print))
    assert report.passed, (report.error, report.limit)


FAULTS = (*S4D_FAULTS, Fault("hidden units in another order", altered("ffn.up.weight", lambda weight: weight.flip(0))))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert not gate(tmp_path, LAYOUT, EXECUTORCH.build(log=print), fault).passed


@torch.no_grad()
def test_stock_transformers_loads_the_released_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained = checkpoint(LAYOUT, tmp_path / "weights.safetensors")
    write_files(tmp_path / "m", LAYOUT, trained, FileOptions(gguf=(), dtype="float32"), print)
    folder = tmp_path / "m" / "transformers"
    candidate: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    reference = Model(LAYOUT, seed=None)
    load_weights(reference, trained.path)
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = reference.eval()(tokens)
    close = partial(torch.allclose, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert close(candidate(tokens).logits, expected)
    for real in (slice(3, 12), slice(0, 9)):  # padding on the left, on the right; then another token
        mask = torch.zeros(2, 12, dtype=torch.long)
        mask[:, real] = 1
        padded = candidate(tokens, attention_mask=mask, use_cache=True)
        alone = candidate(tokens[:, real], use_cache=True)
        assert close(padded.logits[:, real], alone.logits)
        cached, token = padded.past_key_values, tokens[:, :1]
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        after = candidate(token, attention_mask=mask, past_key_values=cached).logits
        assert close(after, candidate(token, past_key_values=alone.past_key_values).logits)
