"""The equivalence gate on real artifacts: right graphs pass, and each planted fault fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from exhaustive import mostly_exhaustive

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import Runtime
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.testing.executorch_gate import QUANTISATION, gate
from nas.testing.gate_contract import GateContract
from nas.testing.planted_faults import EVERY_KIND, FAULTS, PLANTED, PLANTS, Fault, checkpoint

pytestmark = pytest.mark.timeout(900)  # blocks are lowered the first time

MORE_WIDTHS = (
    "d96 v300 untied ffn=swiglu:256 [C5 A6/2 C5 A6/3]",
    "d128 v512 ffn=swiglu:352 [A4/2:32(qk_norm=0)*4]",
    "d256 v512 ffn=swiglu:512 [C3 L6/32:64(nope_dim=32,query=64,rope_theta=0)]",
    "d256 v512 ffn=swiglu:512 [M16(conv=0) D8/4(conv=0)]",
    "d160 v512 ffn=swiglu:352 [A8/4:20 W8/2@16:20(rope_theta=0) C3 ^0]",
    "d256 v512 ffn=swiglu:512 [M16 M16(groups=2)]",
    "d160 v512 ffn=swiglu:352 [C3 D4:64(conv=3) A8/4:20 D8/1:20]",
    "d128 v512 ffn=swiglu:352 [A8/4 C3&W4/2@8 A8/4(kv=0)+none C3+none ^1 -]",
)
(STALE,) = (fault for fault in FAULTS if fault.earlier)
RIGHT = (
    *(layout.format() for layout, _ in PLANTS),
    *MORE_WIDTHS,
    EVERY_KIND.format(),
    "d256 v512 ffn=swiglu:512 [W4/2@32 W4/1@32(sink=1)]",
)


# Of unusual widths none by default; how constants are packed is in tests/unit/test_executorch_numbers.py.
@pytest.mark.parametrize("text", mostly_exhaustive(RIGHT, EVERY_KIND.format()))
def test_right_graphs_pass(executorch_build: Build, tmp_path: Path, text: str) -> None:
    report = gate(tmp_path, Layout.parse(text), executorch_build)
    assert report.passed, (report.error, report.limit)


class TestGate(GateContract):
    @pytest.fixture
    def runtime(self, executorch_build: Build) -> Runtime:
        return EXECUTORCH


# Lowering a kind of block takes most of a minute: by default the faults of convolutions and attention alone, in
# `TestGate`, and one of every other kind in test_llama_cpp_patched.py.
@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(layout, fault, marks=[] if (layout, fault) == (PLANTED, STALE) else pytest.mark.exhaustive)
        for layout, faults in PLANTS
        for fault in faults
        if layout != PLANTED or fault.earlier
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else value.format(),
)
def test_planted_faults_fail(executorch_build: Build, tmp_path: Path, layout: Layout, fault: Fault) -> None:
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, layout, executorch_build, fault).require()
    assert failure.value.reason == "gate"


def test_lost_tokens_fail(executorch_build: Build, tmp_path: Path) -> None:
    """State that does not reach the next call: caches that keep nothing but the current token."""
    trained, model = checkpoint(PLANTED, tmp_path / "weights"), tmp_path / "model"
    EXECUTORCH.export(PLANTED, QUANTISATION, trained, model)
    content = model.read_bytes()
    assert content.count(b"\ncache 4 32 0") == 2
    model.write_bytes(content.replace(b"\ncache 4 32 0", b"\ncache 4 32 1"))
    assert not EXECUTORCH.gate(PLANTED, QUANTISATION, trained, model, executorch_build.runner).passed


def test_file_that_the_runner_refuses_is_the_candidates_failure(executorch_build: Build, tmp_path: Path) -> None:
    trained, model = checkpoint(PLANTED, tmp_path / "weights"), tmp_path / "model"
    model.write_bytes(b"no model" * 100)
    with pytest.raises(CandidateFailed, match="refused") as failure:
        EXECUTORCH.gate(PLANTED, QUANTISATION, trained, model, executorch_build.runner)
    assert failure.value.reason == "export"
