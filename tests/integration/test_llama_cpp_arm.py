"""The runner for arm64 boards and phones, made here and run here: qemu-user executes it.

By default one layout with every kind of block passes, and of each planted layout one fault fails. All layouts and
faults run on this machine's own runner in test_llama_cpp_gate.py and test_llama_cpp_patched.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from exhaustive import mostly_exhaustive

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.runner import Feed, local_machine, runner_logits
from nas.testing.llama_cpp_gate import gate
from nas.testing.planted_faults import (
    EVERY_KIND,
    PLANTED,
    PLANTED_CHOICE,
    PLANTED_GDN,
    PLANTED_LFM3,
    PLANTED_MAMBA2,
    PLANTED_MOE,
    PLANTED_WINDOWS,
    PLANTS,
    Fault,
    checkpoint,
)

pytestmark = [pytest.mark.timeout(1800), pytest.mark.needs("arm64")]  # the first test compiles

TARGET = "aarch64-linux"
BY_DEFAULT = (PLANTED, PLANTED_MOE, PLANTED_WINDOWS, PLANTED_MAMBA2, PLANTED_GDN, PLANTED_LFM3)
"""Layouts whose first fault is planted by default; their kernels are those of all others."""
LAYOUTS = {
    "lfm2": "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/1]",
    "qwen3": "d128 v512 ffn=swiglu:352 [A8/4*3]",
    "convolutions": "d256 v512 ffn=swiglu:512 [C3 C5*2]",
    "attention": "d256 v512 ffn=swiglu:512 [A8/4 A4/1 A6/2:32]",
    "windows": "d256 v512 ffn=swiglu:512 [W4/2@32*3]",
    "feed-forwards": "d256 v512 ffn=swiglu:512 [C3 A4/2+swiglu:768 C3+swiglu:352]",
    "experts": "d256 v512 ffn=moe:8x2:64 [A4/2*2 A4/2+moe:8x4:96]",
    **{layout.format(): layout.format() for layout, _ in PLANTS if LLAMA_CPP.supports(layout)},
    "every kind": EVERY_KIND.format(),
}


@pytest.fixture(scope="module")
def arm_build() -> Build:
    """One build for all layouts: the patched one carries stock files too."""
    return LLAMA_CPP.build(TARGET, log=print, patched=True)


def test_runner_is_one_static_file(arm_build: Build) -> None:
    assert list(arm_build.runner.files) == ["runner"] and arm_build.runner.target == TARGET
    header = arm_build.executable.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183, "EM_AARCH64"
    assert b"ld-musl" not in arm_build.executable.read_bytes(), "nothing is loaded at run time"


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "f32"], "q4_0"))
@pytest.mark.parametrize("kind", mostly_exhaustive(LAYOUTS, "every kind"))
def test_right_graphs_pass(
    arm_build: Build, patched_build: Build, tmp_path: Path, kind: str, quantisation: str
) -> None:
    """Logits of the prompt's end and of every decoded token, by arm64's kernels, against PyTorch's."""
    report = gate(tmp_path, quantisation, Layout.parse(LAYOUTS[kind]), arm_build)
    assert len(report.errors) == 33
    assert report.passed, (report.error, report.limit)


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "f32"], "q4_0"))
@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(layout, fault, marks=() if fault is faults[0] and layout in BY_DEFAULT else pytest.mark.exhaustive)
        for layout, faults in PLANTS
        if LLAMA_CPP.supports(layout)
        for fault in faults
        if not fault.choice_only
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else value.format(),
)
def test_planted_faults_fail(
    arm_build: Build, patched_build: Build, tmp_path: Path, layout: Layout, fault: Fault, quantisation: str
) -> None:
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, quantisation, layout, arm_build, fault).require()
    assert failure.value.reason == "gate"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fault", [fault for _, faults in PLANTS for fault in faults if fault.choice_only], ids=lambda fault: fault.name
)
def test_faults_in_choosing_experts_fail(arm_build: Build, patched_build: Build, tmp_path: Path, fault: Fault) -> None:
    """Where choices need not be settled: the right file passes to the last bit that float32 has."""
    right = gate(tmp_path, "f32", PLANTED_CHOICE, arm_build)
    assert right.passed and right.limit < 1e-4
    assert not gate(tmp_path, "f32", PLANTED_CHOICE, arm_build, fault).passed


@pytest.mark.parametrize("kind", mostly_exhaustive(["attention", "every kind"], "attention"))
def test_half_precision_sums_are_simulated(arm_build: Build, patched_build: Build, tmp_path: Path, kind: str) -> None:
    """Arm adds up F16 products in F16, which errs more than rounding activations alone explains."""
    report = gate(tmp_path, "f16", Layout.parse(LAYOUTS[kind]), arm_build)
    assert report.passed, (report.error, report.limit)
    assert report.limit < 0.05


def test_file_that_the_runner_refuses_is_the_candidates_failure(arm_build: Build, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model")
    trained = checkpoint(PLANTED, tmp_path / "right")
    with pytest.raises(CandidateFailed, match="refused") as failure:
        LLAMA_CPP.gate(PLANTED, "f32", trained, tmp_path / "m.gguf", arm_build.runner)
    assert failure.value.reason == "export"


def test_without_an_emulator_the_machine_is_to_blame(arm_build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InfrastructureFailed, match="qemu-user-static"):
        local_machine(arm_build.executable, TARGET)


def test_logits_of_another_vocabulary_are_refused(arm_build: Build, patched_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(LAYOUTS["lfm2"])
    LLAMA_CPP.export(layout, "f32", checkpoint(layout, tmp_path / "weights"), tmp_path / "m.gguf")
    with pytest.raises(CandidateFailed, match="logits"):
        runner_logits(
            local_machine(arm_build.executable, TARGET),
            tmp_path / "m.gguf",
            600,
            Feed(prompt=8, gen=1, batch=8),
            tmp_path,
        )
