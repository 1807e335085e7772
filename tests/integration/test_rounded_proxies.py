"""Proxies whose score after quantisation is computed in PyTorch: llama.cpp's of the exported file is the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.quality.rounding import TYPES
from nas.measure.runtimes.llama_cpp.variants import Build


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["short convolution", "mixture of experts"])
def test_rounded_weights_lose_what_the_file_loses(kind: str, patched_build: Build) -> None:
    argv = [sys.executable, "-m", "benchmarks.quality.rounding", "--only", kind, "--steps", "30"]
    bits = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    assert abs(bits["q4_0"] / bits["trained"] - 1) > 3e-5, "four bits change something"
    for name in TYPES:
        assert bits[name] == pytest.approx(bits[f"{name} file"], rel=3e-4)
