"""Reference models, made small, in the stock build."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compare_references_tiny import kinds, tiny

from nas.compare.published import Decoder
from nas.runtimes.base import RandomWeights
from nas.runtimes.llama_cpp.binding import greedy_tokens
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.stock_model import write_stock_model


@pytest.mark.parametrize("name", kinds())
def test_the_stock_build_runs_it(llama_build: Build, tmp_path: Path, name: str) -> None:
    reference = tiny(kinds()[name])
    assert isinstance(reference.shape, Decoder)
    path = tmp_path / "model.gguf"
    write_stock_model(reference.shape.model(), RandomWeights(), path)
    argv = [llama_build.executable, "--model", path, "--prompt", "96", "--gen", "4"]
    ran = subprocess.run([*argv, "--flash", str(int(reference.flash_attn))], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert '"finite":true' in ran.stdout
    if reference.flash_attn:  # the binding leaves it to llama.cpp
        chosen = greedy_tokens(llama_build, path, list(range(40)), 4)
        assert len(chosen) == 4
        assert all(0 <= token < 512 for token in chosen)
