"""Our attention kernel against a direct computation in double precision, in C++ as it ships."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import VARIANTS
from nas.measure.runtimes.toolchain import find_compiler, host_features, host_target

CASES = 3 * 3 * 2 * 3 * 3 + 2 * 2 + 2 * 2 + 1
RUNNABLE = [one for one in VARIANTS if one.target == host_target() and one.needs <= host_features()]


@pytest.mark.parametrize("march", [variant.march for variant in RUNNABLE])
def test_kernel_is_right(tmp_path: Path, march: str) -> None:
    program = tmp_path / "check"
    source = Path(__file__).with_name("attention_check.cpp")
    flags = ["-std=c++20", "-O3", "-ffp-contract=fast", f"-march={march}", f"-I{EXECUTORCH.runner_sources[0].parent}"]
    subprocess.run([find_compiler().cxx, *flags, str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == CASES
    for line in lines:
        single, half = map(float, line.split()[-2:])
        assert single < 5e-6 and half < 5e-3, line
