"""The build for Vulkan, on Mesa's driver that computes on the processor: what it carries is right, the rest is refused.

A software driver proves that files, gates and refusals work, never speed. The build takes a quarter of an hour; Debian:
glslc libvulkan-dev spirv-headers mesa-vulkan-drivers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from nas.core.errors import CandidateFailed, InfrastructureFailed, Unsupported
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.toolchain import host_features
from nas.testing.llama_cpp_gate import gate
from nas.testing.planted_faults import FAULTS, PLANTED
from nas.testing.run_plan import run_plan

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]

TINY = "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/2]"
CARRIED = {
    "stock": TINY,
    "attention": "d256 v512 ffn=swiglu:512 [A4/2*3]",
    "no QK-norm": "d256 v512 ffn=swiglu:512 [A4/2(qk_norm=0)*3]",
    "convolutions": "d256 v512 ffn=swiglu:512 [C3 C5*2]",
    "windows": "d256 v512 ffn=swiglu:512 [C3 W4/2@32 C3 W4/2@32]",
    "Gated DeltaNet": "d256 v512 ffn=swiglu:512 [D4*3]",
    "squared ReLU": "d256 v512 ffn=relu2:512 [C3 A4/2+swiglu:768 C3+relu2:352]",
    "latent attention": "d256 v512 ffn=swiglu:512 [L4/64 A4/2 L4/64]",
}
LACKING = {"d256 v512 ffn=swiglu:512 [M128(heads=8)*3]": "SSM_SCAN"}
"""Layout -> the operator that the back end lacks on this driver."""
CRASHING = "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]"
"""Experts, with which Mesa's driver of Debian 12 dies; other drivers were not tried."""


@pytest.fixture(scope="module")
def build() -> Build:
    return LLAMA_CPP.build(log=print, patched=True, variant="avx2-vulkan")


def run(build: Build, model: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [str(build.executable), "--model", str(model), "--prompt", "32", "--gen", "8", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    LLAMA_CPP.export(Layout.parse(TINY), "q4_0", RandomWeights(), tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("quantisation", ["q4_0", "q8_0", "f16"])
@pytest.mark.parametrize("name", CARRIED)
def test_right_graphs_pass(build: Build, tmp_path: Path, name: str, quantisation: str) -> None:
    report = gate(tmp_path, quantisation, Layout.parse(CARRIED[name]), build)
    assert report.passed, (report.error, report.limit, report.note)


@pytest.mark.parametrize("fault", FAULTS[:2], ids=lambda fault: fault.name)
def test_planted_faults_fail(build: Build, tmp_path: Path, fault: object) -> None:
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, "q4_0", PLANTED, build, fault).require()  # type: ignore[arg-type]
    assert failure.value.reason == "gate"


@pytest.mark.parametrize("text", LACKING)
def test_what_the_back_end_lacks_is_refused_by_name(build: Build, tmp_path: Path, text: str) -> None:
    with pytest.raises(CandidateFailed, match=f"lacks .*{LACKING[text]}") as failure:
        gate(tmp_path, "q4_0", Layout.parse(text), build)
    assert failure.value.reason == "export"


def test_a_driver_that_dies_is_the_failure_of_the_candidate(build: Build, tmp_path: Path) -> None:
    with pytest.raises(CandidateFailed, match="killed by signal"):
        gate(tmp_path, "q4_0", Layout.parse(CRASHING), build)


def test_everything_is_on_the_gpu_and_its_memory_is_told(build: Build, tmp_path: Path) -> None:
    artifact = LLAMA_CPP.export(Layout.parse(TINY), "q4_0", RandomWeights(), tmp_path / "m.gguf")
    plan = LLAMA_CPP.plan(artifact, build.runner, Workload(prompt=64, gen=8), 120.0, reference=artifact)
    assert plan.args[plan.args.index("--gpu") + 1] == "1"
    sample = LLAMA_CPP.parse(
        run_plan(plan, build.folder, {"model": tmp_path / "m.gguf", "reference": tmp_path / "m.gguf"})
    )
    assert sample.gpu is not None and sample.gpu.name == "Vulkan0"
    weights = artifact.size / 1e6
    assert 0.5 * weights < sample.gpu.memory_mb < weights + 64
    assert sample.reference is not None and sample.reference.gpu is not None
    assert "llvmpipe" not in sample.gpu.description or sample.gpu.software


def test_a_device_with_a_gpu_has_this_build_and_no_other(build: Build) -> None:
    features = {*host_features(), "vulkan"}
    assert LLAMA_CPP.runner("x86_64-linux", features, patched=True).build == build.runner.build
    assert LLAMA_CPP.runner("x86_64-linux", None, patched=True).build != build.runner.build
    with pytest.raises(Unsupported, match="executorch has no back end for vulkan"):
        EXECUTORCH.runner("x86_64-linux", features)


def test_a_missing_driver_is_one_line(build: Build, model: Path) -> None:
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        done = run(
            build, model, "--gpu", "1", **{"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}
        )
        assert done.returncode == 64, (variable, done.stdout, done.stderr)
        assert "no GPU answers" in json.loads(done.stdout)["error"]["message"]


def test_another_build_does_not_take_the_option_for_granted(llama_build: Build, model: Path) -> None:
    done = run(llama_build, model, "--gpu", "1")
    assert done.returncode == 64 and "no GPU answers" in done.stdout


def test_a_killed_run_leaves_nothing_behind(build: Build, model: Path) -> None:
    argv = [str(build.executable), "--model", str(model), "--reference", str(model), "--gpu", "1", "--gen", "16000"]
    process = subprocess.Popen([*argv, "--context", "20000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert run(build, model, "--gpu", "1").returncode == 0, "the next one runs"


def test_the_missing_build_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama.cpp --patched --variant avx2-vulkan"):
        LLAMA_CPP.runner("x86_64-linux", {*host_features(), "vulkan"}, patched=True)
