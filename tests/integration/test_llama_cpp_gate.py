"""The equivalence gate on real files: right graphs pass, and each planted fault fails.

By default at q4_0: every right layout, all faults of convolutions, attention and experts, and one of every other kind;
the right layout of `TestStockGate` at every quantisation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from exhaustive import first_by_default, mostly_exhaustive

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import Runtime
from nas.measure.runtimes.llama_cpp.binding import evaluate
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.runner import Feed, local_machine, runner_logits
from nas.testing.gate_contract import GateContract
from nas.testing.llama_cpp_gate import gate
from nas.testing.planted_faults import MOE_FAULTS, PLANTED_MOE, PLANTS, Fault, checkpoint

pytestmark = pytest.mark.usefixtures("fast_binding")

STOCK_PLANTS = [
    (layout, faults)
    for layout, faults in PLANTS
    if layout != PLANTED_MOE and LLAMA_CPP.supports(layout).verdict == "stock"
]
RIGHT = (
    *(layout.format() for layout, _ in STOCK_PLANTS),
    "d128 v512 ffn=swiglu:352 [C3*2 A8/4 C3*2 A8/2 C3]",
    "d96 v300 untied ffn=swiglu:256 [C5 A6/2 C5 A6/3]",
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]",
    "d128 v512 ffn=moe:16x4:64 [C3 A8/4 C3 A8/4]",
    "d128 v512 ffn=swiglu:352 [A8/4*4]",
    "d128 v512 ffn=swiglu:352 [A4/2:32(qk_norm=0)*4]",
    "d256 v512 ffn=swiglu:512 [C3 W4/2@32 C3 W4/1@32]",
    "d256 v512 ffn=swiglu:512 [C3 A4/2(rope_factor=4)]",
    "d256 v512 ffn=geglu:512 [A4/1:64(qk_norm=0)*2]",
    "d256 v512 ffn=relu2:512 [A4/2(qk_norm=0,rope_factor=8,rope_tokens=32)*2]",
    "d256 v512 untied norms=both softcap=4 ffn=geglu:512 [A4/2:32*2]",
    "d256 v512 norms=behind ffn=swiglu:512 [A8/4*2]",
    "d256 v512 untied norms=behind ffn=swiglu:512 [W8/4@8(qk_norm_wide=1) A8/4(qk_norm_wide=1,rope_factor=4)]",
)
PLANTED = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A8/4 C3 A8/4]")
QK_NORM = Fault("QK-norm missing", layout=("A8/4", "A8/4(qk_norm=0)"))


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "q8_0", "f16", "f32"], "q4_0"))
@pytest.mark.parametrize("text", RIGHT)
def test_right_graphs_pass(llama_build: Build, tmp_path: Path, text: str, quantisation: str) -> None:
    report = gate(tmp_path, quantisation, Layout.parse(text), llama_build)
    assert report.passed, (report.error, report.limit, report.note)


@pytest.mark.parametrize("quantisation", ["q8_0+ffn:q4_0", "q4_0+mixers:f16+embedding:q8_0"])
def test_right_graphs_pass_where_roles_have_types_of_their_own(
    llama_build: Build, tmp_path: Path, quantisation: str
) -> None:
    report = gate(tmp_path, quantisation, PLANTED_MOE, llama_build)
    assert report.passed, (report.error, report.limit, report.note)


class TestStockGate(GateContract):
    """Of a stock file; the one without QK-norm is a file of the patched build."""

    layout = PLANTED
    faults_at: ClassVar[tuple[str, ...]] = () if os.environ.get("HILNAS_TEST_ALL") else ("q4_0",)

    @pytest.fixture
    def runtime(self, llama_build: Build, patched_build: Build) -> Runtime:
        return LLAMA_CPP


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "q8_0", "f16", "f32"], "q4_0"))
@pytest.mark.parametrize(
    ("layout", "fault"),
    [(layout, fault) for layout, faults in STOCK_PLANTS for fault in first_by_default(faults)],
    ids=lambda value: value.name if isinstance(value, Fault) else value.format(),
)
def test_planted_faults_of_stock_kinds_fail(
    llama_build: Build, patched_build: Build, tmp_path: Path, layout: Layout, fault: Fault, quantisation: str
) -> None:
    build = llama_build if LLAMA_CPP.supports(fault.exported(layout)).verdict == "stock" else patched_build
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, quantisation, layout, build, fault).require()
    assert failure.value.reason == "gate"


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "f32"], "q4_0"))
def test_graph_without_qk_norm_fails(llama_build: Build, tmp_path: Path, quantisation: str) -> None:
    """Attention alone: qwen3 with the norm, llama without."""
    right = Layout.parse("d128 v512 ffn=swiglu:352 [A8/4*4]")
    assert not gate(tmp_path, quantisation, right, llama_build, QK_NORM).passed


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "q8_0", "f16", "f32"], "q4_0"))
@pytest.mark.parametrize("fault", MOE_FAULTS, ids=lambda fault: fault.name)
def test_faults_in_experts_fail(llama_build: Build, tmp_path: Path, fault: Fault, quantisation: str) -> None:
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, quantisation, PLANTED_MOE, llama_build, fault).require()
    assert failure.value.reason == "gate"


def test_experts_that_rounding_swaps_do_not_widen_the_limit(llama_build: Build, tmp_path: Path) -> None:
    """With experts and without, Q4_0 weights explain errors of the same size."""
    dense = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/2]")
    limits = [gate(tmp_path, "q4_0", layout, llama_build).limit for layout in (dense, PLANTED_MOE)]
    assert limits[1] < 2 * limits[0]


@pytest.mark.parametrize("text", [PLANTED.format(), PLANTED_MOE.format()])
def test_watching_experts_changes_no_logits(llama_build: Build, tmp_path: Path, text: str) -> None:
    layout, model = Layout.parse(text), tmp_path / "m.gguf"
    LLAMA_CPP.export(layout, "q4_0", checkpoint(layout, tmp_path / "weights"), model)
    ids = np.random.default_rng(0).integers(0, layout.vocab, 90).tolist()
    plain, watched = (
        evaluate(llama_build, model, ids, (70, 18, 1, 1), tmp_path, watch=watch) for watch in (False, True)
    )
    np.testing.assert_array_equal(plain.logits, watched.logits)
    assert not plain.experts
    assert {depth: chosen.shape for depth, chosen in watched.experts.items()} == {
        depth: (90, 2) for depth, layer in enumerate(layout.layers) if layer.ffn and layer.ffn.kind == "moe"
    }


def test_runner_computes_what_the_library_does(llama_build: Build, tmp_path: Path) -> None:
    """Decoded tokens, bit for bit; of the prompt the runner asks for one row of logits, which other kernels compute."""
    layout, model = PLANTED, tmp_path / "m.gguf"
    LLAMA_CPP.export(layout, "q4_0", checkpoint(layout, tmp_path / "weights"), model)
    feed = Feed(prompt=95, gen=4, batch=71, seed=3)
    rows = runner_logits(
        local_machine(llama_build.executable, llama_build.runner.target), model, layout.vocab, feed, tmp_path
    )
    ids = feed.ids(layout.vocab).tolist()
    whole = evaluate(llama_build, model, ids, (71, 24, 1, 1, 1, 1), tmp_path).logits
    np.testing.assert_array_equal(rows[1:], whole[95:])
    np.testing.assert_allclose(rows[0], whole[94], atol=0.01 * float(np.abs(whole).max()))
