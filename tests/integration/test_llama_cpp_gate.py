"""The equivalence gate on real files: right graphs pass, and each planted fault fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_cpp_gating import Edit, State, checkpoint, gate

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP

RIGHT = (
    "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/2]",
    "d128 v512 ffn=swiglu:352 [C3*2 A8/4 C3*2 A8/2 C3]",
    "d96 v300 untied ffn=swiglu:256 [C5 A6/2 C5 A6/3]",
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]",
    "d128 v512 ffn=moe:16x4:64 [C3 A8/4 C3 A8/4]",
    "d128 v512 ffn=swiglu:352 [A8/4*4]",
    "d128 v512 ffn=swiglu:352 [A4/2:32(qk_norm=0)*4]",
    "d256 v512 ffn=swiglu:512 [C3 W4/2@32 C3 W4/1@32]",
)
PLANTED = "d256 v512 ffn=swiglu:512 [C3 A8/4 C3 A8/4]"
HEAD = 32


@pytest.mark.parametrize("quantisation", ["q4_0", "f16", "f32"])
@pytest.mark.parametrize("text", RIGHT)
def test_right_graphs_pass(llama_build: Build, tmp_path: Path, text: str, quantisation: str) -> None:
    layout = Layout.parse(text)
    report = gate(tmp_path, quantisation, layout)
    assert report.passed, (report.error, report.limit)


def wrong_kv_heads(state: State) -> None:
    for name, weight in state.items():
        if name.endswith(("mixers.0.k.weight", "mixers.0.v.weight")):
            weight.copy_(weight.unflatten(0, (-1, HEAD)).roll(1, 0).flatten(0, 1))


def shifted_convolution(state: State) -> None:
    for name, weight in state.items():
        if name.endswith("conv.weight"):
            weight.copy_(weight.roll(1, 1))


def forgotten_qk_norm(state: State) -> None:
    for name, weight in state.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(1.0)


def swapped_layers(state: State) -> None:
    for name, first in state.items():
        if name.startswith("layers.0."):
            third = state[name.replace("layers.0.", "layers.2.")]
            kept = third.clone()
            third.copy_(first)
            first.copy_(kept)


@pytest.mark.parametrize("quantisation", ["q4_0", "f32"])
@pytest.mark.parametrize("fault", [wrong_kv_heads, shifted_convolution, forgotten_qk_norm, swapped_layers])
def test_planted_faults_fail(llama_build: Build, tmp_path: Path, fault: Edit, quantisation: str) -> None:
    layout = Layout.parse(PLANTED)
    report = gate(tmp_path, quantisation, layout, edit=fault)
    with pytest.raises(CandidateFailed) as failure:
        report.require()
    assert failure.value.reason == "gate"


@pytest.mark.parametrize("quantisation", ["q4_0", "f32"])
def test_wrong_rope_base_fails(llama_build: Build, tmp_path: Path, quantisation: str) -> None:
    wrong = Layout.parse(PLANTED.replace("A8/4", "A8/4(rope_theta=10000)"))
    assert not gate(tmp_path, quantisation, Layout.parse(PLANTED), wrong).passed


@pytest.mark.parametrize("quantisation", ["q4_0", "f32"])
def test_graph_without_qk_norm_fails(llama_build: Build, tmp_path: Path, quantisation: str) -> None:
    right = Layout.parse("d128 v512 ffn=swiglu:352 [A8/4*4]")
    wrong = Layout.parse("d128 v512 ffn=swiglu:352 [A8/4(qk_norm=0)*4]")
    assert not gate(tmp_path, quantisation, right, wrong).passed


def test_file_that_llama_cpp_refuses_is_the_candidates_failure(llama_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(PLANTED)
    (tmp_path / "m.gguf").write_bytes(b"no model")
    with pytest.raises(CandidateFailed, match="refused"):
        LLAMA_CPP.gate(layout, "f32", checkpoint(layout, tmp_path / "right"), tmp_path / "m.gguf", llama_build.runner)
