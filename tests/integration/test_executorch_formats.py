"""ExecuTorch's group sizes and 8-bit weights, by part of a model: files are right, and the gate tells them apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nas.core.errors import CandidateFailed, InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.replacement import Slot
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.testing.planted_faults import checkpoint

pytestmark = pytest.mark.timeout(900)

LAYOUT = Layout.parse("d64 v96 ffn=swiglu:192 [C3*2]")
MIXED = "8da8w+ffn:8da4w_128+mixers.1:8da4w"
"""Feed-forwards in groups of 64: rows of 192 have none of 128."""


def test_each_part_has_its_format_and_the_gate_tells_them_apart(tmp_path: Path, executorch_build: Build) -> None:
    weights, model = checkpoint(LAYOUT, tmp_path / "weights"), tmp_path / "model"
    artifact = EXECUTORCH.export(LAYOUT, MIXED, weights, model)
    assert artifact.quantisation == MIXED
    EXECUTORCH.gate(LAYOUT, MIXED, weights, model, executorch_build.runner).require()
    other = EXECUTORCH.gate(LAYOUT, "8da4w", weights, model, executorch_build.runner)
    with pytest.raises(CandidateFailed, match="logits differ from PyTorch"):
        other.require()


def test_blocks_are_rounded_as_in_the_file_of_the_model(tmp_path: Path) -> None:
    layout = Layout.parse("d64 v96 ffn=swiglu:64 [C3 A2/1 A2/1+moe:4x2:32(shared=1)]")
    weights = checkpoint(layout, tmp_path / "weights")
    rounded = EXECUTORCH.rounded(layout, "8da4w_64+mixers.0:8da8w", weights).state_dict()
    trained = load_file(weights.path)
    for depth, part, place, name in (
        (0, "mixer", "mixers.0.", "8da8w"),
        (1, "mixer", "mixers.0.", "8da4w_64"),
        (1, "ffn", "ffn.", "8da4w_64"),
        (2, "ffn", "ffn.", "8da4w_64"),
    ):
        prefix = f"layers.{depth}.{place}"
        block = Slot(depth, "mixer" if part == "mixer" else "ffn").block(layout)
        assert block is not None
        tensors = {key.removeprefix(prefix): value for key, value in trained.items() if key.startswith(prefix)}
        alone = EXECUTORCH.rounded_block(layout, block, name, tensors)
        assert alone.keys() == tensors.keys()
        for key, value in alone.items():
            assert torch.equal(value, rounded[prefix + key]), (depth, key)
        assert any(not torch.equal(value, tensors[key]) for key, value in alone.items())


def test_unknown_formats_and_parts_are_refused() -> None:
    with pytest.raises(UnknownName, match="quantisation of ExecuTorch"):
        EXECUTORCH.require_quantisation("8da8w+ffn:q4_0")
    with pytest.raises(InvalidInput, match="no layer or range"):
        EXECUTORCH.require_quantisation("8da8w+ffn.x:8da4w")
    assert replace(LAYOUT, quantisation=MIXED).architecture == LAYOUT
