"""The runner for arm64 boards, made here and run here: qemu-user executes it.

By default one layout with every kind of block passes, and two planted faults fail. More layouts, and all
faults, run on this machine's own runner in test_executorch_gate.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from exhaustive import mostly_exhaustive

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.plan import RawRun
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.build_cache import needed_glibc
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import LIBRARIES, Build
from nas.measure.runtimes.toolchain import emulator_of
from nas.testing.executorch_gate import gate
from nas.testing.planted_faults import (
    EVERY_KIND,
    PLANTED,
    PLANTS,
    Fault,
)

# The first test compiles, and blocks are lowered the first time.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.needs("arm64")]

TARGET = "aarch64-linux"
BY_DEFAULT = [(layout, faults[0]) for layout, faults in PLANTS if layout == PLANTED]
LAYOUTS = {
    "convolutions": "d256 v512 ffn=swiglu:512 [C3 C5*2]",
    "attention": "d256 v512 ffn=swiglu:512 [A8/4 A4/1 A6/2:32]",
    "windows": "d256 v512 ffn=swiglu:512 [W4/2@32 W4/2@32(sink=1)]",
    "experts": "d256 v512 ffn=moe:8x2:64 [A4/2 A4/2+moe:8x4:96]",
    "shared": "d128 v512 ffn=swiglu:352 [A8/4 C3&W4/2@8 A8/4(kv=0)+none C3+none ^1 -]",
    **{layout.format(): layout.format() for layout, _ in PLANTS},
    "every kind": EVERY_KIND.format(),
}


@pytest.fixture(scope="module")
def arm_build() -> Build:
    return EXECUTORCH.build(TARGET, log=print)


def test_runner_needs_gnus_libraries_only_and_none_newer_than_its_own_libraries_do(arm_build: Build) -> None:
    assert set(arm_build.runner.files) == {"runner", *LIBRARIES}
    loaded = set()
    for name in arm_build.runner.files:
        assert (arm_build.folder / name).read_bytes()[18] == 183, "EM_AARCH64"
        dynamic = subprocess.run(["readelf", "-d", arm_build.folder / name], check=True, capture_output=True, text=True)
        loaded |= {line.split("[")[1].rstrip("]") for line in dynamic.stdout.splitlines() if "(NEEDED)" in line}
    of_glibc = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-aarch64.so.1"}
    of_gcc = {"libstdc++.so.6", "libgcc_s.so.1"}
    assert loaded <= of_glibc | of_gcc | set(arm_build.runner.files)
    needed = (needed_glibc((arm_build.folder / name,)) for name in LIBRARIES)
    assert arm_build.glibc == max(filter(None, needed), key=lambda version: int(version.removeprefix("2.")))


@pytest.mark.parametrize("kind", mostly_exhaustive(LAYOUTS, "every kind"))
def test_right_graphs_pass(arm_build: Build, tmp_path: Path, kind: str) -> None:
    """Logits of the prompt's end and of every decoded token, by arm64's kernels, against PyTorch's."""
    report = gate(tmp_path, Layout.parse(LAYOUTS[kind]), arm_build)
    assert len(report.errors) == 33
    assert report.passed, (report.error, report.limit)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(layout, fault, marks=() if (layout, fault) in BY_DEFAULT else pytest.mark.exhaustive)
        for layout, faults in PLANTS
        for fault in faults
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else value.format(),
)
def test_planted_faults_fail(arm_build: Build, tmp_path: Path, layout: Layout, fault: Fault) -> None:
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, layout, arm_build, fault).require()
    assert failure.value.reason == "gate"


def test_recipe_makes_the_same_file(arm_build: Build, tmp_path: Path) -> None:
    layout, output = EVERY_KIND, tmp_path / "made"
    EXECUTORCH.export(layout, "8da4w", RandomWeights(3), tmp_path / "file")
    EXECUTORCH.export(layout, "8da4w", RandomWeights(3), tmp_path / "recipe", recipe=True)
    emulator = emulator_of(TARGET, arm_build.executable)
    assert emulator
    argv = [*emulator, str(arm_build.executable), "--recipe", str(tmp_path / "recipe"), "--output", str(output)]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    assert output.read_bytes() == (tmp_path / "file").read_bytes()


def test_measured_run(arm_build: Build, tmp_path: Path) -> None:
    """As a device runs it: a float16 cache, written and read by arm64's conversions."""
    EXECUTORCH.export(PLANTED, "8da4w", RandomWeights(), tmp_path / "model")
    emulator = emulator_of(TARGET, arm_build.executable)
    assert emulator
    argv = [*emulator, str(arm_build.executable), "--model", str(tmp_path / "model"), "--prompt", "40", "--gen", "3"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120)
    sample = EXECUTORCH.parse(RawRun(exit_code=0, stdout=done.stdout, wall_s=3600.0, started_at=0.0))
    assert sample.finite and len(sample.decode_ns) == 3
