"""The runner for arm64 boards and phones, made here and run here: qemu-user executes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from llama_cpp_gating import checkpoint

from nas.core.layout import Layout
from nas.runtimes.host import emulator_of
from nas.runtimes.llama_cpp.build import build
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.gate import compare
from nas.runtimes.llama_cpp.oracle import Oracle
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP

pytestmark = pytest.mark.timeout(1800)  # the first test compiles

TARGET = "aarch64-linux"
PROMPT, GEN, SEED = 80, 16, 5
LAYOUTS = {
    "stock": "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/2]",
    "patched": "d256 v512 ffn=swiglu:512 [C3 M16 W4/2@32(sink=1) C5 A4/2+swiglu:768]",
}


@pytest.fixture(scope="module")
def arm_build() -> Build:
    """One build for both layouts: the patched one carries stock files too."""
    return build(TARGET, log=print, patched=True)


@pytest.fixture(scope="module")
def emulator() -> list[str]:
    found = emulator_of(TARGET)
    assert found is not None, "no qemu-user here: apt-get install qemu-user-static"
    return found


def runner_ids(vocab: int) -> np.ndarray:
    """The token ids that runner.c feeds: splitmix64 (Steele, Lea, Flood 2014)."""
    state, ids, mask = SEED, [], (1 << 64) - 1
    for _ in range(PROMPT + GEN):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        ids.append((z ^ (z >> 31)) % vocab)
    return np.array(ids)


def test_runner_is_one_static_file(arm_build: Build) -> None:
    assert list(arm_build.runner.files) == ["runner"] and arm_build.runner.target == TARGET
    header = arm_build.executable.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183, "EM_AARCH64"
    assert b"ld-musl" not in arm_build.executable.read_bytes(), "nothing is loaded at run time"


@pytest.mark.parametrize("quantisation", ["q4_0", "f32"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_runner_passes_the_gate(
    arm_build: Build, patched_build: Build, emulator: list[str], tmp_path: Path, kind: str, quantisation: str
) -> None:
    """Logits of the prompt's end and of every decoded token, by arm64's kernels, against PyTorch's."""
    layout, model, rows = Layout.parse(LAYOUTS[kind]), tmp_path / "m.gguf", tmp_path / "rows"
    trained = checkpoint(layout, tmp_path / "weights")
    LLAMA_CPP.export(layout, quantisation, trained, model)
    sizes = ["--prompt", str(PROMPT), "--gen", str(GEN), "--seed", str(SEED)]
    argv = [*emulator, str(arm_build.executable), "--model", str(model), *sizes, "--logits", str(rows)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["finite"]
    measured = np.fromfile(rows, np.float32).reshape(GEN + 1, layout.vocab)
    oracle, ids = Oracle(layout, quantisation, trained), runner_ids(layout.vocab)  # type: ignore[arg-type]
    exact, rounded = oracle.exact(ids)[PROMPT - 1 :], oracle.rounded(ids)[PROMPT - 1 :]
    report = compare(measured, exact, rounded)
    assert report.passed, (report.error, report.limit)
    wrong = compare(np.roll(measured, 1, 0), exact, rounded)
    assert not wrong.passed, "rows of other tokens"
