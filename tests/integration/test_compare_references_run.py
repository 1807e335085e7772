"""Reference models, made small, in the build that each needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compare_references_tiny import kinds, layouts, tiny

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.binding import decoded_tokens
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.stock_model import write_stock_model
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.compare.published import Decoder

pytestmark = pytest.mark.usefixtures("fast_binding")


def run(build: Build, path: Path, flash_attn: bool) -> None:
    argv = [build.executable, "--model", path, "--prompt", "96", "--gen", "4", "--flash", str(int(flash_attn))]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert '"finite":true' in ran.stdout


@pytest.mark.parametrize("name", layouts())
def test_the_build_that_it_names_runs_a_layout(
    llama_build: Build, patched_build: Build, tmp_path: Path, name: str
) -> None:
    whole, reference = layouts()[name], tiny(layouts()[name])
    assert isinstance(reference.shape, Layout)
    assert (reference.patched, reference.flash_attn) == (whole.patched, whole.flash_attn)
    LLAMA_CPP.export(reference.shape, "q4_0", RandomWeights(), tmp_path / "model.gguf")
    run(patched_build if reference.patched else llama_build, tmp_path / "model.gguf", reference.flash_attn)


@pytest.mark.parametrize("name", kinds())
def test_the_stock_build_runs_it(llama_build: Build, tmp_path: Path, name: str) -> None:
    reference = tiny(kinds()[name])
    assert isinstance(reference.shape, Decoder)
    path = tmp_path / "model.gguf"
    write_stock_model(reference.shape.model(), RandomWeights(), path)
    run(llama_build, path, reference.flash_attn)
    if reference.flash_attn:  # the binding leaves it to llama.cpp
        chosen = decoded_tokens(llama_build, path, list(range(40)), 4)
        assert len(chosen) == 4
        assert all(0 <= token < 512 for token in chosen)
