"""Further types of llama.cpp, by part of a model: files are right, also where rows are no multiple of a block."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.testing.planted_faults import checkpoint


@pytest.mark.parametrize(
    ("text", "quantisation", "down", "embedding"),
    [
        (
            "d256 v320 ffn=swiglu:512 [C3 A4/2*2]",
            "q4_k+mixers:q6_k+ffn.0:q5_k+ffn.3/3:iq4_xs+embedding:q3_k",
            (Type.Q5_K, Type.Q4_K, Type.IQ4_XS),
            Type.Q6_K,
        ),
        (
            "d96 v320 ffn=swiglu:288 [C3 A4/2*2]",
            "q4_k+mixers:q5_k+ffn.0:iq4_xs+ffn.1:q3_k+embedding:q4_1",
            (Type.IQ4_NL, Type.Q4_0, Type.Q5_0),
            Type.Q8_0,
        ),
    ],
)
def test_each_part_has_its_type_and_the_gate_passes(
    text: str, quantisation: str, down: tuple[Type, ...], embedding: Type, tmp_path: Path, llama_build: Build
) -> None:
    layout, model = Layout.parse(text), tmp_path / "model"
    weights = checkpoint(layout, tmp_path / "weights")
    LLAMA_CPP.export(layout, quantisation, weights, model)
    kinds = {name: tensor.kind for name, tensor in GgufFile.read(model).tensors.items()}
    assert tuple(kinds[f"blk.{layer}.ffn_down.weight"] for layer in range(3)) == down
    assert kinds["token_embd.weight"] == embedding
    LLAMA_CPP.gate(layout, quantisation, weights, model, llama_build.runner).require()
    drawn = LLAMA_CPP.export(layout, quantisation, RandomWeights(), tmp_path / "drawn", recipe=True)
    assert drawn.recipe is None and drawn.size == model.stat().st_size, "the device gets the file"
